"""Paged decode attention in Triton: one query token a span, the cache read through the block table, split over tokens.

It knows block tables and lengths on the device; nothing here depends on values that the host would have to read, so
a launch can be captured and replayed.

    one span, one KV head      tokens of the span   0 ─────────────┬──────────────┬───────── length
    programs                                        split 0        │ split 1      │ split 2
    each: running maximum, sum, weighted values (online softmax, Milakov & Gimelshein 2018)
    last to finish: merges all splits (flash-decoding, Dao et al. 2023), so no second kernel is needed
"""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.attention_form import tile_size
from tandem.kernels.attention_scratch import Scratch as Scratch
from tandem.kernels.launch import interpreted, next_power_of_2, options, start

LOG2_E = 1.4426950408889634
NOTHING = tl.constexpr(-1.0e30)  # a score that no token has; finite, so that differences of two stay numbers


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """a @ b in float32. UPCAST: the interpreter multiplies the bits of bfloat16, so it gets float32 operands."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def scores(query, key, scale, softcap, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr):
    """Scores in base 2: scale holds log2(e), softcap is the plain one; query [M, D], key [D, N]."""
    raw = product(query, key, UPCAST) * scale
    if HAS_SOFTCAP:
        # s·tanh(x/s) with tanh(y) = 1 - 2 / (exp(2y) + 1); x is in base 2, hence the factor 1.4427 outside.
        raw = 1.4426950408889634 * softcap * (1.0 - 2.0 / (tl.exp2(2.0 * raw / softcap) + 1.0))
    return raw


@triton.jit
def nothing_yet(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(acc, running maximum, running sum) before the first tile."""
    return tl.zeros([ROWS, WIDTH], tl.float32), tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def take_tile(acc, top, total, score, value, UPCAST: tl.constexpr):
    """Fold one tile's scores [M, N] and values [N, D] into (acc, running maximum, running sum)."""
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = acc * shrink[:, None]
    if UPCAST:
        acc = tl.dot(weight, value.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _merge_splits(
    partial_ptr, marks_ptr, out_ptr, num_splits,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one (span, KV head), MERGED at a time, so that their loads are in flight together."""
    heads, inner, near = tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, MERGED)
    mask = (heads < G)[:, None] & (inner < D)[None, :]
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    top = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for first in range(0, num_splits, MERGED):
        splits = first + near
        mark_mask = (splits < num_splits)[:, None] & (heads < G)[None, :]
        mark_ptrs = marks_ptr + splits[:, None] * (2 * G) + heads[None, :]
        tops = tl.load(mark_ptrs, mark_mask, other=NOTHING, cache_modifier=".cg")
        totals = tl.load(mark_ptrs + G, mark_mask, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + splits[:, None, None] * (G * D) + (heads[:, None] * D + inner[None, :])[None, :, :],
            (splits < num_splits)[:, None, None] & mask[None, :, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        shrink, weights = tl.exp2(top - new_top), tl.exp2(tops - new_top[None, :])
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        total = total * shrink + tl.sum(totals * weights, axis=0)
        top = new_top
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + heads[:, None] * D + inner[None, :], result.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _share(
    lengths_ptr, order_ptr, length, first, split, num_splits, window,
    TILE: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Where a split's part of a span begins and ends, and how many parts the span has."""
    extent = length - first
    if HAS_ORDER:  # shares of the longest span, so that no program of a long one has more to do than others
        extent = tl.load(lengths_ptr + tl.load(order_ptr))
        if HAS_WINDOW:
            extent = tl.minimum(extent, window + TILE)
    share = tl.maximum(tl.cdiv(tl.cdiv(extent, TILE), num_splits), 1) * TILE
    num_shares = tl.maximum(tl.cdiv(length - first, share), 1)
    start = first + split * share
    return start, tl.minimum(start + share, length), num_shares


@triton.jit
def _leave_part(
    acc, top, total, partial_ptr, marks_ptr, tickets_ptr, out_ptr, group, split, num_splits, num_shares, row_mask,
    G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """Write one part through L2; whoever draws the last ticket of its (span, KV head) merges them all, in order."""
    rows, inner = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    partial_ptr += group.to(tl.int64) * num_splits * (G * D)
    marks_ptr += group.to(tl.int64) * num_splits * (2 * G)
    tl.store(partial_ptr + split * (G * D) + rows[:, None] * D + inner[None, :], acc, row_mask)
    tl.store(marks_ptr + split * (2 * G) + rows, top, rows < G)
    tl.store(marks_ptr + split * (2 * G) + G + rows, total, rows < G)
    tl.debug_barrier()
    drawn = tl.atomic_add(tickets_ptr + group, 1, sem="acq_rel", scope="gpu")
    if drawn == num_shares - 1:
        tl.store(tickets_ptr + group, 0)
        _merge_splits(partial_ptr, marks_ptr, out_ptr, num_shares, G, HEADS, D, WIDTH, MERGED)


@triton.jit
def cache_offset(table_ptr, positions, block_stride, position_stride, P: tl.constexpr):
    """Where positions of a span lie in the cache; of those before its beginning, any place."""
    positions = tl.maximum(positions, 0)
    blocks = tl.load(table_ptr + positions // P).to(tl.int64)
    return blocks * block_stride + (positions % P) * position_stride


@triton.jit
def load_tile(
    keys_ptr, values_ptr, table_ptr, columns, length, block_stride, position_stride,
    D: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Keys [WIDTH, TILE] and values [TILE, WIDTH] of these positions, through the block table."""
    inner = tl.arange(0, WIDTH)
    offsets = cache_offset(table_ptr, tl.minimum(columns, length - 1), block_stride, position_stride, P)
    if WIDTH == D:
        key = tl.load(keys_ptr + offsets[None, :] + inner[:, None])
        value = tl.load(values_ptr + offsets[:, None] + inner[None, :])
    else:
        key = tl.load(keys_ptr + offsets[None, :] + inner[:, None], (inner < D)[:, None], other=0.0)
        value = tl.load(values_ptr + offsets[:, None] + inner[None, :], (inner < D)[None, :], other=0.0)
    return key, value


@triton.jit
def put_newest(key, value, new_key_ptr, new_value_ptr, columns, length, D: tl.constexpr, WIDTH: tl.constexpr):
    """A tile that was loaded too early to hold the step's own token, with it; past L1, which may hold the old one."""
    inner = tl.arange(0, WIDTH)
    new_key = tl.load(new_key_ptr + inner, inner < D, other=0.0, cache_modifier=".cg")
    new_value = tl.load(new_value_ptr + inner, inner < D, other=0.0, cache_modifier=".cg")
    is_newest = columns >= length - 1  # columns behind it are copies of it
    return (
        tl.where(is_newest[None, :], new_key[:, None], key),
        tl.where(is_newest[:, None], new_value[None, :], value),
    )


@triton.jit
def attend_tile(
    acc, top, total, query, key, value, columns, end, oldest, scale, softcap,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold a tile in, of which the positions from oldest, if there is a window, to end are seen."""
    score = scores(query, key, scale, softcap, HAS_SOFTCAP, UPCAST)
    seen = columns < end
    if HAS_WINDOW:
        seen = seen & (columns >= oldest)
    score = tl.where(seen[None, :], score, NOTHING)
    return take_tile(acc, top, total, score, value, UPCAST)


@triton.jit
def _attend_tiles(
    acc, top, total, query, keys_ptr, values_ptr, table_ptr, start, end, length, oldest, scale, softcap, block_stride,
    position_stride, D: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Load the tiles start, start + TILE, … one after the other, and fold them in."""
    lanes = tl.arange(0, TILE)
    for tile in range(start, end, TILE):
        columns = tile + lanes
        key, value = load_tile(
            keys_ptr, values_ptr, table_ptr, columns, length, block_stride, position_stride, D, WIDTH, P
        )
        acc, top, total = attend_tile(
            acc, top, total, query, key, value, columns, end, oldest, scale, softcap, HAS_WINDOW, HAS_SOFTCAP, UPCAST
        )
    return acc, top, total


@triton.jit
def _write(acc, total, out_ptr, row_mask, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """The result of the only part. A padding row (length 0) has total 0 and gets zeros."""
    rows, inner = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + rows[:, None] * D + inner[None, :], result.to(out_ptr.dtype.element_ty), row_mask)


@triton.jit(do_not_specialize=["num_splits", "window", "table_stride"])
def _decode_kernel(
    queries_ptr, keys_ptr, values_ptr, tables_ptr, lengths_ptr, order_ptr, out_ptr, partial_ptr, marks_ptr,
    tickets_ptr, scale, softcap, window, num_splits, query_stride, block_stride, position_stride, table_stride,
    K: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, HEADS: tl.constexpr, MERGED: tl.constexpr, HAS_SPLITS: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, AHEAD: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, span, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL == 1:
        gdc_launch_dependents()
    # Lengths and block tables are read ahead of the wait: they were settled before the kernels of the layer began.
    if HAS_ORDER:
        span = tl.load(order_ptr + span).to(tl.int32)
    length = tl.load(lengths_ptr + span)
    rows, inner = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    first = tl.maximum(length - window, 0) // TILE * TILE if HAS_WINDOW else 0
    start, end, num_shares = first, length, 1
    if HAS_SPLITS:
        start, end, num_shares = _share(
            lengths_ptr, order_ptr, length, first, split, num_splits, window, TILE, HAS_ORDER, HAS_WINDOW
        )
    table_ptr = tables_ptr + span.to(tl.int64) * table_stride
    keys_ptr += head * D
    values_ptr += head * D
    if AHEAD:  # so are all keys and values but the newest token's, which is not touched: L1 would keep what was there
        newest = cache_offset(table_ptr, length - 1, block_stride, position_stride, P)
        columns = start + tl.arange(0, TILE)
        key, value = load_tile(
            keys_ptr, values_ptr, table_ptr, columns, length - 1, block_stride, position_stride, D, WIDTH, P
        )
    if PDL > 0:
        gdc_wait()
    if split >= num_shares:  # behind the wait: a kernel is done only when all before it are
        return
    row_mask = (rows < G)[:, None] & (inner < D)[None, :]
    row_offsets = (head * G + rows)[:, None] * D + inner[None, :]
    query = tl.load(queries_ptr + span.to(tl.int64) * query_stride + row_offsets, row_mask, other=0.0)
    acc, top, total = nothing_yet(ROWS, WIDTH)
    oldest = length - window
    if AHEAD:
        key, value = put_newest(key, value, keys_ptr + newest, values_ptr + newest, columns, length, D, WIDTH)
        acc, top, total = attend_tile(
            acc, top, total, query, key, value, columns, end, oldest, scale, softcap, HAS_WINDOW, HAS_SOFTCAP, UPCAST
        )
        total, acc = tl.where(length > 0, total, 0.0), tl.where(length > 0, acc, 0.0)
        start += TILE
    acc, top, total = _attend_tiles(
        acc, top, total, query, keys_ptr, values_ptr, table_ptr, start, end, length, oldest, scale, softcap,
        block_stride, position_stride, D, WIDTH, P, TILE, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
    )  # fmt: skip
    if PDL == 2:
        gdc_launch_dependents()
    out_ptr += span.to(tl.int64) * (K * G * D) + head * (G * D)
    if num_shares > 1:
        _leave_part(
            acc, top, total, partial_ptr, marks_ptr, tickets_ptr, out_ptr, span * K + head, split, num_splits,
            num_shares, row_mask, G, ROWS, D, WIDTH, HEADS, MERGED,
        )  # fmt: skip
    else:
        _write(acc, total, out_ptr, row_mask, ROWS, D, WIDTH)


def decode_attention(
    queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, tables_SB: Tensor, lengths_S: Tensor, out_THD: Tensor,
    scratch: Scratch, scale: float, num_splits: int, window: int | None = None, softcap: float | None = None,
    num_warps: int = 2, num_stages: int = 3, tile: int | None = None, order_S: Tensor | None = None,
    ahead: bool = False,
) -> None:  # fmt: skip
    """Attention of the first S tokens, token s over lengths_S[s] cached positions; written to out_THD[:S].

    order_S: in which order programs take spans, the longest first, so that they end together; with splits, each is cut
    into shares of the longest one's size, so that short ones have fewer. Without, each is cut into num_splits. The KV
    heads of a span are taken side by side, since they lie side by side in the cache.
    Lengths, tables and order are read ahead of the wait for the kernel before, so no kernel that lets its successor
    start early may write them (of ours, none does).
    ahead: so are the keys and values of each program's first tile, the step's own token excepted, so that the cache is
    read while the projection is still at work. Only where reads_ahead of launch.py says so.
    """
    num_spans, (block_size, num_kv_heads, head_dim) = lengths_S.shape[0], keys_NPKD.shape[1:]
    group = queries_THD.shape[1] // num_kv_heads
    heads, width = next_power_of_2(group), next_power_of_2(head_dim)
    tile = tile or tile_size(head_dim, keys_NPKD.element_size())
    if num_splits > 1:
        scratch.reserve(num_spans * num_kv_heads, num_splits, group, head_dim)
    start(_decode_kernel, (num_kv_heads, num_spans, num_splits),
        queries_THD, keys_NPKD, values_NPKD, tables_SB, lengths_S, lengths_S if order_S is None else order_S, out_THD,
        scratch.partial, scratch.marks, scratch.tickets, scale * LOG2_E, softcap or 1.0, window or 0, num_splits,
        queries_THD.stride(0), keys_NPKD.stride(0), keys_NPKD.stride(1), tables_SB.stride(0),
        K=num_kv_heads, G=group, ROWS=max(16, heads), D=head_dim, WIDTH=width, P=block_size, TILE=tile, HEADS=heads,
        MERGED=max(1, min(16, 2048 * num_warps // (heads * width))), HAS_SPLITS=num_splits > 1,
        HAS_ORDER=order_S is not None, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        AHEAD=ahead, UPCAST=interpreted(), **options(queries_THD, "attention", num_warps, num_stages),
    )  # fmt: skip
