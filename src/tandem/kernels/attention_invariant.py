"""Batch-invariant decode attention in Triton: chunks of fixed size side by side, merged in order.

It knows that prefill_attention(invariant=True) takes the keys in the same chunks, counted from position 0, each from
nothing, and merges them in the same order: so a token's result is the same number whether it was computed alone, among
others, or in a prompt. A tile of few rows in one warp adds up a row as a warp of a larger tile does; tests hold that.

    one span, one KV head      positions   0 ─── SHORT ─── … ─── NEAR ──────── NEAR + LONG ──── length
    programs                               chunk 0 │ 1 │ 2 │ 3    │  chunk 4  │  chunk 5
    last to finish: merges all chunks, the first one first, whoever it is
"""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.attention_decode import (
    LOG2_E,
    NOTHING,
    Scratch,
    attend_tile,
    cache_offset,
    load_tile,
    nothing_yet,
    put_newest,
)
from tandem.kernels.attention_prefill import LONG, NEAR, SHORT, chunk_begin, chunk_of, fold_tiles, merge, shape_for
from tandem.kernels.launch import interpreted, next_power_of_2, options, reads_ahead, start, target_or_h200

SCRATCH_BYTES = 64 << 20  # for the chunks of a launch; more spans than fit are attended in several launches
TOGETHER = tl.constexpr(8)  # chunks whose loads are in flight together when they are merged


@triton.jit
def _merge_chunks(
    partial_ptr, marks_ptr, out_ptr, num_chunks, row_mask,
    G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The chunks of one (span, KV head), folded one after the other."""
    rows, inner = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    acc, top, total = nothing_yet(ROWS, WIDTH)
    for first in range(0, num_chunks, TOGETHER):
        for number in tl.static_range(TOGETHER):
            chunk = first + number
            is_there = chunk < num_chunks
            part = tl.load(
                partial_ptr + chunk * (G * D) + rows[:, None] * D + inner[None, :], row_mask & is_there, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            mark_ptrs, mark_mask = marks_ptr + chunk * (2 * G) + rows, (rows < G) & is_there
            part_top = tl.load(mark_ptrs, mark_mask, other=NOTHING, cache_modifier=".cg")
            part_total = tl.load(mark_ptrs + G, mark_mask, other=0.0, cache_modifier=".cg")
            acc, top, total = merge(acc, top, total, part, part_top, part_total)
    _write(acc, total, out_ptr, row_mask, ROWS, D, WIDTH)


@triton.jit
def _write(acc, total, out_ptr, row_mask, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    rows, inner = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + rows[:, None] * D + inner[None, :], result.to(out_ptr.dtype.element_ty), row_mask)


@triton.jit
def _bounds(
    length, chunk, window,
    TILE: tl.constexpr, NEAR: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Where a span's chunk begins and ends, counted from the first that its window touches, and how many there are."""
    first = tl.maximum(length - window, 0) // TILE * TILE if HAS_WINDOW else 0
    skipped = chunk_of(first, NEAR, SHORT, LONG)
    num_chunks = chunk_of(tl.maximum(length, 1) - 1, NEAR, SHORT, LONG) + 1 - skipped
    low = tl.maximum(chunk_begin(skipped + chunk, NEAR, SHORT, LONG), first)
    high = tl.minimum(chunk_begin(skipped + chunk + 1, NEAR, SHORT, LONG), length)
    return low, high, num_chunks


@triton.jit(do_not_specialize=["window", "table_stride"])
def _chunk_kernel(
    queries_ptr, keys_ptr, values_ptr, tables_ptr, lengths_ptr, out_ptr, partial_ptr, marks_ptr, tickets_ptr,
    scale, softcap, window, query_stride, block_stride, position_stride, table_stride,
    K: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, NEAR: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, AHEAD: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, span, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL == 1:
        gdc_launch_dependents()
    length = tl.load(lengths_ptr + span)  # ahead of the wait, as in attention_decode.py
    low, high, num_chunks = _bounds(length, chunk, window, TILE, NEAR, SHORT, LONG, HAS_WINDOW)
    table_ptr = tables_ptr + span.to(tl.int64) * table_stride
    if AHEAD:  # as in attention_decode.py: all but the newest token, also where the chunk is behind the span's end
        near_keys, near_values, columns = keys_ptr + head * D, values_ptr + head * D, low + tl.arange(0, TILE)
        newest = cache_offset(table_ptr, length - 1, block_stride, position_stride, P)
        key, value = load_tile(
            near_keys, near_values, table_ptr, columns, length - 1, block_stride, position_stride, D, WIDTH, P
        )
    if PDL > 0:
        gdc_wait()
    if chunk >= num_chunks:  # behind the wait: a kernel is done only when all before it are
        return
    rows, inner = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row_mask = (rows < G)[:, None] & (inner < D)[None, :]
    query_ptr = queries_ptr + span.to(tl.int64) * query_stride + head * (G * D)
    query = tl.load(query_ptr + rows[:, None] * D + inner[None, :], row_mask, other=0.0)
    part, part_top, part_total = nothing_yet(ROWS, WIDTH)
    if AHEAD:
        key, value = put_newest(key, value, near_keys + newest, near_values + newest, columns, length, D, WIDTH)
        part, part_top, part_total = attend_tile(
            part, part_top, part_total, query, key, value, columns, high, length - window, scale, softcap, HAS_WINDOW,
            HAS_SOFTCAP, UPCAST,
        )  # fmt: skip
        part, part_total = tl.where(length > 0, part, 0.0), tl.where(length > 0, part_total, 0.0)
        low += TILE
    part, part_top, part_total = fold_tiles(
        part, part_top, part_total, query, length - 1 + rows * 0, keys_ptr, values_ptr, table_ptr, head, low, high,
        length, window, scale, softcap, block_stride, position_stride, D, WIDTH, P, TILE, True, HAS_WINDOW,
        HAS_SOFTCAP, UPCAST, False, False,
    )  # fmt: skip
    if PDL == 2:
        gdc_launch_dependents()
    out_ptr += span.to(tl.int64) * (K * G * D) + head * (G * D)
    if num_chunks == 1:
        acc, top, total = nothing_yet(ROWS, WIDTH)
        acc, top, total = merge(acc, top, total, part, part_top, part_total)
        _write(acc, total, out_ptr, row_mask, ROWS, D, WIDTH)
        return
    group = span * K + head
    partial_ptr += group.to(tl.int64) * tl.num_programs(2) * (G * D)
    marks_ptr += group.to(tl.int64) * tl.num_programs(2) * (2 * G)
    tl.store(partial_ptr + chunk * (G * D) + rows[:, None] * D + inner[None, :], part, row_mask)
    tl.store(marks_ptr + chunk * (2 * G) + rows, part_top, rows < G)
    tl.store(marks_ptr + chunk * (2 * G) + G + rows, part_total, rows < G)
    tl.debug_barrier()
    if tl.atomic_add(tickets_ptr + group, 1, sem="acq_rel", scope="gpu") == num_chunks - 1:
        tl.store(tickets_ptr + group, 0)
        _merge_chunks(partial_ptr, marks_ptr, out_ptr, num_chunks, row_mask, G, ROWS, D, WIDTH)


def invariant_decode_attention(
    queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, tables_SB: Tensor, lengths_S: Tensor, max_length: int,
    out_THD: Tensor, scratch: Scratch, scale: float, window: int | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    """Attention of the first S tokens, token s over lengths_S[s] cached positions; written to out_THD[:S].

    A token's result equals prefill_attention(invariant=True), whatever else is in the batch. Parts lie in scratch, as
    many spans at once as fit. Lengths are read ahead of the wait for the kernel before, as in decode_attention, and
    where reads_ahead of launch.py says so a chunk's first tile of keys and values, too.
    """
    num_spans, (num_kv_heads, head_dim) = lengths_S.shape[0], keys_NPKD.shape[2:]
    group = queries_THD.shape[1] // num_kv_heads
    form = invariant_form(num_spans, max_length, keys_NPKD, group, window)
    num_chunks = form.num_chunks
    most = spans_at_once(num_chunks, queries_THD.shape[1], head_dim)
    if num_chunks > 1:
        scratch.reserve(min(num_spans, most) * num_kv_heads, num_chunks, group, head_dim)
    for first in range(0, num_spans, most):
        part = slice(first, first + most)
        start(_chunk_kernel, (num_kv_heads, len(lengths_S[part]), num_chunks),
            queries_THD[part], keys_NPKD, values_NPKD, tables_SB[part], lengths_S[part], out_THD[part],
            scratch.partial, scratch.marks, scratch.tickets,
            scale * LOG2_E, softcap or 1.0, window or 0, queries_THD.stride(0), keys_NPKD.stride(0),
            keys_NPKD.stride(1), tables_SB.stride(0), K=num_kv_heads, G=group, ROWS=form.rows, D=head_dim,
            WIDTH=next_power_of_2(head_dim), P=keys_NPKD.shape[1], TILE=form.tile, NEAR=NEAR, SHORT=SHORT,
            LONG=LONG, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, AHEAD=form.ahead,
            UPCAST=interpreted(), enable_fp_fusion=False,
            **options(queries_THD, "attention", form.num_warps, form.num_stages),
        )  # fmt: skip


class InvariantForm(NamedTuple):
    """All that is chosen for a launch, and that a captured graph bakes in: how many chunks a span has at most, query
    rows of a tile, its tokens, the program's warps and stages, and whether its first tile is read ahead of the wait."""

    num_chunks: int
    rows: int
    tile: int
    num_warps: int
    num_stages: int
    ahead: bool = False

    @property
    def kernel(self) -> "InvariantForm":
        """The same for all forms that one compiled kernel does."""
        return self._replace(num_chunks=0)


def invariant_form(
    num_spans: int, max_length: int, keys_NPKD: Tensor, group: int, window: int | None = None
) -> InvariantForm:  # fmt: skip
    """Tiles are prefill's, on which sums depend; stages are free. group: query heads a KV head.

    Where a tile is read ahead few are left, of chunks before NEAR one: stages only take shared memory from neighbours.
    Where programs wait for each other anyway one warp of 16 rows does as much as four of 64, most of which are empty.
    """
    num_kv_heads, head_dim = keys_NPKD.shape[2:]
    rows, tile, num_warps, _ = shape_for(keys_NPKD, group, True)
    num_chunks = most_chunks(max_length, window, tile)
    if interpreted() or keys_NPKD.element_size() == 4 or head_dim > 128:
        return InvariantForm(num_chunks, rows, tile, num_warps, 1)
    target = target_or_h200(keys_NPKD.device)
    is_few = num_spans * num_kv_heads * num_chunks <= 4 * target.num_multiprocessors
    if is_few or group > 16 or target.capability[0] != 9:  # elsewhere it is not known to add up alike
        if not reads_ahead(num_spans):
            return InvariantForm(num_chunks, rows, tile, num_warps, 3)
        return InvariantForm(num_chunks, rows, tile, num_warps, 1 if max_length <= NEAR else 2, True)
    return InvariantForm(num_chunks, 16, tile, 1, 3)


def most_chunks(max_length: int, window: int | None = None, tile: int = 1) -> int:
    """Chunks of so many positions, one at least; of those in a window that begins with a tile, if there is one."""
    near, far = min(max_length, NEAR), max(max_length - NEAR, 0)
    count = max(-(-near // SHORT) + -(-far // LONG), 1)
    return count if window is None else min(count, NEAR // SHORT + (window + tile) // LONG + 2)


def spans_at_once(num_chunks: int, num_heads: int, head_dim: int) -> int:
    """Spans of one launch of invariant_decode_attention: what SCRATCH_BYTES hold, in fours: addresses stay even."""
    return max(SCRATCH_BYTES // (num_chunks * num_heads * (head_dim + 2) * 4) // 4 * 4, 4)
