"""The joint between bookkeeping and arithmetic: what a step will do and what it brought home.

Plain data, ints and strings only, so that a plan can be printed, pickled to ranks, recorded and replayed on any
runner. It knows neither the scheduler that makes it nor the runner that obeys it.

Plans are *differences*. A request that joins a batch is described once, by an Arrival, and given a *row*: a stable
place in the runner's state where its parameters, its block table and its last sampled token live until it departs.
From then on a Span says what it does in each step, and lists only the blocks that were added to its table.

    step 7   arrivals [request "a" → row 3, 40 tokens]   spans [row 3: 0..32, no sample]
    step 8                                               spans [row 3: 32..40, samples]
    step 9                                               spans [row 3: 40..41, samples]   ← token 40 was never seen
    step 10  departures [3]                                                                 by the host: it is *carried*

**Carry.** A span that starts at or behind the tokens its arrival listed begins with the token that the row sampled
last. The runner keeps that token on the device, in the row, so the host need not know it, at any depth.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from tandem.request import Change, Request, SamplingParams, TokenLogprobs


class Arrival(NamedTuple):
    """A request takes a row: new, or resumed after a preemption.

    tokens         every token the host knows: the prompt and, when resumed, the output so far.
    prompt_length  how many of them are prompt, as the user counts.
    cached         leading tokens whose K and V are already in the blocks that its first span names.
    resumed        it was preempted before, so its first token is not its first token.
    place          the order in which requests came in first, kept when one is resumed; 0: not known.
    """

    request: str
    row: int
    tokens: Sequence[int]
    prompt_length: int
    params: SamplingParams
    eos: Sequence[int] = ()
    cached: int = 0
    resumed: bool = False
    place: int = 0


class Span(NamedTuple):
    """One request's stretch in a step: positions start .. start+length of row's sequence are computed.

    blocks   ids added to the end of the row's block table since its last span (at an arrival: the whole table).
    samples  the last position's logits are sampled, and one token or more comes home.
    """

    request: str
    row: int
    start: int
    length: int
    blocks: Sequence[int]
    samples: bool


_new = tuple.__new__


@dataclass(slots=True)
class Spans(Sequence[Span]):
    """The spans of a step; those that move in lockstep are kept as columns, since nothing about them changes but step.

    Whoever looks at one gets a Span; a step that nobody looks at costs nothing a row. The columns are never changed,
    so that one set serves many steps.

    requests, rows, offsets  columns: span i is one carried token of requests[i], at offsets[i] + step.
    blocks                   row → ids added to its block table, of those columns where there are any.
    others                   spans behind them, in full.
    """

    step: int
    requests: Sequence[str]
    rows: Sequence[int]
    offsets: Sequence[int]
    blocks: dict[int, Sequence[int]]
    others: Sequence[Span]

    def __len__(self) -> int:
        return len(self.rows) + len(self.others)

    def __iter__(self) -> Iterator[Span]:
        step, blocks = self.step, self.blocks
        for request, row, offset in zip(self.requests, self.rows, self.offsets, strict=True):
            yield _new(Span, (request, row, offset + step, 1, blocks.get(row, ()), True))
        yield from self.others

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        num_columns = len(self.rows)
        index = range(len(self))[index]
        if index >= num_columns:
            return self.others[index - num_columns]
        row = self.rows[index]
        return Span(self.requests[index], row, self.offsets[index] + self.step, 1, self.blocks.get(row, ()), True)


def grown(spans: Sequence[Span]) -> Iterable[tuple[int, Sequence[int]]]:
    """Pairs (row, blocks) of those whose block table grows, found without a look at each."""
    if isinstance(spans, Spans):
        yield from spans.blocks.items()
        spans = spans.others
    for span in spans:
        if span.blocks:
            yield span.row, span.blocks


def names_of(spans: Sequence[Span]) -> Iterator[str]:
    """Whose the spans are, in order, without making any."""
    if isinstance(spans, Spans):
        yield from spans.requests
        spans = spans.others
    for span in spans:
        yield span.request


@dataclass(slots=True)
class StepPlan:
    """What one step does. Spans of one carried token (decodes) come first, then prefill chunks.

    departures    rows left since the last plan; their state may be dropped before this step's arrivals.
    block_copies  pairs (from, to), copied on the compute stream before the step reads or writes anything.
    masks         pairs (row, bitmask of allowed ids, little-endian words of 32) for rows bound by a grammar.
    num_decodes   how many of the spans, at the front, carry one token.
    steady        the spans are the last plan's, each one token further: nothing joined, left, moved or was copied;
                  only blocks may be new. A runner may then advance its own rows and copy nothing else.
    preempted     requests that lost their row, for want of blocks or because what they began with was never computed;
                  for observers.
    held          why the first waiting request did not join, for observers: rows, tokens, blocks; "": none waits.
    """

    step: int
    spans: Sequence[Span]
    arrivals: Sequence[Arrival] = ()
    departures: Sequence[int] = ()
    block_copies: Sequence[tuple[int, int]] = ()
    masks: Sequence[tuple[int, bytes]] = ()
    num_decodes: int = 0
    steady: bool = False
    preempted: Sequence[str] = ()
    held: str = ""

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(span.length for span in self.spans[self.num_decodes :])


@dataclass(slots=True)
class StepTimes:
    """When a step's stages ran, in seconds of the host's time.perf_counter. Device times are mapped to that clock."""

    submitted_s: float = 0.0
    ready_s: float = 0.0
    began_s: float = 0.0
    computed_s: float = 0.0
    home_s: float = 0.0


@dataclass(slots=True)
class StepResult:
    """What came home from one step.

    tokens           sampled ids, flat, in the order of the sampling spans.
    counts           how many of them each sampling span brought home; None: one each.
    logprobs         by index of the span, one entry a token, for rows that asked.
    prompt_logprobs  by index of the span, entries for positions start+1 .. start+length of the prompt
                     (position 0 has none: the planner puts it in), for rows that asked.
    failed           request → message, for requests that failed alone; their tokens are to be ignored.
    """

    step: int
    tokens: Sequence[int]
    counts: Sequence[int] | None = None
    logprobs: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)


_rest_of_change = [repeat(value) for value in Change("", ())[2:]]


class Changes(Sequence[Change]):
    """The changes of one step. Those that are one token and nothing else, nearly all, are kept as columns.

    requests, tokens  columns: requests[i] has the one token tokens[i] more.      others  the rest, in full.

    Whoever looks at each gets Changes, made once; whoever can read columns need not.
    """

    __slots__ = ("_all", "others", "requests", "tokens")

    def __init__(self, requests: Sequence[str], tokens: Sequence[int], others: Sequence[Change]) -> None:
        self.requests, self.tokens, self.others = requests, tokens, others
        self._all: list[Change] | None = None

    @property
    def all(self) -> list[Change]:
        if self._all is None:
            columns = zip(self.requests, zip(self.tokens, strict=True), *_rest_of_change, strict=False)
            self._all = list(map(_new, repeat(Change), columns))  # one pass in C
            self._all += self.others
        return self._all

    def __len__(self) -> int:
        return len(self.requests) + len(self.others)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.all)

    def __getitem__(self, index: Any) -> Any:
        return self.all[index]


def others_of(changes: Sequence[Change]) -> Sequence[Change]:
    """Those that may be more than one more token: the ends, among others. The rest is one token each."""
    return changes.others if isinstance(changes, Changes) else changes


class Planner(Protocol):
    """Decides what each step does. The loop calls it from one thread."""

    def add(self, request: Request, mask: "Mask | None" = None) -> None:
        """Take a request in, with its grammar if it has one.

        Raises RequestError (CapacityError included) if it can never run; nothing is kept then.
        """

    def abort(self, request: str) -> Change | None:
        """End a request now, in whatever state. Returns its last change, or None if it is unknown or has ended."""

    def plan(self) -> StepPlan | None:
        """What the next step does, or None if nothing can be computed until a step in flight is committed."""

    def commit(self, result: StepResult) -> Sequence[Change]:
        """Settle the oldest step in flight. One change a request that has news; ghosts have none."""

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""


class Mask(Protocol):
    """Follows one request's grammar on the host: which ids may come next."""

    def allowed(self) -> bytes | None:
        """Bitmask of the ids allowed next (see StepPlan.masks), or None while it is still being computed."""

    def accept(self, tokens: Sequence[int]) -> None:
        """The request sampled these tokens."""
