"""Holds a stream of plans against the contract of plan.py, for runners that verify. It computes nothing."""

from dataclasses import dataclass

from tandem.plan import Arrival, Span, StepPlan


@dataclass(slots=True)
class _Seen:
    arrival: Arrival
    blocks: list[int]
    next_start: int


class PlanCheck:
    """Feed it each plan in order; it raises AssertionError at the first that no runner could obey."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        self._num_blocks, self._block_size, self._num_rows = num_blocks, block_size, num_rows
        self._rows: dict[int, _Seen] = {}
        self._step = 0
        self._last: StepPlan | None = None

    def take(self, plan: StepPlan) -> None:
        assert plan.step == self._step + 1, f"step {plan.step} behind step {self._step}"
        assert plan.spans, "a plan without spans"
        assert len({span.row for span in plan.spans}) == len(plan.spans), "a row has two spans"
        for row in plan.departures:
            assert self._rows.pop(row, None) is not None, f"row {row} departs, but nobody holds it"
        for arrival in plan.arrivals:
            assert 0 <= arrival.row < self._num_rows and arrival.row not in self._rows, f"row {arrival.row} is taken"
            assert 0 <= arrival.cached < len(arrival.tokens), "nothing is left to compute"
            assert 0 < arrival.prompt_length <= len(arrival.tokens)
            self._rows[arrival.row] = _Seen(arrival, [], arrival.cached)
        for index, span in enumerate(plan.spans):
            self._take_span(span, is_decode=index < plan.num_decodes)
        written = {block for span in plan.spans for block in self._written(span)}
        for source, target in plan.block_copies:
            assert 0 <= source < self._num_blocks and 0 <= target < self._num_blocks and source != target
        assert len(written) == sum(len(self._written(span)) for span in plan.spans), "two spans write one block"
        for row, mask in plan.masks:
            assert mask and any(span.row == row and span.samples for span in plan.spans), "a mask for nobody"
        assert not plan.steady or self._is_steady(plan), "a plan calls itself steady and is not"
        self._step, self._last = plan.step, plan

    def _take_span(self, span: Span, is_decode: bool) -> None:
        seen = self._rows.get(span.row)
        assert seen is not None, f"a span on row {span.row}, which nobody holds"
        known = len(seen.arrival.tokens)
        assert seen.arrival.request == span.request, f"row {span.row} is another's"
        assert span.start == seen.next_start, f"a span starts at {span.start}, not at {seen.next_start}"
        assert span.length > 0
        assert is_decode == (span.start >= known), "decodes come first, and nothing else among them"
        assert is_decode or span.start + span.length <= known, "a chunk goes beyond what is known"
        assert not is_decode or (span.length == 1 and span.samples)
        assert span.samples == (span.start + span.length >= known), "a last token that is known must be sampled from"
        seen.blocks += span.blocks
        seen.next_start = span.start + span.length
        assert all(0 <= block < self._num_blocks for block in span.blocks)
        assert len(set(seen.blocks)) == len(seen.blocks), "a block is twice in a table"
        assert len(seen.blocks) * self._block_size >= seen.next_start, "the table is too short"

    def _written(self, span: Span) -> list[int]:
        first, last = span.start // self._block_size, (span.start + span.length - 1) // self._block_size
        return self._rows[span.row].blocks[first : last + 1]

    def _is_steady(self, plan: StepPlan) -> bool:
        if self._last is None or plan.arrivals or plan.departures or plan.block_copies or plan.masks:
            return False
        before, now = self._last.spans, plan.spans
        return (
            len(before) == len(now) == plan.num_decodes == self._last.num_decodes
            and all(a.row == b.row and a.start + 1 == b.start for a, b in zip(before, now, strict=True))
        )  # fmt: skip
