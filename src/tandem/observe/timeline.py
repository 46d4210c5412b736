"""Where a run's time goes, step by step, on host and device. It does not know how a step is planned or computed.

    host     plan 1 │settle 0│plan 2 │settle 1│            began → planned → submitted · waited → home → settled
    in        ▓ 1             ▓ 2                          submitted → ready
    compute  ██ 0 ████████████ 1 ████████████ 2 ███        began → computed
    out                  ▓ 0             ▓ 1               computed → home

Idle time of the device is the stretch between one step's ``computed`` and the next one's ``began``. Each stretch is
cut at the moments when the host and the copies of the next step moved on, and each piece has one cause:

    computed ─copy─ home ─settle─ plan begins ─plan─ planned ─launch─ submitted ─copy─ ready ─launch─ began
                          (nothing, while no request lived)
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.observer import Observer
from tandem.plan import StepPlan, StepResult, others_of
from tandem.request import Change, Request

CAUSES = ("plan", "settle", "launch", "copy", "nothing")
CAUSE_TEXTS = {
    "plan": "host planning",
    "settle": "host settling and delivering",
    "launch": "submit and launch",
    "copy": "copies",
    "nothing": "nothing to do",
}


@dataclass(slots=True)
class StepRecord:
    """One step's moments, all in seconds of time.perf_counter; device moments are 0 where a runner gives none."""

    step: int
    num_spans: int
    num_tokens: int
    num_decodes: int
    plan_began_s: float
    planned_s: float
    submitted_s: float
    wait_began_s: float = 0.0
    host_home_s: float = 0.0
    settled_s: float = 0.0
    ready_s: float = 0.0
    began_s: float = 0.0
    computed_s: float = 0.0
    home_s: float = 0.0
    empty_s: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class Totals:
    """Sums over all steps since the last reset, in seconds."""

    num_steps: int = 0
    num_tokens: int = 0
    first_began_s: float = 0.0
    last_computed_s: float = 0.0
    active_s: float = 0.0
    plan_s: float = 0.0
    submit_s: float = 0.0
    wait_s: float = 0.0
    settle_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))


class Timeline(Observer):
    """Keeps the last ``capacity`` steps for pictures and sums over all of them for figures.

    depth  steps in flight, for the letters of the slots.
    """

    def __init__(self, depth: int = 2, capacity: int = 4096) -> None:
        self.depth = depth
        self.steps: deque[StepRecord] = deque(maxlen=capacity)
        self._open: dict[int, StepRecord] = {}
        self._live: set[str] = set()
        self._empty_from_s = 0.0
        self._empty_s = (0.0, 0.0)
        self.totals = Totals()
        self._last: StepRecord | None = None

    def reset(self) -> None:
        """Forget what was, a warm-up for instance; steps in flight are kept."""
        self.steps.clear()
        self.totals = Totals()
        self._last = None

    def request_added(self, request: Request, now_s: float) -> None:
        if not self._live and self._empty_from_s:
            self._empty_s = (self._empty_from_s, now_s)
        self._live.add(request.id)

    def request_aborted(self, request: str, now_s: float) -> None:
        self._ended(request, now_s)

    def step_submitted(self, plan: StepPlan, began_s: float, planned_s: float, submitted_s: float) -> None:
        record = StepRecord(
            plan.step, len(plan.spans), plan.num_tokens, plan.num_decodes, began_s, planned_s, submitted_s
        )
        record.empty_s = self._empty_s
        self._open[plan.step] = record

    def step_collected(
        self,
        plan: StepPlan,
        result: StepResult,
        changes: Sequence[Change],
        began_s: float,
        home_s: float,
        settled_s: float,
    ) -> None:
        for change in others_of(changes):
            if change.finish is not None:
                self._ended(change.request, settled_s)
        record = self._open.pop(plan.step, None)
        if record is None:
            return
        record.wait_began_s, record.host_home_s, record.settled_s = began_s, home_s, settled_s
        times = result.times
        record.ready_s, record.began_s = times.ready_s, times.began_s
        record.computed_s, record.home_s = times.computed_s, times.home_s
        self.steps.append(record)
        self._add_up(record)
        self._last = record

    def recent(self, after: int, limit: int) -> list[StepRecord]:
        """The newest steps behind the step numbered ``after``, at most ``limit`` of them, oldest first: O(limit)."""
        found: list[StepRecord] = []
        for record in reversed(self.steps):
            if record.step <= after or len(found) == limit:
                break
            found.append(record)
        return found[::-1]

    def _ended(self, request: str, now_s: float) -> None:
        self._live.discard(request)
        if not self._live:
            self._empty_from_s = now_s

    def _add_up(self, record: StepRecord) -> None:
        totals = self.totals
        totals.num_steps += 1
        totals.num_tokens += record.num_tokens
        totals.plan_s += record.planned_s - record.plan_began_s
        totals.submit_s += record.submitted_s - record.planned_s
        totals.wait_s += record.host_home_s - record.wait_began_s
        totals.settle_s += record.settled_s - record.host_home_s
        if not record.computed_s:
            return
        began_s = max(record.began_s, totals.last_computed_s)
        totals.active_s += max(0.0, record.computed_s - began_s)
        if self._last is None or not self._last.computed_s:
            totals.first_began_s = totals.first_began_s or record.began_s
        else:
            for cause, seconds in idle_between(self._last, record).items():
                totals.idle_s[cause] += seconds
        totals.last_computed_s = max(totals.last_computed_s, record.computed_s)

    def numbers(self) -> dict[str, Any]:
        """Figures since the last reset. Shares are of the time from the first step's begin to the last one's end.

        Parts of the host are in seconds a step; idle_s and idle_share are by cause.
        """
        totals = self.totals
        span_s = max(0.0, totals.last_computed_s - totals.first_began_s)
        steps = max(1, totals.num_steps)
        return {
            "num_steps": totals.num_steps,
            "num_tokens": totals.num_tokens,
            "device_span_s": span_s,
            "device_active_s": totals.active_s,
            "device_active_share": totals.active_s / span_s if span_s else 0.0,
            "step_s": span_s / steps,
            "idle_s": dict(totals.idle_s),
            "idle_share": {cause: s / span_s if span_s else 0.0 for cause, s in totals.idle_s.items()},
            "host_step_s": {
                "plan": totals.plan_s / steps,
                "submit": totals.submit_s / steps,
                "wait": totals.wait_s / steps,
                "settle": totals.settle_s / steps,
            },
        }

    def lines(self) -> list[str]:
        """The figures for people, a line each."""
        numbers = self.numbers()
        host, idle_s, step_ms = numbers["host_step_s"], numbers["idle_s"], numbers["step_s"] * 1e3
        found = [
            f"steps            {numbers['num_steps']}, {step_ms:.3f} ms each; tokens {numbers['num_tokens']}",
            f"device active    {numbers['device_active_share']:.2%} of {numbers['device_span_s']:.3f} s",
        ]
        found += [
            f"idle: {CAUSE_TEXTS[cause]:<28} {idle_s[cause] * 1e3:10.3f} ms  {numbers['idle_share'][cause]:.2%}"
            for cause in CAUSES
        ]
        parts = "  ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in host.items())
        return [*found, f"host, µs a step  {parts}"]


def idle_between(before: StepRecord, after: StepRecord) -> dict[str, float]:
    """Seconds that the device waited between two steps that follow each other, by cause (see the module's drawing)."""
    found = dict.fromkeys(CAUSES, 0.0)
    cursor_s, end_s = before.computed_s, after.began_s

    def take(until_s: float, cause: str) -> None:
        nonlocal cursor_s
        until_s = min(until_s, end_s)
        if until_s > cursor_s:
            found[cause] += until_s - cursor_s
            cursor_s = until_s

    empty_from_s, empty_to_s = after.empty_s
    take(min(before.home_s, after.plan_began_s), "copy")
    if empty_to_s > cursor_s:
        take(empty_from_s, "settle")
        take(empty_to_s, "nothing")
    take(after.plan_began_s, "settle")
    take(after.planned_s, "plan")
    take(after.submitted_s, "launch")
    take(after.ready_s, "copy")
    take(end_s, "launch")
    return found
