"""A planner small enough to read at a glance, for driving runners in tests: random chunks, joins and preemptions."""

import random
from collections import deque
from dataclasses import dataclass, field, replace

from tandem.plan import Arrival, Span, Spans, StepPlan, StepResult
from tandem.request import SamplingParams, TokenLogprobs


def in_columns(step: int, spans: list[Span], num_decodes: int) -> Spans:
    """The same spans as the scheduler has them: those in lockstep as columns."""
    decodes = spans[:num_decodes]
    return Spans(
        step, [s.request for s in decodes], [s.row for s in decodes], [s.start - step for s in decodes],
        {s.row: s.blocks for s in decodes if s.blocks}, spans[num_decodes:],
    )  # fmt: skip


@dataclass
class Stream:
    id: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    row: int = -1
    listed: int = 0  # tokens in its last arrival
    computed: int = 0
    owed: int = 0
    blocks: list[int] = field(default_factory=list)
    was_preempted: bool = False
    held: bool = False  # is about to be preempted, once nothing of it is in flight
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.prompt) + len(self.output) + self.owed

    @property
    def done(self) -> bool:
        return self.error is not None or self.total - len(self.prompt) >= (self.params.max_tokens or 1)


class Drive:
    """plan and commit as a planner does; run() turns the crank at the runner's depth."""

    def __init__(
        self, requests, num_rows, num_blocks, block_size, *, chunk=None, seed=0, preempt=0.0, join=1.0, departed=()
    ):
        self.sequences = [Stream(id, list(prompt), params) for id, prompt, params in requests]
        self.waiting = deque(self.sequences)
        self.running: list[Stream] = []
        self.free_rows, self.free_blocks = list(range(num_rows)), list(range(num_blocks))
        self.block_size, self.chunk, self.preempt, self.join = block_size, chunk, preempt, join
        self.rng = random.Random(seed)
        self.rng.shuffle(self.free_blocks)
        self.flight: deque[tuple[StepPlan, list[Stream], list[int]]] = deque()
        self.departed: list[int] = list(departed)
        self.last_spans: list[tuple[str, int]] = []
        self.num_steady = self.num_preempted = 0
        self.step = 0

    def plan(self):
        in_flight = {id(s) for _, spans, _ in self.flight for s in spans}
        arrivals = []
        for sequence in list(self.running):
            if sequence.done and sequence.owed == 0:
                self._leave(sequence)
            elif sequence.held and id(sequence) not in in_flight:
                self._leave(sequence)
                sequence.was_preempted, sequence.held, sequence.computed = True, False, 0
                self.waiting.append(sequence)
                self.num_preempted += 1
            elif self.rng.random() < self.preempt:
                sequence.held = True
        while self.waiting and self.free_rows and (not self.running or self.rng.random() < self.join):
            needed = self._blocks_for(self.waiting[0].total + 2)
            if needed + sum(self._blocks_for(s.total + 2) for s in self.running) > len(self.free_blocks):
                break
            sequence = self.waiting.popleft()
            sequence.row = self.free_rows.pop(self.rng.randrange(len(self.free_rows)))
            tokens = sequence.prompt + sequence.output
            sequence.listed = len(tokens)
            arrivals.append(
                Arrival(
                    sequence.id, sequence.row, tokens, len(sequence.prompt), sequence.params,
                    resumed=sequence.was_preempted,
                )
            )  # fmt: skip
            self.running.append(sequence)
        return self._make(arrivals)

    def _make(self, arrivals):
        active = [s for s in self.running if not s.done and not s.held]
        decodes = [s for s in active if s.computed >= s.listed]
        prefills = [s for s in active if s.computed < s.listed]
        spans, whose = [], []
        for sequence in decodes + prefills:
            left = 1 if sequence.computed >= sequence.listed else sequence.listed - sequence.computed
            length = min(left, (self.chunk(self.rng) if callable(self.chunk) else self.chunk) or left)
            needed = self._blocks_for(sequence.computed + length) - len(sequence.blocks)
            added = [self.free_blocks.pop() for _ in range(max(0, needed))]
            sequence.blocks += added
            samples = sequence.computed + length >= sequence.listed
            spans.append(Span(sequence.id, sequence.row, sequence.computed, length, added, samples))
            sequence.computed += length
            sequence.owed += samples
            whose.append(sequence)
        if not spans:
            return None
        now = [(s.request, s.start) for s in spans]
        steady = not arrivals and not self.departed and not prefills
        steady = steady and now == [(request, start + 1) for request, start in self.last_spans]
        self.num_steady += steady
        self.last_spans = now
        if self.step % 2:
            spans = in_columns(self.step, spans, len(decodes))
        plan = StepPlan(
            self.step, spans, arrivals, self.departed, num_decodes=len(decodes), steady=steady
        )  # fmt: skip
        self.departed = []
        self.step += 1
        self.flight.append((plan, whose, []))
        return plan

    def _blocks_for(self, tokens):
        return -(-tokens // self.block_size)

    def _leave(self, sequence):
        self.running.remove(sequence)
        self.departed.append(sequence.row)
        self.free_rows.append(sequence.row)
        self.free_blocks += sequence.blocks
        sequence.blocks, sequence.row = [], -1

    def commit(self, result: StepResult):
        plan, whose, _ = self.flight.popleft()
        assert result.step == plan.step
        tokens = iter(result.tokens)
        for index, (span, sequence) in enumerate(zip(plan.spans, whose, strict=True)):
            token = next(tokens) if span.samples else None
            if span.request in result.failed:
                sequence.error = result.failed[span.request]
            if token is not None:
                sequence.owed -= 1
                if sequence.error is None:
                    sequence.output.append(token)
            sequence.logprobs += result.logprobs.get(index, ())
            if not sequence.was_preempted:
                sequence.prompt_logprobs += result.prompt_logprobs.get(index, ())
        assert next(tokens, None) is None, "more tokens came home than spans sampled"

    def run(self, runner, max_steps=5000):
        tickets = deque()
        for _ in range(max_steps):
            plan = self.plan() if len(tickets) < runner.depth else None
            if plan is not None:
                tickets.append(runner.submit(plan))
            if tickets and (plan is None or len(tickets) == runner.depth):
                self.commit(runner.collect(tickets.popleft()))
            elif plan is None and not self.waiting and not self.running:
                return {s.id: s.output for s in self.sequences}
        raise AssertionError("the drive did not end")


def greedy(max_tokens: int, **more) -> SamplingParams:
    return replace(SamplingParams(temperature=0.0, max_tokens=max_tokens), **more)
