"""The request ledger: where one request's latency went. It does not know why the planner chose as it did.

A cursor moves from a request's arrival to its end, and each stretch that it passes goes to one part, so the parts
sum to the whole:

    arrival ─queue─► planned ─behind, host gap─► began ─prefill─► computed ─behind, host gap─► began ─decode─► computed
    … ─delivery─► end. Behind: other requests' steps ran on the device; host gap: the device stood still.
    preempted: from the plan that took its blocks until the plan that gave it a row again
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandem.observer import Observer
from tandem.plan import Changes, Span, Spans, StepPlan, StepResult, names_of, others_of
from tandem.request import Change, Request

NEXT_PLAN = "next plan"
PARTS = ("queue", "preempted", "prefill", "decode", "behind", "host_gap", "delivery")
REASONS = ("mail", NEXT_PLAN, "rows", "tokens", "blocks")


@dataclass(slots=True)
class Account:
    """One request's time, in seconds by part, and what was counted on the way.

    queue      waiting for a row; queue_why splits it by what the newest plan said.
    preempted  without a row after having had one.          prefill, decode  its own steps on the device.
    behind     other requests' steps ran on the device.      host_gap         the device stood still for the host.
    delivery   from the end of its last step on the device until its news was delivered.
    """

    request: str
    arrival_s: float
    end_s: float = 0.0
    finish: str | None = None
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    queue_why: dict[str, float] = field(default_factory=dict)
    num_chunks: int = 0
    num_decodes: int = 0
    num_preemptions: int = 0
    num_tokens: int = 0
    num_cached: int = 0

    @property
    def total_s(self) -> float:
        return self.end_s - self.arrival_s

    def as_dict(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "total_s": self.total_s,
            "finish": self.finish,
            "parts_s": dict(self.parts_s),
            "queue_why_s": dict(self.queue_why),
            "prefill_chunks": self.num_chunks,
            "decode_steps": self.num_decodes,
            "preemptions": self.num_preemptions,
            "tokens": self.num_tokens,
            "cached_tokens": self.num_cached,
        }


@dataclass(slots=True)
class _Open:
    """A live request: its account, how far it is accounted for, and whether it has a row."""

    account: Account
    cursor_s: float
    why_at: dict[str, float]
    state: str = "queue"


class _Sums(NamedTuple):
    """What has passed for all in lockstep since the start; of one of them, less what it was when that one joined."""

    gap_s: float = 0.0
    decode_s: float = 0.0
    num_steps: int = 0


class RequestLedger(Observer):
    """Keeps the accounts of live requests and of the last ``capacity`` that ended.

    queue_why_s   seconds that requests have waited for a row, by reason, over all that wait no more.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.queue_why_s: dict[str, float] = dict.fromkeys(REASONS, 0.0)
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, Account] = {}
        self._order: deque[str] = deque()
        self._capacity = capacity
        self._why_s: dict[str, float] = {}
        self._why, self._why_from_s = NEXT_PLAN, 0.0
        self._device_s = 0.0
        self._sums = _Sums()
        self._members: dict[str, _Sums] = {}
        self._names: Sequence[str] = ()

    def account(self, request: str) -> Account | None:
        """The account of a request that has ended, or None if it is unknown, alive or forgotten."""
        return self._ended.get(request)

    def accounts(self) -> list[Account]:
        """Accounts of requests that ended, oldest first."""
        return [self._ended[name] for name in self._order]

    def request_added(self, request: Request, now_s: float) -> None:
        arrival_s = request.arrival_s or now_s
        account = Account(request.id, arrival_s)
        if now_s > arrival_s:
            account.queue_why["mail"] = now_s - arrival_s
            account.parts_s["queue"] = now_s - arrival_s
        self._open[request.id] = _Open(account, max(now_s, arrival_s), self._clock(now_s))

    def request_aborted(self, request: str, now_s: float) -> None:
        self._close(request, "abort", now_s)

    def step_submitted(self, plan: StepPlan, began_s: float, planned_s: float, submitted_s: float) -> None:
        self._why_s, self._why_from_s = self._clock(began_s), began_s
        self._why = plan.held or NEXT_PLAN
        for name in plan.preempted:
            if entry := self._open.get(name):
                self._leave(name)
                self._pass(entry, began_s, "behind")
                entry.state = "preempted"
                entry.account.num_preemptions += 1
        for arrival in plan.arrivals:
            if entry := self._open.get(arrival.request):
                self._admit(entry, began_s)

    def step_collected(
        self,
        plan: StepPlan,
        result: StepResult,
        changes: Sequence[Change],
        began_s: float,
        home_s: float,
        settled_s: float,
    ) -> None:
        times = result.times
        on_device = (times.began_s, times.computed_s) if times.computed_s else (began_s, home_s)
        spans: Sequence[Span] = plan.spans
        others = spans
        in_step: Sequence[str] = ()
        if isinstance(spans, Spans) and result.counts is None and not result.failed:
            in_step, others = spans.requests, spans.others
        joining = self._regroup(in_step)
        for name in joining:
            self._step(self._open[name], on_device, True)
        for index, name in enumerate(names_of(others), len(in_step)):
            if entry := self._open.get(name):
                self._step(entry, on_device, index < plan.num_decodes)
        self._move(on_device)
        for name in joining:
            self._open[name].account.num_tokens += 1
            self._members[name] = self._sums
        for name in changes.requests if isinstance(changes, Changes) and not in_step else ():
            if entry := self._open.get(name):
                entry.account.num_tokens += 1
        for change in others_of(changes):
            if entry := self._open.get(change.request):
                entry.account.num_tokens += len(change.tokens) - (change.request in self._members)
                entry.account.num_cached += change.cached
                if change.finish is not None:
                    self._close(change.request, change.finish, settled_s)

    def _regroup(self, names: Sequence[str]) -> list[str]:
        """From now on these are in lockstep. Returns those who were not: they take this step by themselves."""
        if names is self._names:
            return []
        self._names = names
        for name in self._members.keys() - set(names):
            self._leave(name)
        return [name for name in names if name not in self._members and name in self._open]

    def _move(self, on_device: tuple[float, float]) -> None:
        """What passes at a step is the same for all in lockstep, so it is summed once; a token each is counted, too."""
        sums, device_s, (began_s, computed_s) = self._sums, self._device_s, on_device
        self._sums = _Sums(
            sums.gap_s + max(0.0, began_s - device_s),
            sums.decode_s + max(0.0, computed_s - max(began_s, device_s)),
            sums.num_steps + 1,
        )
        self._device_s = max(device_s, computed_s)

    def _leave(self, name: str) -> None:
        """Write into the account what passed while it was in lockstep, if it was."""
        joined = self._members.pop(name, None)
        if joined is not None:
            entry, sums = self._open[name], self._sums
            account = entry.account
            account.parts_s["host_gap"] += sums.gap_s - joined.gap_s
            account.parts_s["decode"] += sums.decode_s - joined.decode_s
            account.num_decodes += sums.num_steps - joined.num_steps
            account.num_tokens += sums.num_steps - joined.num_steps
            entry.cursor_s = self._device_s

    def _step(self, entry: _Open, on_device: tuple[float, float], decodes: bool) -> None:
        account = entry.account
        if decodes:
            account.num_decodes += 1
        else:
            account.num_chunks += 1
        if entry.state != "running":
            return
        self._pass(entry, min(self._device_s, on_device[0]), "behind")
        self._pass(entry, on_device[0], "host_gap")
        self._pass(entry, on_device[1], "decode" if decodes else "prefill")

    def _admit(self, entry: _Open, now_s: float) -> None:
        if entry.state == "queue":
            self._end_queue(entry, now_s)
        self._pass(entry, now_s, entry.state)
        entry.state = "running"

    def _end_queue(self, entry: _Open, now_s: float) -> None:
        why = entry.account.queue_why
        for reason, seconds in self._clock(now_s).items():
            waited_s = seconds - entry.why_at.get(reason, 0.0)
            if waited_s > 0.0:
                why[reason] = why.get(reason, 0.0) + waited_s
        for reason, waited_s in why.items():
            self.queue_why_s[reason] = self.queue_why_s.get(reason, 0.0) + waited_s

    def _close(self, request: str, finish: str, now_s: float) -> None:
        self._leave(request)
        entry = self._open.pop(request, None)
        if entry is None:
            return
        account = entry.account
        if entry.state == "queue":
            self._end_queue(entry, now_s)
        self._pass(entry, now_s, "delivery" if entry.state == "running" else entry.state)
        account.end_s, account.finish = entry.cursor_s, finish
        if len(self._order) == self._capacity:
            del self._ended[self._order.popleft()]
        self._order.append(request)
        self._ended[request] = account

    def _clock(self, now_s: float) -> dict[str, float]:
        """Seconds that anything waiting has waited so far, by reason: O(reasons), however many wait."""
        clock = dict(self._why_s)
        if self._why_from_s:
            clock[self._why] = clock.get(self._why, 0.0) + max(0.0, now_s - self._why_from_s)
        else:
            self._why_from_s = now_s
        return clock

    @staticmethod
    def _pass(entry: _Open, until_s: float, part: str) -> None:
        if until_s > entry.cursor_s:
            entry.account.parts_s[part] += until_s - entry.cursor_s
            entry.cursor_s = until_s
