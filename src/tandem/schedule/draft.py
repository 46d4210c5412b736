"""A plan in the making, and what is remembered of it until it comes home. It decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from tandem.plan import Arrival, Span, Spans
from tandem.schedule.lockstep import NOBODY, Crew
from tandem.schedule.progress import Progress


class Flight(NamedTuple):
    """One step in flight.

    crew         whose the spans in lockstep are; each samples.    others  whose the spans behind them are.
    num_decodes, num_prefill   decoding requests, and tokens of prompts.      copies  blocks, (from, to).
    """

    step: int
    spans: Spans
    crew: Crew
    others: Sequence[Progress]
    num_decodes: int
    num_prefill: int
    copies: Sequence[tuple[int, int]]

    @property
    def owners(self) -> list[Progress]:
        """Whose the spans are, one each."""
        return [*self.crew.owners, *self.others]

    @property
    def sampling_others(self) -> list[Progress]:
        """Whose the tokens behind the crew's will be."""
        return list(compress(self.others, (span.samples for span in self.spans.others)))

    @property
    def indices(self) -> list[int]:
        """The spans that sample."""
        num_crew = len(self.crew.owners)
        behind = [num_crew + i for i, span in enumerate(self.spans.others) if span.samples]
        return [*range(num_crew), *behind]


@dataclass(slots=True)
class Draft:
    """Decodes are put in first, each sampling; then prefill chunks.

    crew, blocks   the decodes in lockstep, and the blocks that their rows get.
    spans, owners  the other spans: num_alone decodes, then prefill chunks.
    ending         whose last token this step samples.
    """

    step: int
    crew: Crew = NOBODY
    blocks: dict[int, Sequence[int]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    owners: list[Progress] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    masks: list[tuple[int, bytes]] = field(default_factory=list)
    ending: list[Progress] = field(default_factory=list)
    num_alone: int = 0
    held: str = ""

    @property
    def num_decodes(self) -> int:
        return len(self.crew.owners) + self.num_alone

    def flight(self) -> Flight:
        crew = self.crew
        spans = Spans(self.step, crew.requests, crew.rows, crew.offsets, self.blocks, self.spans)
        num_prefill = sum(span.length for span in self.spans[self.num_alone :])
        return Flight(self.step, spans, crew, self.owners, self.num_decodes, num_prefill, self.copies)
