"""Spans of several tokens by FlashInfer's paged prefill for Hopper, where it was measured to be faster.

It knows FlashInfer's compiled module and its schedule of a step; decode and all other spans stay with our own kernels.
FlashInfer's Python wrappers are not used: they hold one pinned page, which the next step's schedule would overwrite
while this one's is still on its way, and check arguments in every layer. Hence only versions that were tried.

    host    lengths of the spans ─► schedule: which tile of queries runs where ─► a pinned page of the ring ─┐ once a
    device  block tables, as they are                          the page's copy ◄──── asynchronous copy ──────┘ step
            every layer: one kernel that reads queries, tables and keys in place
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tandem.attention.contract import AttentionShape, Batch
from tandem.attention.flashinfer_module import REINSTALL, UnavailableError, first_line, load_module, require
from tandem.attention.triton import TritonAttention
from tandem.kernels import launch
from tandem.kernels.attention_library import beats_paged, paged_is_worth_it

PAGES = 5  # four for the steps that may be in flight, and one to be filled
PAGE_BYTES = 1 << 20
TILE = 128  # query rows of one entry of a schedule, at least
ENTRY_BYTES, FIXED_BYTES = 7 * 4, 4096  # of an entry; of the rest of a schedule, at most
CAUSAL, TOKENS_FIRST, ALL_POSITIONS = 1, 0, -1  # mask, layout and window, as the module numbers them


def flashinfer_attention(
    device: torch.device, dtype: torch.dtype | None, head_dim: int | None, *, deterministic: bool, builds: bool
) -> "FlashInferAttention":
    """A backend whose module was loaded, and attended a few tokens as torch does. Raises UnavailableError.

    builds  compile the module if it is not there, which takes minutes; else only one that is built already is taken.
    """
    require(device, dtype, head_dim, deterministic)
    assert dtype is not None and head_dim is not None
    backend = FlashInferAttention(device, load_module(dtype, head_dim, builds), dtype, head_dim)
    try:
        error = _error_of_a_trial(backend)
    except Exception as failure:  # whatever a compiled module raises
        raise UnavailableError(f"its module fails here: {first_line(failure)}", REINSTALL) from failure
    if not error < 0.02:
        raise UnavailableError(f"its module is wrong here: relative error {error:.3f}", REINSTALL)
    return backend


@dataclass(slots=True)
class _Page:
    """Memory of one schedule. turn: how often it was filled, so that an overwritten schedule is known."""

    pinned: Tensor
    sent: Tensor
    copied: Any = None
    turn: int = 0


@dataclass(slots=True)
class _Schedule:
    """One step's schedule for layers of one shape. info is the module's own description of the page."""

    page: _Page
    turn: int
    info: Any
    tables: Tensor


@dataclass(slots=True)
class _Pages:
    """A ring of pages, since the host may be several steps ahead of the copies to the device."""

    device: torch.device
    pages: list[_Page] = field(init=False)
    taken: int = 0

    def __post_init__(self) -> None:
        pins = self.device.type == "cuda"
        self.pages = [
            _Page(
                torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=pins),
                torch.empty(PAGE_BYTES, dtype=torch.uint8, device=self.device),
            )
            for _ in range(PAGES)
        ]

    def next(self) -> _Page | None:
        """The page used longest ago; None while its copy has not been made: a step never waits for another."""
        page = self.pages[self.taken % PAGES]
        if page.copied is not None and not page.copied.query():
            return None
        self.taken += 1
        page.turn += 1
        return page


class FlashInferAttention(TritonAttention):
    """As TritonAttention, but spans of several tokens that are long enough go to FlashInfer, together in one kernel.

    Only in steps whose spans the host knows, hence never in a captured graph. What it cannot do (windows that hide
    something, caps, other dtypes) and what is short stays with our kernels, layer by layer. cuDNN has whole prompts
    only where it is faster still.

    module      FlashInfer's compiled functions ``plan`` and ``paged_run``.
    dtype, head_dim  what the module was compiled for.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device, module: Any, dtype: torch.dtype, head_dim: int) -> None:
        super().__init__(device)
        self._module, self._dtype, self._head_dim = module, dtype, head_dim
        self._pages = _Pages(device)

    def _prefill(
        self, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, batch: Batch, shape: AttentionShape,
        out_THD: Tensor,
    ) -> None:  # fmt: skip
        schedule = None
        if self._takes(queries_THD, keys_NPKD, values_NPKD, batch, shape) and not self._all_whole_prompts(
            batch, keys_NPKD, shape
        ):
            schedule = self._schedule_of(batch, shape, keys_NPKD.shape[1])
        if schedule is None:
            super()._prefill(queries_THD, keys_NPKD, values_NPKD, batch, shape, out_THD)
            return
        self._run(schedule, queries_THD, keys_NPKD, values_NPKD, batch.num_decodes, shape.scale, out_THD)

    def _all_whole_prompts(self, batch: Batch, keys_NPKD: Tensor, shape: AttentionShape) -> bool:
        return beats_paged(batch.host_spans[batch.num_decodes :]) and super()._all_whole_prompts(
            batch, keys_NPKD, shape
        )

    def _takes(
        self, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, batch: Batch, shape: AttentionShape
    ) -> bool:
        """Whether the module can attend this layer."""
        return (
            not launch.COMPILING and not queries_THD.is_meta
            and queries_THD.dtype == keys_NPKD.dtype == self._dtype and keys_NPKD.shape[3] == self._head_dim
            and keys_NPKD.stride() == values_NPKD.stride()
            and not shape.softcap and (shape.window is None or batch.max_length <= shape.window)
        )  # fmt: skip

    def _schedule_of(self, batch: Batch, shape: AttentionShape, block_size: int) -> _Schedule | None:
        """The step's schedule, made by the first layer that asks. None: it is not worth it, or there is no room now."""
        key = f"flashinfer {shape.num_heads}/{shape.num_kv_heads}"
        if key in batch.scratch:
            known = batch.scratch[key]
            if known is None or (isinstance(known, _Schedule) and known.page.turn == known.turn):
                return known
        found, spans = None, batch.host_spans[batch.num_decodes :]
        if len(spans) == batch.lengths_S.shape[0] - batch.num_decodes and paged_is_worth_it(spans):
            found = self._plan(batch, spans, shape.num_heads, shape.num_kv_heads, block_size)
        batch.scratch[key] = found
        return found

    def _plan(
        self, batch: Batch, spans: Sequence[tuple[int, int]], num_heads: int, num_kv_heads: int, block_size: int
    ) -> _Schedule | None:
        """Host work and one asynchronous copy. The module needs no table on the host, only where each begins."""
        num_tiles = sum(-(-length // TILE) for _, length in spans)
        if num_tiles * num_heads * ENTRY_BYTES + FIXED_BYTES > PAGE_BYTES:
            return None
        page = self._pages.next()
        if page is None:
            return None
        tables_SB = batch.tables_SB[batch.num_decodes :].contiguous()
        width = tables_SB.shape[1]
        query_starts, table_starts, lengths = (
            torch.tensor(numbers, dtype=torch.int32)
            for numbers in (
                [0, *accumulate(length for _, length in spans)],
                [width * number for number in range(len(spans) + 1)],
                [start + length for start, length in spans],
            )
        )
        info = self._module.plan(
            page.sent, page.sent, page.pinned, query_starts, table_starts, lengths, int(query_starts[-1]), len(spans),
            num_heads, num_kv_heads, block_size, False, self._head_dim, self._head_dim, True, ALL_POSITIONS,
        )  # fmt: skip
        if page.sent.is_cuda:
            page.copied = page.copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            page.copied.record()
        return _Schedule(page, page.turn, info, tables_SB.view(-1))

    def _run(
        self, schedule: _Schedule, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, first: int,
        scale: float, out_THD: Tensor,
    ) -> None:  # fmt: skip
        sent, tables = schedule.page.sent, schedule.tables
        # The starts and last lengths that the module is handed a second time it does not read: they are in the page.
        self._module.paged_run(
            sent, sent, schedule.info, queries_THD[first:], keys_NPKD, values_NPKD, tables, tables, tables, tables,
            out_THD[first:], None, CAUSAL, TOKENS_FIRST, ALL_POSITIONS, False, None, None, None, None, 0.0, scale,
            1.0, 0,
        )  # fmt: skip


def _error_of_a_trial(backend: FlashInferAttention) -> float:
    """The relative error over two spans, one behind a prefix. Also loads the kernel, so that no step has to."""
    device, dtype, head_dim = backend.device, backend._dtype, backend._head_dim
    spans: Sequence[tuple[int, int]] = [(70, 150), (0, 33)]
    heads, kv_heads, block_size, width = 4, 2, 16, 14
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 2 * width, block_size, kv_heads, head_dim, generator=generator).to(device, dtype)
    queries_THD = torch.randn(183, heads, head_dim, generator=generator).to(device, dtype)
    tables_SB = torch.randperm(2 * width, generator=generator).view(2, width).to(device, torch.int32)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    batch = Batch(nothing, nothing, nothing, nothing, nothing, tables_SB, None, 0, 150, 220, host_spans=list(spans))
    schedule = backend._plan(batch, spans, heads, kv_heads, block_size)
    assert schedule is not None
    found_THD = torch.full_like(queries_THD, math.nan)
    backend._run(schedule, queries_THD, cache[0], cache[1], 0, head_dim**-0.5, found_THD)
    wanted, first = [], 0
    for table_B, (start, length) in zip(tables_SB, spans, strict=True):
        keys, values = (part[table_B].flatten(0, 1)[: start + length].double() for part in cache)
        keys, values = (part.repeat_interleave(heads // kv_heads, 1) for part in (keys, values))
        scores_HTL = torch.einsum("thd,lhd->htl", queries_THD[first : first + length].double(), keys) * head_dim**-0.5
        hidden_TL = torch.ones(scores_HTL.shape[1:], dtype=torch.bool, device=device).triu(start + 1)
        wanted.append(torch.einsum("htl,lhd->thd", scores_HTL.masked_fill(hidden_TL, -math.inf).softmax(-1), values))
        first += length
    wanted_THD = torch.cat(wanted)
    return float((found_THD.double() - wanted_THD).norm() / wanted_THD.norm())
