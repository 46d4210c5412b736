"""Metrics and the request ledger: figures that add up, told by hand-made moments."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.observe.metrics import Histogram, Metrics
from tandem.observe.requests import PARTS, RequestLedger
from tandem.observer import Observer
from tandem.plan import Arrival, Span, StepPlan, StepResult, StepTimes
from tandem.request import Change, Request, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


class Teller:
    """Tells observers of steps that each take one second on a device, one after another."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        self.now_s = 100.0
        self.step = 0
        self.last: tuple[str, ...] = ()

    def add(self, name: str, length: int = 4, fork_of: str | None = None) -> None:
        request = Request(name, [1] * length, PARAMS, fork_of=fork_of, arrival_s=self.now_s)
        for observer in self.observers:
            observer.request_added(request, self.now_s)

    def abort(self, name: str) -> None:
        for observer in self.observers:
            observer.request_aborted(name, self.now_s)

    def run(
        self, decodes: tuple[str, ...] = (), chunks: tuple[str, ...] = (), new: tuple[str, ...] = (),
        preempted: tuple[str, ...] = (), finish: dict[str, str] | None = None, held: str = "",
        failed: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """new: of those that run, who arrives. Everyone samples; finish: reasons, "resumed" is never one."""
        spans = [Span(name, 0, 4, 1, (), True) for name in decodes] + [Span(name, 0, 0, 4, (), True) for name in chunks]
        arrivals = [Arrival(name, 0, [1] * 4, 4, PARAMS) for name in new]
        steady = bool(decodes) and not (chunks or preempted or failed) and decodes == self.last
        self.last = decodes if not chunks else ()
        plan = StepPlan(
            self.step, spans, arrivals, num_decodes=len(decodes), steady=steady, preempted=preempted, held=held
        )
        t, self.step = self.now_s, self.step + 1
        times = StepTimes(t + 0.2, t + 0.25, t + 0.3, t + 1.3, t + 1.4)
        ends = finish or {}
        changes = [Change(s.request, (7,), ends.get(s.request)) for s in spans if s.request not in (failed or {})]  # type: ignore[arg-type]
        changes += [Change(name, finish="error", error=text) for name, text in (failed or {}).items()]
        for observer in self.observers:
            observer.step_submitted(plan, t, t + 0.1, t + 0.2)
            result = StepResult(plan.step, [7] * len(spans), failed=failed or {}, times=times)
            observer.step_collected(plan, result, changes, t + 0.2, t + 1.4, t + 1.5)
        self.now_s = t + 1.5


def test_histogram_bounds_are_inclusive_and_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 6), (math.inf, 7)]
    assert histogram.count == 7 and histogram.sum == pytest.approx(18.0)


def test_c27_figures_add_up() -> None:
    metrics = Metrics()
    teller = Teller(metrics)
    for name in ("a", "b", "c", "d", "evicted"):
        teller.add(name)
    for parent in ("e", "f"):
        teller.add(parent)
        for child in range(1, 3):
            teller.add(f"{parent}{child}", fork_of=parent)
    teller.add("gone while waiting")
    teller.add("gone in prefill")
    metrics.request_refused(Request("refused", [1], PARAMS), ValueError(), teller.now_s)
    names = ("a", "b", "c", "d", "evicted", "e", "e1", "e2", "f", "f1", "f2")
    teller.abort("gone while waiting")
    teller.abort("gone while waiting")
    teller.run(chunks=names, new=(*names, "gone in prefill"))
    teller.abort("gone in prefill")
    teller.run(decodes=names[:4], preempted=("evicted",))
    assert (metrics.num_running, metrics.num_waiting) == (10, 1)
    teller.run(chunks=("evicted",), decodes=names[5:], new=("evicted",), finish=dict.fromkeys(names[5:], "stop"))
    teller.run(decodes=(*names[:4], "evicted"), finish=dict.fromkeys(names[:5], "length"))
    metrics.check()
    assert metrics.num_accepted == 13 and metrics.num_refused == 1
    assert metrics.num_finished == {"stop": 6, "length": 5}
    assert (metrics.num_aborted, metrics.num_failed) == (2, 0)
    assert metrics.ttft_s.count == 11, "one first token a stream, none again after a resume"
    assert metrics.queue_s.count == 12, "the one aborted in prefill was planned, the one that waited was not"
    assert metrics.num_generated_tokens == 3 * 4 + 3 + 2 * 6
    assert metrics.generated_lengths.sum == metrics.num_generated_tokens
    assert metrics.num_prompt_tokens == 7 * 4, "a prompt with three answers counts once"
    assert metrics.num_preemptions == 1
    assert metrics.queue_s.sum / 12 <= metrics.ttft_s.sum / 11 <= metrics.e2e_s.sum / 11
    assert (metrics.num_running, metrics.num_waiting) == (0, 0)
    assert metrics.itl_s.count == metrics.num_generated_tokens - metrics.ttft_s.count


def test_failures_and_ghosts_are_counted() -> None:
    metrics = Metrics()
    teller = Teller(metrics)
    teller.add("a")
    teller.add("b")
    teller.run(chunks=("a", "b"), new=("a", "b"))
    teller.run(decodes=("a", "b"), failed={"a": "no"}, finish={"b": "stop"})
    metrics.check()
    assert metrics.num_failed == 1 and metrics.num_finished["stop"] == 1 and metrics.num_ghosts == 0
    plan = StepPlan(9, [Span("b", 0, 5, 1, (), True)], num_decodes=1)
    metrics.step_collected(plan, StepResult(9, [3]), [], 0.0, 1.0, 2.0)
    assert metrics.num_ghosts == 1


def test_c28_every_series_is_there_at_zero() -> None:
    families = Metrics().families()
    names = [family.name for family in families]
    assert len(set(names)) == len(names) and {family.kind for family in families} == {"counter", "gauge", "histogram"}
    for family in families:
        for sample in family.samples:
            value = sample.value
            assert (value.count if isinstance(value, Histogram) else value) == 0
            assert set(sample.labels) <= {"finished_reason", "part"}
    assert all("second" in name for name in names if name.endswith("_s") or "time" in name)


def test_ledger_explains_a_life() -> None:
    ledger = RequestLedger()
    teller = Teller(ledger)
    teller.add("first")
    teller.run(chunks=("first",), new=("first",), held="")
    teller.add("a")
    teller.run(decodes=("first",), held="rows")
    teller.run(decodes=("first",), held="rows", finish={"first": "stop"})
    teller.now_s += 0.25
    teller.run(chunks=("a",), new=("a",))
    teller.run(decodes=("a",))
    teller.add("b")
    teller.run(chunks=("b",), new=("b",), preempted=("a",))
    teller.run(chunks=("a",), decodes=("b",), new=("a",))
    teller.run(decodes=("a",), finish={"a": "length"})
    account = ledger.account("a")
    assert account is not None
    parts = account.parts_s
    assert sum(parts.values()) == pytest.approx(account.total_s, rel=1e-9)
    assert account.total_s == pytest.approx(7 * 1.5 + 0.25)
    assert account.queue_why == pytest.approx({"rows": 3.25}) and parts["queue"] == pytest.approx(3.25)
    assert parts["prefill"] == pytest.approx(2.0) and parts["decode"] == pytest.approx(2.0)
    assert parts["preempted"] == pytest.approx(1.5)
    assert parts["delivery"] == pytest.approx(0.2)
    assert (account.num_chunks, account.num_decodes, account.num_preemptions, account.num_tokens) == (2, 2, 1, 4)
    assert account.as_dict()["finish"] == "length"
    assert ledger.account("b") is None, "b is alive"


def test_ledger_counts_what_was_in_flight_only_once() -> None:
    """At depth 2 a step begins on the device before the last one's news is delivered."""
    ledger = RequestLedger()
    ledger.request_added(Request("a", [1], PARAMS, arrival_s=1.0), 1.5)
    plans = [
        StepPlan(0, [Span("a", 0, 0, 1, (), True)], [Arrival("a", 0, [1], 1, PARAMS)]),
        StepPlan(1, [Span("a", 0, 1, 1, (), True)], num_decodes=1),
    ]
    ledger.step_submitted(plans[0], 2.0, 2.1, 2.2)
    ledger.step_submitted(plans[1], 2.3, 2.4, 2.5)
    for plan, times, settled_s, finish in (
        (plans[0], StepTimes(2.2, 2.2, 3.0, 4.0, 4.5), 4.7, None),
        (plans[1], StepTimes(2.5, 2.5, 4.1, 5.0, 5.5), 6.0, "length"),
    ):
        change = Change("a", (1,), finish)  # type: ignore[arg-type]
        ledger.step_collected(plan, StepResult(plan.step, [1], times=times), [change], 2.6, settled_s - 0.1, settled_s)
    account = ledger.account("a")
    assert account is not None and account.total_s == pytest.approx(5.0)
    expected = {"queue": 1.0, "host_gap": 1.0 + 0.1, "prefill": 1.0, "decode": 0.9, "delivery": 1.0}
    assert account.parts_s == pytest.approx({**dict.fromkeys(PARTS, 0.0), **expected})
    assert account.queue_why == pytest.approx({"mail": 0.5, "next plan": 0.5})


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["run", "add", "abort", "preempt", "pause"]), st.integers(0, 3)), max_size=40)
)
def test_parts_always_sum_and_maps_end_empty(moves: list[tuple[str, int]]) -> None:
    ledger, metrics = RequestLedger(capacity=5), Metrics()
    teller = Teller(ledger, metrics)
    waiting: list[str] = []
    running: list[str] = []
    for number, (move, which) in enumerate(moves):
        if move == "add":
            teller.add(f"r{number}")
            waiting.append(f"r{number}")
        elif move == "pause":
            teller.now_s += which / 8
        elif move == "abort" and waiting + running:
            name = (waiting + running)[which % len(waiting + running)]
            teller.abort(name)
            (waiting if name in waiting else running).remove(name)
        elif move == "preempt" and running:
            name = running.pop(which % len(running))
            teller.run(decodes=tuple(running), preempted=(name,), held="blocks")
            waiting.append(name)
        elif move == "run":
            new, waiting = tuple(waiting), []
            ended = running[:which]
            teller.run(decodes=tuple(running), chunks=new, new=new, finish=dict.fromkeys(ended, "stop"))
            running = running[len(ended) :] + list(new)
        metrics.check()
    for name in waiting + running:
        teller.abort(name)
    metrics.check()
    assert metrics.num_running == metrics.num_waiting == 0
    assert len(ledger.accounts()) <= 5 and not ledger._open
    for account in ledger.accounts():
        assert sum(account.parts_s.values()) == pytest.approx(account.total_s, rel=1e-9, abs=1e-9)
        assert account.parts_s["queue"] == pytest.approx(sum(account.queue_why.values()), abs=1e-9)


def test_lockstep_counts_as_step_by_step_does() -> None:
    """Steady steps are summed for all streams at once; the figures must be those of one by one."""

    def run(steady: bool) -> tuple[Metrics, RequestLedger]:
        metrics, ledger = Metrics(), RequestLedger()
        teller = Teller(metrics, ledger)
        for name in "abc":
            teller.add(name)
        teller.run(chunks=("a", "b", "c"), new=("a", "b", "c"))
        for number in range(12):
            if not steady:
                teller.last = ()
            teller.now_s += number / 16
            teller.run(decodes=("a", "b", "c"), finish={"b": "stop"} if number == 9 else None)
            if number == 9:
                break
        for _ in range(3):
            if not steady:
                teller.last = ()
            teller.run(decodes=("a", "c"))
        teller.abort("c")
        teller.run(decodes=("a",), finish={"a": "length"})
        metrics.check()
        return metrics, ledger

    (fast, fast_ledger), (slow, slow_ledger) = run(True), run(False)
    for name in ("itl_s", "tpot_s", "ttft_s", "e2e_s", "generated_lengths"):
        ours, theirs = getattr(fast, name), getattr(slow, name)
        assert ours.counts == theirs.counts and ours.sum == pytest.approx(theirs.sum), name
    assert fast.num_generated_tokens == slow.num_generated_tokens == 3 + 30 + 6 + 1
    assert fast.num_ghosts == slow.num_ghosts == 0
    for name in "abc":
        ours, theirs = fast_ledger.account(name), slow_ledger.account(name)
        assert ours is not None and theirs is not None
        assert ours.parts_s == pytest.approx(theirs.parts_s)
        assert (ours.num_tokens, ours.num_decodes, ours.end_s) == (theirs.num_tokens, theirs.num_decodes, theirs.end_s)
        assert sum(ours.parts_s.values()) == pytest.approx(ours.total_s, rel=1e-9)


def test_prefill_decode_and_waits_by_reason_add_up() -> None:
    metrics, ledger = Metrics(), RequestLedger()
    teller = Teller(metrics, ledger)
    teller.add("a")
    teller.run(chunks=("a",), new=("a",), held="")
    teller.add("b")
    teller.run(decodes=("a",), held="rows")
    teller.run(decodes=("a",), finish={"a": "stop"}, held="rows")
    teller.run(chunks=("b",), new=("b",), finish={"b": "length"})
    assert metrics.prefill_s.count == 2 and metrics.prefill_s.sum == pytest.approx(3.0)
    assert metrics.decode_s.count == 2 and metrics.decode_s.sum == pytest.approx(3.0)
    assert ledger.queue_why_s["rows"] == pytest.approx(3.0)
    assert sum(ledger.queue_why_s.values()) == pytest.approx(metrics.queue_s.sum)
    assert set(ledger.queue_why_s) == {"mail", "next plan", "rows", "tokens", "blocks"}
