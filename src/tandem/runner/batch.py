"""StepPlan → arrays → Batch. It knows spans, rows and tokens; it does not know models, devices or samplers.

pack(plan, rows)      on the host, ahead of the device: numpy arrays of everything that the host knows
assemble(arrays, …)   where the step runs: the rest comes from the rows' state (carried tokens, slots, tables)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.attention.contract import Batch
from tandem.kernels.step import CARRIED, advance, spread
from tandem.plan import Span, Spans, StepPlan
from tandem.runner.rows import DeviceRows, HostRows


class PromptStretch(NamedTuple):
    """Prompt positions whose log-probabilities are wanted: rows of sampled_R from first on, behind the samples.

    targets  the tokens that follow them.      top  how many alternatives.
    """

    span: int
    first: int
    num_positions: int
    targets: np.ndarray
    top: int


@dataclass(slots=True)
class Layout:
    """The tokens of a step that is not steady, as the host knows them. See Batch; ids_T has CARRIED for the unknown.

    rows_T, rows_S, rows_R   state row of each token, span and sampled token.
    samples_S   whether the span samples.
    sampled_R                indices into T: first the spans that sample, then prompt_logprobs' positions.
    """

    ids_T: np.ndarray
    positions_T: np.ndarray
    rows_T: np.ndarray
    rows_S: np.ndarray
    starts_S: np.ndarray
    lengths_S: np.ndarray
    query_starts_S1: np.ndarray
    sampled_R: np.ndarray
    rows_R: np.ndarray
    samples_S: np.ndarray
    stretches: list[PromptStretch]

    @property
    def num_single(self) -> int:
        """How many spans at the front have one token."""
        longer = np.flatnonzero(np.diff(self.query_starts_S1) != 1)
        return int(longer[0]) if len(longer) else len(self.rows_S)

    @property
    def host_spans(self) -> list[tuple[int, int]]:
        """Start and length of each span."""
        return list(zip(self.starts_S.tolist(), np.diff(self.query_starts_S1).tolist(), strict=True))


@dataclass(slots=True)
class Packed:
    """A plan as arrays: only what the host knows and the device does not.

    layout        None if the step is the last one advanced by a token.
    decode        every span is one carried token and samples, so that rows' state alone makes the batch.
    places_C, blocks_C   new entries of the block tables, as flat indices and ids.
    failed        requests that were dropped from this step, and why.
    dropped       of those, the spans of the first plan that are left out here; plan.spans are the others.
    """

    plan: StepPlan
    num_spans: int
    num_samples: int
    decode: bool
    max_query: int
    max_length: int
    places_C: Sequence[int]
    blocks_C: Sequence[int]
    layout: Layout | None = None
    failed: dict[str, str] = field(default_factory=dict)
    dropped: dict[int, Span] = field(default_factory=dict)

    @property
    def stretches(self) -> list[PromptStretch]:
        return self.layout.stretches if self.layout is not None else []

    @property
    def sampling_spans(self) -> list[int]:
        """Indices of the spans that sample, in order."""
        return [index for index, span in enumerate(self.plan.spans) if span.samples]


class Packer:
    """Turns plans into arrays, in order, and keeps what the host knows of the rows."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.rows = HostRows(num_rows, max_blocks)
        self._last: Packed | None = None

    def pack(self, plan: StepPlan) -> Packed:
        """O(rows that changed) for a steady plan, O(spans + new tokens) otherwise."""
        rows, last = self.rows, self._last
        rows.depart(plan.departures)
        rows.arrive(plan.arrivals)
        places, blocks = rows.grow(plan.spans)
        if plan.steady and last is not None and last.decode and last.num_spans == len(plan.spans):
            count = last.num_spans
            packed = Packed(plan, count, count, True, 1, last.max_length + 1, places, blocks)
        else:
            packed = self._pack_layout(plan, places, blocks)
        self._last = packed
        return packed

    def without(self, packed: Packed, request: str, why: str) -> Packed:
        """The same step, already packed and the last one, without one of its requests, which fails.

        The tables' new entries stay: they are the others' as well, and do no harm to who is gone.
        """
        assert packed is self._last
        kept = [index for index in range(len(packed.plan.spans) + len(packed.dropped)) if index not in packed.dropped]
        place = next(i for i, span in enumerate(packed.plan.spans) if span.request == request)
        spans = [span for i, span in enumerate(packed.plan.spans) if i != place]
        masks = [(row, mask) for row, mask in packed.plan.masks if row != packed.plan.spans[place].row]
        plan = replace(packed.plan, spans=spans, masks=masks, steady=False)
        fewer = self._pack_layout(plan, packed.places_C, packed.blocks_C)
        fewer.decode = False
        fewer.failed = {**packed.failed, request: why}
        fewer.dropped = {**packed.dropped, kept[place]: packed.plan.spans[place]}
        self._last = fewer
        return fewer

    def _pack_layout(self, plan: StepPlan, places: Sequence[int], blocks: Sequence[int]) -> Packed:
        spans = plan.spans
        rows_S, starts_S, counts_S, samples_S = _columns(spans)
        carried_S = starts_S >= self.rows.num_known_R[rows_S]
        layout = self._lay_out(spans, rows_S, starts_S, counts_S, samples_S, carried_S)
        decode = bool(carried_S.all() and samples_S.all() and (counts_S == 1).all()) and not layout.stretches
        return Packed(
            plan, len(spans), int(samples_S.sum()), decode, int(counts_S.max(initial=0)),
            int(layout.lengths_S.max(initial=0)), places, blocks, layout,
        )  # fmt: skip

    def _lay_out(
        self, spans: Sequence[Span], rows_S: np.ndarray, starts_S: np.ndarray, counts_S: np.ndarray,
        samples_S: np.ndarray, carried_S: np.ndarray,
    ) -> Layout:  # fmt: skip
        query_starts_S1 = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(counts_S, out=query_starts_S1[1:])
        num_tokens = int(query_starts_S1[-1])
        firsts_T = np.repeat(starts_S - query_starts_S1[:-1], counts_S)
        ids_T = np.full(num_tokens, CARRIED, dtype=np.int64)
        for index in np.flatnonzero(~carried_S).tolist():
            span, first = spans[index], query_starts_S1[index]
            known = self.rows[span.row].tokens[span.start : span.start + span.length]
            ids_T[first : first + len(known)] = known
        last_S = query_starts_S1[1:].astype(np.int64) - 1
        stretches, extra = self._stretches(spans, rows_S, query_starts_S1, int(samples_S.sum()))
        return Layout(
            ids_T, firsts_T + np.arange(num_tokens), np.repeat(rows_S, counts_S), rows_S, starts_S,
            (starts_S + counts_S).astype(np.int32), query_starts_S1,
            np.concatenate((last_S[samples_S], *extra)), rows_S[samples_S], samples_S, stretches,
        )  # fmt: skip

    def _stretches(
        self, spans: Sequence[Span], rows_S: np.ndarray, query_starts_S1: np.ndarray, num_samples: int
    ) -> tuple[list[PromptStretch], list[np.ndarray]]:
        stretches: list[PromptStretch] = []
        extra: list[np.ndarray] = []
        first = num_samples
        for index in np.flatnonzero(self.rows.wants_prompt_R[rows_S]).tolist():
            span, row = spans[index], self.rows[rows_S[index]]
            count = min(span.start + span.length, row.prompt_length - 1) - span.start
            if count > 0 and row.params.prompt_logprobs is not None:
                targets = row.tokens[span.start + 1 : span.start + 1 + count]
                stretches.append(PromptStretch(index, first, count, targets, row.params.prompt_logprobs))
                extra.append(np.arange(query_starts_S1[index], query_starts_S1[index] + count, dtype=np.int64))
                first += count
        return stretches, extra


class Assembler:
    """Makes each step's Batch where the step runs, reusing the tensors of the last one while steps are steady.

    sampled_rows_R  state row of each span of the last batch that samples, int64.
    """

    def __init__(self, rows: DeviceRows, block_size: int) -> None:
        self._rows, self._block_size = rows, block_size
        self._turn_1 = torch.zeros(1, dtype=torch.int32)
        self.sampled_rows_R = torch.zeros(0, dtype=torch.int64)
        self._batch: Batch | None = None
        self._rows_S: Tensor | None = None
        self._starts_S: Tensor | None = None

    def assemble(self, packed: Packed) -> Batch:
        width = -(-packed.max_length // self._block_size)
        if packed.layout is None:
            assert self._batch is not None
            batch = self._batch
            if width > batch.tables_SB.shape[1]:
                batch.tables_SB = batch.tables_SB.new_empty((packed.num_spans, width))
            batch.max_length = packed.max_length
        else:
            batch = self._batch = self._fresh(packed, packed.layout, width)
        batch.scratch.clear()
        if packed.decode:
            assert self._rows_S is not None and self._starts_S is not None
            batch.host_spans = [(start, 1) for start in self._starts_S.tolist()]
            advance(
                self._rows_S, self._starts_S, self._rows.last_R, self._rows.tables_RB, self._block_size,
                self._turn_1, 1, batch.ids_T, batch.positions_T, batch.slots_T, batch.lengths_S, batch.tables_SB,
            )  # fmt: skip
        return batch

    def _fresh(self, packed: Packed, layout: Layout, width: int) -> Batch:
        ids_T, rows_T, rows_S = (torch.from_numpy(a) for a in (layout.ids_T, layout.rows_T, layout.rows_S))
        batch = Batch(
            ids_T=ids_T,
            positions_T=torch.from_numpy(layout.positions_T),
            slots_T=torch.empty_like(rows_T),
            query_starts_S1=torch.from_numpy(layout.query_starts_S1),
            lengths_S=torch.from_numpy(layout.lengths_S),
            tables_SB=torch.empty((packed.num_spans, width), dtype=torch.int32),
            sampled_R=None if packed.decode else torch.from_numpy(layout.sampled_R),
            num_decodes=layout.num_single,
            max_query=packed.max_query,
            max_length=packed.max_length,
        )
        self._rows_S, self._starts_S = rows_S, torch.from_numpy(layout.starts_S)
        self.sampled_rows_R = torch.from_numpy(layout.rows_R)
        if not packed.decode:
            batch.host_spans = layout.host_spans
            spread(
                ids_T, rows_T, batch.positions_T, rows_S, batch.lengths_S, self._rows.last_R, self._rows.tables_RB,
                self._block_size, batch.slots_T, batch.tables_SB,
            )  # fmt: skip
        return batch


def _columns(spans: Sequence[Span]) -> tuple[np.ndarray, ...]:
    """Row, start and length of each span, int64, and whether it samples."""
    others = spans.others if isinstance(spans, Spans) else spans
    table = np.array([(s.row, s.start, s.length, s.samples) for s in others], dtype=np.int64).reshape(-1, 4)
    rows_S, starts_S, counts_S, samples_S = (np.ascontiguousarray(column) for column in table.T)
    if isinstance(spans, Spans):
        ones = np.ones(len(spans.rows), dtype=np.int64)
        rows_S = np.concatenate((np.array(spans.rows, dtype=np.int64), rows_S))
        starts_S = np.concatenate((np.array(spans.offsets, dtype=np.int64) + spans.step, starts_S))
        counts_S, samples_S = np.concatenate((ones, counts_S)), np.concatenate((ones, samples_S))
    return rows_S, starts_S, counts_S, samples_S.astype(bool)
