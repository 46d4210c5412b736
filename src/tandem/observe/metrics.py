"""Counters, gauges and histograms of the engine, as plain Python. It knows no exporter and no HTTP.

Everything is counted per *stream*: a request with n answers is n streams, each accepted, ended and timed once, so
that ``accepted = finished + aborted + failed + live`` holds at any moment. Prompt tokens are counted once for all n,
as a client's usage has them, and only when the first token shows that the prompt was computed.

    arrival ──queue──► first planned ── prefill ──► first token ── inter-token ──► … ──► last token
       └───────────────── TTFT ─────────────────────────┘                               │
       └───────────────────────────── end to end ───────────────────────────────────────┘
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.observer import Observer
from tandem.plan import Changes, Span, StepPlan, StepResult, names_of, others_of
from tandem.request import Change, Request

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts by upper bound, with sum and count, as Prometheus keeps them: a value equal to a bound is within it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.count += times

    def cumulative(self) -> list[tuple[float, int]]:
        """Pairs (upper bound, how many are within it); the last bound is infinity."""
        found, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class Sample(NamedTuple):
    """One series: its labels and a number, or a histogram."""

    labels: dict[str, str]
    value: "float | Histogram"


class Family(NamedTuple):
    """One metric as an exporter wants it. kind: counter, gauge or histogram; name without prefix or "_total"."""

    name: str
    kind: str
    help: str
    samples: list[Sample]


@dataclass(slots=True)
class _Stream:
    """What is remembered of a live stream: no list grows with its length."""

    arrival_s: float
    prompt_length: int
    counts_prompt: bool
    running: bool = False
    planned_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    num_generated: int = 0


class Metrics(Observer):
    """Counts what the engine's moments tell. Read the attributes, or ``families()`` for an exporter."""

    def __init__(self) -> None:
        self.num_accepted = 0
        self.num_refused = 0
        self.num_finished = {"stop": 0, "length": 0}
        self.num_aborted = 0
        self.num_failed = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.num_ghosts = 0
        self.num_steps = 0
        self.num_step_tokens = 0
        self.host_s = {"plan": 0.0, "submit": 0.0, "wait": 0.0, "settle": 0.0}
        self.queue_s = Histogram(LATENCY_BUCKETS_S)
        self.prefill_s = Histogram(LATENCY_BUCKETS_S)
        self.decode_s = Histogram(LATENCY_BUCKETS_S)
        self.ttft_s = Histogram(LATENCY_BUCKETS_S)
        self.itl_s = Histogram(TOKEN_GAP_BUCKETS_S)
        self.tpot_s = Histogram(TOKEN_GAP_BUCKETS_S)
        self.e2e_s = Histogram(LATENCY_BUCKETS_S)
        self.prompt_lengths = Histogram(COUNT_BUCKETS)
        self.generated_lengths = Histogram(COUNT_BUCKETS)
        self.num_running = 0
        self.num_waiting = 0
        self._live: dict[str, _Stream] = {}
        self._lockstep_s = 0.0
        self._lockstep_spans: Sequence[Span] = ()
        self._num_lockstep = 0

    def request_added(self, request: Request, now_s: float) -> None:
        self.num_accepted += 1
        self.num_waiting += 1
        self._live[request.id] = _Stream(request.arrival_s or now_s, len(request.prompt), request.fork_of is None)

    def request_refused(self, request: Request, error: Exception, now_s: float) -> None:
        self.num_refused += 1

    def request_aborted(self, request: str, now_s: float) -> None:
        stream = self._live.get(request)
        if stream is not None:
            self._end(request, stream, "abort", now_s)

    def step_submitted(self, plan: StepPlan, began_s: float, planned_s: float, submitted_s: float) -> None:
        self.host_s["plan"] += planned_s - began_s
        self.host_s["submit"] += submitted_s - planned_s
        for name in plan.preempted:
            self.num_preemptions += 1
            self._set_running(name, False)
        for arrival in plan.arrivals:
            stream = self._set_running(arrival.request, True)
            if stream is not None and not stream.planned_s:
                stream.planned_s = began_s
                self.queue_s.observe(max(0.0, began_s - stream.arrival_s))

    def step_collected(
        self,
        plan: StepPlan,
        result: StepResult,
        changes: Sequence[Change],
        began_s: float,
        home_s: float,
        settled_s: float,
    ) -> None:
        self.num_steps += 1
        self.num_step_tokens += plan.num_tokens
        self.host_s["wait"] += home_s - began_s
        self.host_s["settle"] += settled_s - home_s
        if plan.steady and self._lockstep_s and result.counts is None and not result.failed:
            self._steady(plan, changes, settled_s)
            return
        self._catch_up()
        self._lockstep_s = settled_s if plan.num_decodes == len(plan.spans) else 0.0
        gaps: dict[float, int] = {}
        num_heard = 0
        for request in changes.requests if isinstance(changes, Changes) else ():
            known = self._live.get(request)
            if known is None:
                continue
            num_heard += 1
            if not known.first_s:
                self._tokens(known, 1, 0, settled_s, gaps)
                continue
            gap_s = settled_s - known.last_s  # most by far: as _tokens, in half the time
            gaps[gap_s] = gaps.get(gap_s, 0) + 1
            known.last_s = settled_s
            known.num_generated += 1
            self.num_generated_tokens += 1
        for change in others_of(changes):
            stream = self._live.get(change.request)
            if stream is None:
                continue
            if change.tokens:
                num_heard += 1
                self._tokens(stream, len(change.tokens), change.cached, settled_s, gaps)
            if change.finish is not None:
                self._end(change.request, stream, change.finish, settled_s)
        for gap_s, times in gaps.items():
            self.itl_s.observe(gap_s, times)
        num_sampling = plan.num_decodes + sum(span.samples for span in plan.spans[plan.num_decodes :])
        self.num_ghosts += max(0, num_sampling - num_heard - len(result.failed))

    def _steady(self, plan: StepPlan, changes: Sequence[Change], now_s: float) -> None:
        """A step of the same streams as the last: each has one token more, so one count serves for all of them."""
        self.itl_s.observe(now_s - self._lockstep_s, len(changes))
        self.num_generated_tokens += len(changes)
        self.num_ghosts += len(plan.spans) - len(changes)
        self._lockstep_s, self._lockstep_spans = now_s, plan.spans
        self._num_lockstep += 1
        ended = [change for change in others_of(changes) if change.finish is not None]
        if ended:
            self._catch_up()
            for change in ended:
                self._end(change.request, self._live[change.request], change.finish or "", now_s)

    def _catch_up(self) -> None:
        """Write into each stream what it got while all moved in step."""
        if self._num_lockstep:
            for name in names_of(self._lockstep_spans):
                if stream := self._live.get(name):
                    stream.num_generated += self._num_lockstep
                    stream.last_s = self._lockstep_s
            self._num_lockstep = 0

    def _set_running(self, request: str, running: bool) -> _Stream | None:
        stream = self._live.get(request)
        if stream is not None and stream.running != running:
            stream.running = running
            self.num_running += 1 if running else -1
            self.num_waiting += -1 if running else 1
        return stream

    def _tokens(self, stream: _Stream, count: int, cached: int, now_s: float, gaps: dict[float, int]) -> None:
        stream.num_generated += count
        self.num_generated_tokens += count
        if stream.first_s:
            gap_s = (now_s - stream.last_s) / count
            gaps[gap_s] = gaps.get(gap_s, 0) + count
        else:
            stream.first_s = now_s
            self.ttft_s.observe(now_s - stream.arrival_s)
            self.prefill_s.observe(now_s - (stream.planned_s or stream.arrival_s))
            self.prompt_lengths.observe(stream.prompt_length)
            if stream.counts_prompt:
                self.num_prompt_tokens += stream.prompt_length
                self.num_cached_tokens += cached
            if count > 1:
                gaps[0.0] = gaps.get(0.0, 0) + count - 1
        stream.last_s = now_s

    def _end(self, request: str, stream: _Stream, reason: str, now_s: float) -> None:
        del self._live[request]
        if stream.running:
            self.num_running -= 1
        else:
            self.num_waiting -= 1
        if reason == "abort":
            self.num_aborted += 1
        elif reason == "error":
            self.num_failed += 1
        else:
            self.num_finished[reason] += 1
            self.e2e_s.observe(now_s - stream.arrival_s)
            self.generated_lengths.observe(stream.num_generated)
            self.decode_s.observe(stream.last_s - stream.first_s)
            if stream.num_generated > 1:
                self.tpot_s.observe((stream.last_s - stream.first_s) / (stream.num_generated - 1))

    def check(self) -> None:
        """Assert that the figures add up."""
        ended = sum(self.num_finished.values()) + self.num_aborted + self.num_failed
        assert self.num_accepted == ended + len(self._live), (self.num_accepted, ended, len(self._live))
        assert self.num_running + self.num_waiting == len(self._live)
        assert self.num_running == sum(stream.running for stream in self._live.values())

    def families(self) -> list[Family]:
        """Every metric, all of them present from the start, at zero."""

        def counter(name: str, text: str, value: float) -> Family:
            return Family(name, "counter", text, [Sample({}, value)])

        def histogram(name: str, text: str, value: Histogram) -> Family:
            return Family(name, "histogram", text, [Sample({}, value)])

        by_reason = {**self.num_finished, "abort": self.num_aborted, "error": self.num_failed}
        return [
            counter("request_accepted", "Streams taken in.", self.num_accepted),
            counter("request_refused", "Requests that could not be honoured.", self.num_refused),
            Family("request_success", "counter", "Streams that ended, by reason.",
                   [Sample({"finished_reason": reason}, value) for reason, value in by_reason.items()]),
            counter("prompt_tokens", "Prompt tokens computed or taken from the cache.", self.num_prompt_tokens),
            counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", self.num_cached_tokens),
            counter("generation_tokens", "Tokens generated and delivered.", self.num_generated_tokens),
            counter("num_preemptions", "Requests that lost their blocks and began again.", self.num_preemptions),
            counter("ghost_rows", "Rows computed for requests that had ended.", self.num_ghosts),
            counter("steps", "Forward passes.", self.num_steps),
            counter("step_tokens", "Tokens computed in all steps.", self.num_step_tokens),
            Family("host_seconds", "counter", "Time of the engine's loop, by part.",
                   [Sample({"part": part}, value) for part, value in self.host_s.items()]),
            Family("num_requests_running", "gauge", "Streams in the batch.", [Sample({}, self.num_running)]),
            Family("num_requests_waiting", "gauge", "Streams that wait for a row.", [Sample({}, self.num_waiting)]),
            histogram("request_queue_time_seconds", "From arrival until first planned.", self.queue_s),
            histogram("request_prefill_time_seconds", "From first planned to the first token.", self.prefill_s),
            histogram("request_decode_time_seconds", "From the first token to the last.", self.decode_s),
            histogram("time_to_first_token_seconds", "From arrival to the first token.", self.ttft_s),
            histogram("inter_token_latency_seconds", "Between a stream's tokens.", self.itl_s),
            histogram("request_time_per_output_token_seconds", "Mean time a token after the first.", self.tpot_s),
            histogram("e2e_request_latency_seconds", "From arrival to the last token.", self.e2e_s),
            histogram("request_prompt_tokens", "Prompt lengths.", self.prompt_lengths),
            histogram("request_generation_tokens", "Answer lengths.", self.generated_lengths),
        ]  # fmt: skip
