"""Decode steps as CUDA graphs: static buffers, batch buckets, what is baked in. It knows no plans.

All graphs share one memory pool: two never run at once, so the memory of the largest serves all. Their inputs are the
lanes below, allocated before; a graph of bucket b reads and writes the first b lanes.
"""

import bisect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.attention.contract import Batch
from tandem.kernels.sample import NOBODY, WINNER
from tandem.runner.batch import Layout, Packed
from tandem.runner.device_sampling import NUMBERS
from tandem.runner.streams import Streams

log = logging.getLogger("tandem.runner")

LISTED = (1, 2, 8, 16, 32, 64, 128, 256)  # batches whose kernels are compiled ahead; the others share them
MOST_PADDING = 0.15
UNEVEN = 1.15
NARROW = ("temperatures", "top_ks", "top_ps", "min_ps")


def buckets_up_to(limit: int) -> list[int]:
    """Batch sizes that graphs are captured for: padding stays under 15 %, and sizes are round where they can be.

    Behind a bucket a comes the largest multiple of the coarsest power of two that keeps (b - a - 1) / b below 0.15.
    """
    found = list(range(1, min(limit, 8) + 1))
    while found[-1] < limit:
        most = int((found[-1] + 1) / (1.0 - MOST_PADDING) - 1e-9)
        step = 1 << max((most - found[-1]).bit_length() - 1, 0)
        found.append(min(most // step * step if most // step * step > found[-1] else most, limit))
    return found


def longest_first(lengths_S: np.ndarray) -> np.ndarray:
    """The order in which attention starts on spans: while all of them grow by one token a step, it stays the same."""
    return np.argsort(-lengths_S.astype(np.int64), kind="stable")


def is_uneven(lengths_S: np.ndarray) -> bool:
    """The longest of these is much longer than their mean; while all of them grow, that wears off."""
    return len(lengths_S) > 0 and float(lengths_S.max()) > UNEVEN * float(lengths_S.mean())


def span_arrays(layout: Layout, numbers: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """What to send of a step with prompts in it."""
    arrays = {
        "ids": layout.ids_T,
        "positions": layout.positions_T,
        "rows_T": layout.rows_T,
        "rows_S": layout.rows_S,
        "sampled": layout.sampled_R,
        "rows_R": layout.rows_R,
        "lengths": layout.lengths_S,
        "query_starts": layout.query_starts_S1,
        "order": longest_first(layout.lengths_S[: layout.num_single]),
    }
    if numbers is not None:
        arrays |= numbers
        arrays["next_positions"] = layout.lengths_S[layout.samples_S].astype(np.int64)
    return arrays


def span_batch(packed: Packed, sent: Mapping[str, Tensor], block_size: int) -> Batch:
    """The Batch of what span_arrays sent. Slots and tables are still to be written."""
    layout, ids_T = packed.layout, sent["ids"]
    assert layout is not None
    num_decodes = layout.num_single
    shape = (packed.num_spans, -(-packed.max_length // block_size))
    return Batch(
        ids_T=ids_T,
        positions_T=sent["positions"],
        slots_T=torch.empty(len(ids_T), dtype=torch.int64, device=ids_T.device),
        query_starts_S1=sent["query_starts"],
        lengths_S=sent["lengths"],
        tables_SB=torch.zeros(shape, dtype=torch.int32, device=ids_T.device),
        sampled_R=sent["sampled"],
        num_decodes=num_decodes,
        max_query=packed.max_query,
        max_length=packed.max_length,
        host_spans=layout.host_spans,
        order_S=sent.get("order"),
        is_uneven=is_uneven(layout.lengths_S[:num_decodes]),
    )


class GraphKey(NamedTuple):
    """All that a graph bakes in: spans, how they sample, how attention is launched, and whether for uneven spans.

    is_uneven is False where that makes no difference.
    """

    bucket: int
    path: str
    forms: tuple[Any, ...]
    is_uneven: bool = False


@dataclass(slots=True)
class Lanes:
    """Static buffers of decode steps, one lane a span. rows_S -1: padding. starts_S: position of the next token.

    hidden_SE holds a step's embeddings and, if sampling is not part of the graph, its last hidden states in the end.
    winners_SW holds what the products of greedy steps raise (winners_torch of kernels/sample.py), NOBODY between steps.
    The names are those of Batch; numbers are what sampling needs of each lane. What the host sends lies together, in
    wide_4S (int64: rows, starts, order, seeds) and narrow_4S (32 bits: the others), so that two copies bring it all.
    """

    wide_4S: Tensor
    narrow_4S: Tensor
    rows_S: Tensor
    starts_S: Tensor
    order_S: Tensor
    ids_S: Tensor
    positions_S: Tensor
    slots_S: Tensor
    lengths_S: Tensor
    query_starts_S1: Tensor
    tables_SB: Tensor
    hidden_SE: Tensor
    winners_SW: Tensor
    numbers: dict[str, Tensor]

    @classmethod
    def allocate(
        cls, num_lanes: int, max_blocks: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> "Lanes":
        def zeros(kind: torch.dtype) -> Tensor:
            return torch.zeros(num_lanes, dtype=kind, device=device)

        wide_4S = torch.zeros((4, num_lanes), dtype=torch.int64, device=device)
        narrow_4S = torch.zeros((4, num_lanes), dtype=torch.int32, device=device)
        wide_4S[0], wide_4S[2] = -1, torch.arange(num_lanes).to(device)
        numbers = {name: narrow_4S[place].view(NUMBERS[name]) for place, name in enumerate(NARROW)}
        return cls(
            wide_4S=wide_4S,
            narrow_4S=narrow_4S,
            rows_S=wide_4S[0],
            starts_S=wide_4S[1],
            order_S=wide_4S[2],
            ids_S=zeros(torch.int64),
            positions_S=zeros(torch.int64),
            slots_S=torch.full((num_lanes,), -1, dtype=torch.int64, device=device),
            lengths_S=zeros(torch.int32),
            query_starts_S1=torch.arange(num_lanes + 1, dtype=torch.int32).to(device),
            tables_SB=torch.zeros((num_lanes, max_blocks), dtype=torch.int32, device=device),
            hidden_SE=torch.zeros((num_lanes, hidden_size), dtype=dtype, device=device),
            winners_SW=torch.full((num_lanes, WINNER), NOBODY, dtype=torch.int64, device=device),
            numbers={**numbers, "seeds": wide_4S[3]},
        )

    @staticmethod
    def arrays(
        size: int, rows_S: np.ndarray, starts_S: np.ndarray, numbers: Mapping[str, np.ndarray] | None
    ) -> dict[str, np.ndarray]:
        """What to send for these spans and padding up to size. numbers: None if all are greedy."""
        count = len(rows_S)
        wide_4S = np.zeros((3 if numbers is None else 4, size), dtype=np.int64)
        wide_4S[0, count:] = -1
        wide_4S[0, :count], wide_4S[1, :count] = rows_S, starts_S
        wide_4S[2, :count], wide_4S[2, count:] = longest_first(starts_S), np.arange(count, size)
        if numbers is None:
            return {"wide": wide_4S}
        wide_4S[3, :count] = numbers["seeds"]
        narrow_4S = np.zeros((4, size), dtype=np.int32)
        for place, name in enumerate(NARROW):
            narrow_4S[place, :count] = numbers[name].view(np.int32)
        return {"wide": wide_4S, "narrow": narrow_4S}

    def take(self, sent: Mapping[str, Tensor]) -> None:
        """Copy what was sent into place."""
        for name, lanes in (("wide", self.wide_4S), ("narrow", self.narrow_4S)):
            if name in sent:
                lanes[: sent[name].shape[0], : sent[name].shape[1]].copy_(sent[name])

    def batch(self, size: int, max_length: int, is_uneven: bool = False) -> Batch:
        """The first lanes as a Batch of one token each."""
        return Batch(
            ids_T=self.ids_S[:size],
            positions_T=self.positions_S[:size],
            slots_T=self.slots_S[:size],
            query_starts_S1=self.query_starts_S1[: size + 1],
            lengths_S=self.lengths_S[:size],
            tables_SB=self.tables_SB[:size],
            sampled_R=None,
            num_decodes=size,
            max_query=1,
            max_length=max_length,
            order_S=self.order_S[:size],
            is_uneven=is_uneven,
        )


@dataclass(slots=True)
class Graphs:
    """Captured decode steps by key.

    run          starts one decode step on the compute stream: run(key, max_length).
    limit        most spans of a step.          capture_s  seconds spent on capturing.
    pool_bytes   device memory that captures took: of their common pool, whatever the number of slots.
    num_failed   captures that ran out of memory; those steps run without a graph.
    """

    streams: Streams
    run: Callable[[GraphKey, int], None]
    limit: int
    capture_s: float = 0.0
    pool_bytes: int = 0
    num_failed: int = 0
    buckets: list[int] = field(init=False)
    _replays: dict[GraphKey, Callable[[], None] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buckets = buckets_up_to(self.limit)

    def bucket_of(self, num_spans: int) -> int:
        return self.buckets[bisect.bisect_left(self.buckets, num_spans)]

    def step(self, key: GraphKey, max_length: int) -> None:
        """Start a decode step: a replay, or, the first time, the step itself and then its capture."""
        replay = self._replays.get(key)
        if replay is not None:
            replay()
            return
        self.run(key, max_length)
        if key not in self._replays:
            self._capture(key, max_length)

    def _capture(self, key: GraphKey, max_length: int) -> None:
        began_s, reserved = time.perf_counter(), self.streams.reserved_bytes()
        try:
            self._replays[key] = self.streams.capture(lambda: self.run(key, max_length))
        except torch.OutOfMemoryError:
            self._replays[key] = None
            self.num_failed += 1
            log.warning("no memory for the graph of %s; these steps run without one", key)
        self.capture_s += time.perf_counter() - began_s
        self.pool_bytes += self.streams.reserved_bytes() - reserved

    def prepare(self, keys: Sequence[tuple[GraphKey, int]], most_s: float) -> int:
        """Capture these, in this order (largest first), for at most so many seconds. Returns how many there are now.

        Each is run once before: kernels are loaded then, and scratch memory grows outside of the pool. The lanes are
        all padding, so that nothing is written.
        """
        began_s = time.perf_counter()
        for key, max_length in keys:
            if time.perf_counter() - began_s > most_s:
                break
            if key not in self._replays:
                self.step(key, max_length)
        return len(self)

    def clear(self) -> None:
        """Give the graphs and their pool back."""
        self._replays.clear()

    def __len__(self) -> int:
        return sum(replay is not None for replay in self._replays.values())
