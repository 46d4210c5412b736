"""The memory of one step in flight. It knows bytes and moments; it does not know what they mean.

host pages (pinned)  ──in──►  staging (device)      compute reads it       home (device) ──out──► host pages
all of it belongs to one slot, and is written again only after the slot's ticket was collected
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.request import MAX_LOGPROBS
from tandem.runner.batch import Packed
from tandem.runner.clock import Moments
from tandem.runner.outcome import Drawn
from tandem.runner.streams import Streams
from tandem.sampling.logprobs import LogprobRows

ALIGNMENT = 16
ARRAYS = 32  # at most so many in one send


def most_staging_bytes(num_rows: int, max_tokens: int, max_blocks: int) -> int:
    """What the largest step sends, so that memory is never asked for while serving.

    A token: id, position and row, and its index if its log-probabilities are wanted. A row: what Lanes.arrays or
    span_arrays send of it, its index, a copied block, and its whole block table if it comes with a long prefix.
    """
    a_token, a_row = 8 + 8 + 8 + 8, 32 + 8 + 24 + 16 + 8
    return a_token * max_tokens + (a_row + 8 * max_blocks) * num_rows + ARRAYS * ALIGNMENT


def most_logprobs_bytes(num_rows: int, max_tokens: int) -> int:
    """Of log-probabilities that the largest step takes home: of every prompt token, and of a token of every row."""
    return (max_tokens + num_rows) * (8 + 4 + 8 + (8 + 4) * MAX_LOGPROBS) + (num_rows + 1) * 5 * ALIGNMENT


@dataclass(slots=True)
class Slot:
    """One step's staging, results and moments.

    staging_bytes   capacity; send() makes it larger only for a step that brings more than most_staging_bytes.
    home_R          where the step leaves its tokens, int64 on the device.
    index           whose turn it is.
    extra_bytes     of pinned memory for log-probabilities.
    packed, drawn   what it holds, kept alive until it was collected.
    """

    streams: Streams
    staging_bytes: int
    home_R: Tensor
    index: int = 0
    extra_bytes: int = 0
    busy: bool = False
    packed: Packed = field(init=False)
    drawn: Drawn = field(init=False)
    moments: Moments = field(init=False)
    _host_home_R: Tensor = field(init=False)
    _extra: Tensor = field(init=False)
    _pinned: Tensor = field(init=False)
    _pages: dict[np.dtype[Any], np.ndarray] = field(init=False)
    _staging: Tensor = field(init=False)
    _views: dict[np.dtype[Any], Tensor] = field(init=False)
    _posts: dict[tuple[int, int], Tensor] = field(init=False)
    _count: int = 0
    _homes: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._host_home_R = self.streams.pinned(8 * self.home_R.numel()).view(torch.int64)
        self._extra = self.streams.pinned(self.extra_bytes)
        self._allocate(self.staging_bytes)

    def take(self, moments: Moments) -> None:
        assert not self.busy, f"slot {self.index} is taken before its step was collected"
        self.busy, self.moments = True, moments

    def give_back(self) -> None:
        self.busy = False
        del self.packed, self.drawn

    def _allocate(self, num_bytes: int) -> None:
        """If it raises, for want of memory, all is as it was."""
        rounded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        pinned = self.streams.pinned(rounded)
        self._staging = torch.empty(rounded, dtype=torch.uint8, device=self.streams.device)
        self._pinned, self.staging_bytes = pinned, num_bytes
        pages = self._pinned.numpy()
        self._pages = {kind: pages.view(kind) for kind in _DTYPES}
        self._views = {kind: self._staging.view(dtype) for kind, dtype in _DTYPES.items()}
        self._posts = {}
        # The allocator may hand out what the compute stream has just given back; the in stream must not be early.
        ordered = self.streams.event()
        self.streams.record(ordered, "compute")
        self.streams.wait("in", ordered)

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Copy arrays to the device in one piece on the in stream, behind which ``ready`` is recorded.

        Returns views of the staging, valid for work behind ``ready`` until the slot's ticket is collected.
        """
        assert self.busy, "memory of a slot that no step owns is written"
        num_bytes = sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays.values())
        if num_bytes > self.staging_bytes:
            self._allocate(max(num_bytes, 2 * self.staging_bytes))
        views: dict[str, Tensor] = {}
        start = 0
        for name, array in arrays.items():
            kind, first = array.dtype, start // array.itemsize
            self._pages[kind][first : first + array.size] = array.reshape(-1)
            view = self._views[kind][first : first + array.size]
            views[name] = view if array.ndim == 1 else view.view(array.shape)
            start += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self.streams.copy("in", self._staging[:num_bytes], self._pinned[:num_bytes])
        self.streams.record(self.moments.ready, "in")
        self.moments.sent = True
        return views

    def post(self, *rows: Sequence[int]) -> Tensor:
        """Leave equally long rows as int32 in pinned memory, for a kernel that reads them there: [rows, C].

        They stay until the slot's ticket is collected.

        For little that is needed late: a copy, the event behind it and the wait for that cost the host more than
        the kernel's way over the bus. Not beside ``send`` in one step: they share the pages.
        """
        assert self.busy and not self.moments.sent, "memory of a slot is written that a step or a copy owns"
        count, num_bytes = len(rows[0]), 4 * len(rows) * len(rows[0])
        if num_bytes > self.staging_bytes:
            self._allocate(max(num_bytes, 2 * self.staging_bytes))
        page = self._pages[_INT32]
        for place, row in enumerate(rows):
            page[place * count : (place + 1) * count] = row
        view = self._posts.get((len(rows), count))
        if view is None:  # making one costs as much as all the rest
            view = self._pinned.view(torch.int32)[: len(rows) * count].view(len(rows), count)
            self._posts[len(rows), count] = view
        return view

    def fetch(self, count: int, drawn: Drawn) -> None:
        """Start the first count tokens and all log-probabilities on their way home, behind ``computed``."""
        self.streams.wait("out", self.moments.computed)
        if count:
            if count != self._count:
                self._count, self._homes = count, (self._host_home_R[:count], self.home_R[:count])
            self.streams.copy("out", *self._homes)
        if drawn.logprobs is not None or drawn.prompts:
            self._fetch_logprobs(drawn)
        self.streams.record(self.moments.home, "out")

    def _fetch_logprobs(self, drawn: Drawn) -> None:
        found = [rows for rows in (drawn.logprobs, *(rows for _, _, rows in drawn.prompts)) if rows is not None]
        sizes = [sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in _tensors(rows)) for rows in found]
        if sum(sizes) > len(self._extra):
            self._extra = self.streams.pinned(2 * sum(sizes))
        start, pages = 0, []
        for rows in found:
            tensors = []
            for tensor in _tensors(rows):
                page = self._extra[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                self.streams.copy("out", page, tensor)
                tensors.append(page)
                start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            pages.append(LogprobRows(*tensors))
        drawn.keep_alive = found
        if drawn.logprobs is not None:
            drawn.logprobs = pages.pop(0)
        drawn.prompts = [(span, top, page) for (span, top, _), page in zip(drawn.prompts, pages, strict=True)]

    def wait(self) -> bool:
        """Block until the step is home: the host's only wait. Returns whether it was not home yet."""
        waited = not self.moments.home.query()
        self.moments.home.synchronize()
        return waited

    def tokens(self, count: int) -> list[int]:
        found: list[int] = self._homes[0].tolist() if count else []
        return found


def _tensors(rows: LogprobRows) -> tuple[Tensor, ...]:
    return rows.tokens_R, rows.chosen_R, rows.ranks_R, rows.top_ids_RK, rows.top_RK


_INT32 = np.dtype(np.int32)
_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}
