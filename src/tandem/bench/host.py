"""What the host costs a step, on the null runner: no device, no model, pure decode. It times the loop's own parts.

The null runner makes its tokens up inside ``submit``; that time is the runner's, so it is measured by itself and
shown as "device", not as submit.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.bench.drive import SharedRunner
from tandem.engine.build import build
from tandem.engine.contract import Add, Mail
from tandem.engine.loop import Loop
from tandem.engine.null_model import KV_ELEMENTS
from tandem.errors import TandemError
from tandem.observe.metrics import Metrics
from tandem.observe.requests import RequestLedger
from tandem.observe.timeline import Timeline
from tandem.observer import Observer
from tandem.plan import Changes, Spans, StepPlan, StepResult, others_of
from tandem.request import Change, Request, SamplingParams

PROMPT = 16
MAX_TOKENS = 1 << 10


class HostFigure(NamedTuple):
    """Microseconds a step: medians of each part, and their sum. device: the null runner's made-up computing."""

    batch: int
    waiting: int
    plan_us: float
    submit_us: float
    collect_us: float
    settle_us: float
    total_us: float
    p99_us: float
    observers_us: float
    device_us: float


class _CountingMailbox:
    """Mail in, changes counted: what a front end in another process would cost the loop is not its matter."""

    def __init__(self) -> None:
        self.mail: list[Mail] = []
        self.num_changes = 0
        self.num_refused = 0

    def take(self) -> Sequence[Mail]:
        mail, self.mail = self.mail, []
        return mail

    def wait(self, timeout_s: float | None) -> None: ...

    def deliver(self, changes: Sequence[Change]) -> None:
        self.num_changes += len(changes)
        self.num_refused += sum(change.finish == "error" for change in others_of(changes))

    def answer(self, number: int, value: Any, error: TandemError | None) -> None: ...

    def report(self, statistics: dict[str, Any]) -> None: ...

    def stopped(self, error: TandemError | None) -> None: ...


class _TimedRunner(SharedRunner):
    """Knows how long the wrapped runner took in submit."""

    def __init__(self, runner: Any, depth: int) -> None:
        super().__init__(runner, depth)
        self.took_s: list[float] = []

    def submit(self, plan: StepPlan) -> Any:
        began_s = time.perf_counter()
        ticket = super().submit(plan)
        self.took_s.append(time.perf_counter() - began_s)
        return ticket


def measure_host(
    settings: Mapping[str, Any], batch: int, waiting: int, *, num_steps: int = 300, depth: int = 2
) -> tuple[HostFigure, dict[str, Any]]:
    """Decode batch requests for num_steps steps while waiting more stand in the queue; also the settings in force."""
    chosen = {
        **settings, "device": "null", "max_num_seqs": batch, "max_waiting": batch + waiting + 1, "depth": depth,
        "max_model_len": PROMPT + MAX_TOKENS, "kv_cache_memory": batch * (PROMPT + MAX_TOKENS + 16) * KV_ELEMENTS * 4,
        "max_batch_tokens": max(8192, batch),
    }  # fmt: skip
    built = build(chosen)
    planner, runner = built.scheduler(), built.runner
    timed, mailbox, timeline = _TimedRunner(runner, depth), _CountingMailbox(), Timeline(depth, capacity=num_steps)
    loop = Loop(planner, timed, mailbox, observers=[timeline])
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    mailbox.mail = [Add(Request(f"r{i}", [i % 97 + 1] * PROMPT, greedy)) for i in range(batch + waiting)]
    _turn(loop, lambda: timeline.totals.num_steps > 10 and bool(timeline.steps) and _is_decode(timeline, batch))
    timeline.reset()
    timed.took_s.clear()
    gc.collect()
    gc.freeze()
    try:
        _turn(loop, lambda: timeline.totals.num_steps >= num_steps)
    finally:
        gc.unfreeze()
    if mailbox.num_refused:
        raise TandemError(f"{mailbox.num_refused} requests were refused.")
    steps = list(timeline.steps)[depth - 1 :]  # the first ones were in flight, and timed, before
    parts = {
        "plan": [r.planned_s - r.plan_began_s for r in steps],
        "settle": [r.settled_s - r.host_home_s for r in steps],
        "collect": [r.host_home_s - r.wait_began_s for r in steps],
        "submit": [r.submitted_s - r.planned_s - took for r, took in zip(steps, timed.took_s, strict=False)],
    }
    totals = [sum(values) for values in zip(*parts.values(), strict=False)]
    median = {name: _rank(values, 0.5) * 1e6 for name, values in parts.items()}
    figure = HostFigure(
        batch, waiting, median["plan"], median["submit"], median["collect"], median["settle"],
        _rank(totals, 0.5) * 1e6, _rank(totals, 0.99) * 1e6, _observers_us(batch), _rank(timed.took_s, 0.5) * 1e6,
    )  # fmt: skip
    return figure, built.resolved.as_dict()


def _is_decode(timeline: Timeline, batch: int) -> bool:
    return timeline.steps[-1].num_decodes == batch


def _turn(loop: Loop, done: Callable[[], bool]) -> None:
    for _ in range(1_000_000):
        if done():
            return
        loop.turn()
        if loop.error is not None:
            raise loop.error
    raise TandemError("the loop never reached pure decode.", hint="the KV pool may be too small for the batch.")


def _rank(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _observers_us(batch: int) -> float:
    """What timeline, metrics and request ledger cost at a steady decode step, µs."""
    names = [f"r{i}" for i in range(batch)]
    observers: list[Observer] = [Timeline(), Metrics(), RequestLedger()]
    for observer in observers:
        for name in names:
            observer.request_added(Request(name, [1], SamplingParams()), 0.0)
    took: list[float] = []
    for step in range(60):
        spans = Spans(step, names, range(batch), [0] * batch, {}, ())
        plan = StepPlan(step, spans, num_decodes=batch, steady=step > 0)
        result, changes = StepResult(step, [1] * batch), Changes(names, [1] * batch, ())
        began_s = time.perf_counter()
        for observer in observers:
            observer.step_submitted(plan, 1.0 + step, 1.1 + step, 1.2 + step)
            observer.step_collected(plan, result, changes, 1.2 + step, 1.3 + step, 1.4 + step)
        took.append(time.perf_counter() - began_s)
    return _rank(took, 0.5) * 1e6
