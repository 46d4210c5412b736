"""A plan in the making, and what is remembered of it until it comes home. It decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.plan import Arrival, Span
from tandem.schedule.progress import Progress


class Flight(NamedTuple):
    """One step in flight.

    owners    whose the spans are, one each.
    sampling  whose the tokens will be, in the order of the sampling spans.
    indices   the span of each of those, or None if every span samples.
    num_decodes, num_prefill   decoding requests, and tokens of prompts.
    """

    step: int
    spans: Sequence[Span]
    owners: Sequence[Progress]
    sampling: Sequence[Progress]
    indices: Sequence[int] | None
    num_decodes: int
    num_prefill: int = 0


@dataclass(slots=True)
class Draft:
    """Decodes are put in first, each sampling; then prefill chunks. ending: whose last token this step samples."""

    step: int
    spans: list[Span] = field(default_factory=list)
    owners: list[Progress] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    masks: list[tuple[int, bytes]] = field(default_factory=list)
    ending: list[Progress] = field(default_factory=list)
    num_decodes: int = 0
    held: str = ""

    def flight(self) -> Flight:
        spans, owners = self.spans, self.owners
        if self.num_decodes == len(spans):
            return Flight(self.step, spans, owners, owners, None, self.num_decodes)
        indices = [*range(self.num_decodes)]
        indices += [i for i in range(self.num_decodes, len(spans)) if spans[i].samples]
        num_prefill = sum(span.length for span in spans[self.num_decodes :])
        return Flight(
            self.step, spans, owners, [owners[i] for i in indices], indices, self.num_decodes, num_prefill
        )  # fmt: skip
