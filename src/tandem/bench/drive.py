"""Runs a workload through a planner and a runner on this thread, and times each request. It knows no model.

One runner can serve several planners, one after another, at any depth up to its own: that is how static, synchronous
and tandem batching come to share weights, kernels and cache.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.bench.workload import Workload
from tandem.engine.contract import Add, Mail
from tandem.engine.loop import Loop
from tandem.errors import TandemError
from tandem.observe.metrics import Metrics
from tandem.observe.timeline import Timeline
from tandem.observer import Observer
from tandem.plan import Planner, StepPlan, StepResult
from tandem.request import Change, Request, SamplingParams

MAX_EMPTY_TURNS = 10_000


class SharedRunner:
    """A runner seen at a depth of its own choice, by a planner that finds all rows empty.

    Rows that an earlier planner left taken depart with this one's first plan.
    """

    def __init__(self, runner: Any, depth: int, taken: set[int] | None = None) -> None:
        if depth > runner.depth:
            raise TandemError(f"depth {depth} is more than the runner's, {runner.depth}.")
        self._runner, self.depth = runner, depth
        self.facts = runner.facts
        self.taken = set(taken or ())
        self._stale = tuple(self.taken)

    def submit(self, plan: StepPlan) -> Any:
        if self._stale:
            plan = dataclasses.replace(plan, departures=(*self._stale, *plan.departures))
            self._stale = ()
        self.taken.difference_update(plan.departures)
        self.taken.update(arrival.row for arrival in plan.arrivals)
        return self._runner.submit(plan)

    def collect(self, ticket: Any) -> StepResult:
        result: StepResult = self._runner.collect(ticket)
        return result

    def close(self) -> None:
        """Leave the runner to who built it."""


class Record:
    """One request as its client sees it. Times are seconds of time.perf_counter; tokens come with times_s."""

    __slots__ = ("arrival_s", "error", "finish", "times_s", "tokens")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self.finish: str | None = None
        self.error: str | None = None


class RecordingMailbox:
    """The loop's mailbox: hands over requests that are all there at the start, records what comes back.

    News is kept as it comes and looked at when the records are asked for, since a client's work is not the loop's.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._mail: list[Mail] = [Add(request) for request in requests]
        self._records = {request.id: Record(request.arrival_s) for request in requests}
        self._heard: list[tuple[float, Sequence[Change]]] = []

    def take(self) -> Sequence[Mail]:
        mail, self._mail = self._mail, []
        return mail

    def wait(self, timeout_s: float | None) -> None:
        time.sleep(0.0)

    def deliver(self, changes: Sequence[Change]) -> None:
        self._heard.append((time.perf_counter(), changes))

    @property
    def records(self) -> dict[str, Record]:
        """By request, what has come so far."""
        heard, self._heard = self._heard, []
        for now_s, changes in heard:
            for change in changes:
                record = self._records[change.request]
                record.tokens.extend(change.tokens)
                record.times_s.extend([now_s] * len(change.tokens))
                if change.finish is not None:
                    record.finish, record.error = change.finish, change.error
        return self._records

    def answer(self, number: int, value: Any, error: TandemError | None) -> None: ...

    def report(self, statistics: dict[str, Any]) -> None: ...

    def stopped(self, error: TandemError | None) -> None: ...


@dataclass(slots=True)
class Run:
    """What one pass over a workload gave."""

    name: str
    wall_s: float
    records: list[Record]
    timeline: Timeline | None = None
    metrics: Metrics | None = None
    padding_share: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        return [record.tokens for record in self.records]

    @property
    def num_new_tokens(self) -> int:
        return sum(len(record.tokens) for record in self.records)

    def as_dict(self) -> dict[str, Any]:
        """Figures as plain data: seconds, tokens a second, percentiles."""
        found: dict[str, Any] = {
            "name": self.name,
            "wall_s": self.wall_s,
            "new_tokens": self.num_new_tokens,
            "tokens_per_s": self.num_new_tokens / self.wall_s if self.wall_s else 0.0,
            "padding_share": self.padding_share,
            **latencies(self.records),
            **self.extra,
        }
        if self.timeline is not None:
            found["timeline"] = self.timeline.numbers()
        return found


def latencies(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """TTFT, ITL and end-to-end times at p50, p90 and p99, in seconds."""
    first, gaps, whole = [], [], []
    for record in records:
        if record.times_s:
            first.append(record.times_s[0] - record.arrival_s)
            whole.append(record.times_s[-1] - record.arrival_s)
            gaps += [after - before for before, after in zip(record.times_s, record.times_s[1:], strict=False)]
    return {"ttft_s": percentiles(first), "itl_s": percentiles(gaps), "e2e_s": percentiles(whole)}


def percentiles(values: Sequence[float], shares: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """The smallest value that at least so many per cent do not exceed (nearest rank); empty for no values."""
    ordered = sorted(values)
    return {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in shares} if ordered else {}


def requests_of(workload: Workload, params: SamplingParams, eos: Sequence[int] = ()) -> list[Request]:
    """Engine requests with the workload's lengths; params give the rest. They arrive now."""
    now_s = time.perf_counter()
    return [
        Request(
            f"{workload.name} #{index}",
            asked.prompt,
            dataclasses.replace(params, max_tokens=asked.max_tokens, ignore_eos=workload.ignore_eos),
            eos=tuple(eos),
            arrival_s=now_s,
        )
        for index, asked in enumerate(workload.asked)
    ]


def drive(
    name: str, planner: Planner, runner: SharedRunner, requests: Sequence[Request], observers: Sequence[Observer] = ()
) -> Run:
    """Run the requests to their ends.

    Raises what the engine died of, and TandemError if a request was refused or failed.
    """
    timeline, metrics = Timeline(depth=runner.depth, capacity=1 << 16), Metrics()
    mailbox = RecordingMailbox(requests)
    loop = Loop(planner, runner, mailbox, observers=[timeline, metrics, *observers])
    began_s = time.perf_counter()
    for request in requests:
        request.arrival_s = mailbox.records[request.id].arrival_s = began_s
    turn(loop)
    wall_s = time.perf_counter() - began_s
    records = list(mailbox.records.values())
    for record in records:
        if record.error is not None:
            raise TandemError(f"{name}: a request failed: {record.error}")
    run = Run(name, wall_s, records, timeline, metrics)
    run.padding_share = padding_share(planner, metrics)
    return run


def turn(loop: Loop) -> None:
    """Turn until everything has ended. Raises what the engine died of, TandemError if nothing moves any more."""
    num_empty = 0
    while not loop.idle or num_empty == 0:
        num_empty = 0 if loop.turn() else num_empty + 1
        if loop.error is not None:
            raise loop.error
        if num_empty > MAX_EMPTY_TURNS:
            raise TandemError("the planner plans nothing, yet it is not idle.", hint="this is a bug; please report it.")


def padding_share(planner: Planner, metrics: Metrics) -> float:
    """The share of computed tokens that nobody wanted: a static planner's own figure, else ghost rows."""
    statistics: Any = getattr(planner, "statistics", None)
    share = getattr(statistics(), "padding_share", None) if statistics is not None else None
    if share is not None:
        return float(share)
    return metrics.num_ghosts / metrics.num_step_tokens if metrics.num_step_tokens else 0.0
