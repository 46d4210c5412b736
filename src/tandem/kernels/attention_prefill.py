"""Paged prefill attention in Triton: spans of many query tokens over their cached prefix and themselves, in place.

It knows spans, block tables and lengths on the device; keys and values are read through the block table, never
gathered. Query rows are packed (token, head of the group), so that one tile of keys serves a whole group:

    G = 4, 128 rows            token 0: heads 0 1 2 3 │ token 1: heads 0 1 2 3 │ … │ token 31
    keys of the span           [ seen by every row of the tile: no mask | the diagonal: masked | not read ]

The tiles of a span go last first, since they are the longest.

In the batch-invariant form the keys are taken in chunks of fixed size, counted from position 0. Each chunk is computed
from nothing and the chunks are merged in order; a decode step computes chunks side by side and merges them the same
way (attention_invariant.py).
"""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.attention_decode import LOG2_E, NOTHING, nothing_yet, scores, take_tile
from tandem.kernels.launch import interpreted, next_power_of_2, options, start


@triton.jit
def fold_tiles(
    acc, top, total, query, positions, keys, values, table_ptr, head, start, end, length, window, scale, softcap,
    block_stride, position_stride, D: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr, SPECIALISE: tl.constexpr,
):  # fmt: skip
    """Fold the tiles start, start + TILE, … of one span's keys into (acc, top, total)."""
    inner, lanes = tl.arange(0, WIDTH), tl.arange(0, TILE)
    for tile in tl.range(start, end, TILE, warp_specialize=SPECIALISE):
        columns = tile + lanes
        if DESCRIPTORS:
            place = tl.load(table_ptr + tile // P) * P + tile % P
            key = tl.trans(keys.load([place, head * D]))
            value = values.load([place, head * D])
        else:
            if P % TILE == 0:
                block = tl.load(table_ptr + tile // P).to(tl.int64)
                offsets = block * block_stride + (tile % P + lanes) * position_stride + head * D
            else:
                near = tl.minimum(columns, length - 1) if MASKED else columns
                blocks = tl.load(table_ptr + near // P).to(tl.int64)
                offsets = blocks * block_stride + (near % P) * position_stride + head * D
            within = inner < D
            if WIDTH == D:
                key = tl.load(keys + offsets[None, :] + inner[:, None])
                value = tl.load(values + offsets[:, None] + inner[None, :])
            else:
                key = tl.load(keys + offsets[None, :] + inner[:, None], within[:, None], other=0.0)
                value = tl.load(values + offsets[:, None] + inner[None, :], within[None, :], other=0.0)
        if MASKED and (DESCRIPTORS or P % TILE == 0):
            # Slots behind the span's end hold what a former owner left, be it NaN: 0 · NaN must not enter the sum.
            value = tl.where((columns < length)[:, None], value, 0.0)
        score = scores(query, key, scale, softcap, HAS_SOFTCAP, UPCAST)
        if MASKED:
            seen = columns[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (columns[None, :] > positions[:, None] - window)
            score = tl.where(seen, score, NOTHING)
        acc, top, total = take_tile(acc, top, total, score, value, UPCAST)
    return acc, top, total


@triton.jit
def merge(acc, top, total, other_acc, other_top, other_total):
    """Fold one finished chunk into the running result. A chunk that no token sees (top NOTHING) changes nothing."""
    new_top = tl.maximum(top, other_top)
    shrink, other_shrink = tl.exp2(top - new_top), tl.exp2(other_top - new_top)
    other_shrink = tl.where(other_top > NOTHING, other_shrink, 0.0)
    acc = acc * shrink[:, None] + other_acc * other_shrink[:, None]
    return acc, new_top, total * shrink + other_total * other_shrink


@triton.jit
def chunk_begin(chunk, NEAR: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr):
    """Its first position: those before NEAR are in chunks of SHORT, all others in chunks of LONG."""
    return tl.where(chunk < NEAR // SHORT, chunk * SHORT, NEAR + (chunk - NEAR // SHORT) * LONG)


@triton.jit
def chunk_of(position, NEAR: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr):
    """In which chunk a position is."""
    return tl.where(position < NEAR, position // SHORT, NEAR // SHORT + (position - NEAR) // LONG)


@triton.jit
def _in_chunks(
    acc, top, total, query, positions, keys, values, table_ptr, head, start, end, length, window, scale, softcap,
    block_stride, position_stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, NEAR: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Batch-invariant: each chunk from zero, folded in in order, as merging them alone would."""
    for chunk in range(chunk_of(start, NEAR, SHORT, LONG), chunk_of(end - 1, NEAR, SHORT, LONG) + 1):
        low = tl.maximum(chunk_begin(chunk, NEAR, SHORT, LONG), start)
        high = tl.minimum(chunk_begin(chunk + 1, NEAR, SHORT, LONG), end)
        part, part_top, part_total = nothing_yet(ROWS, WIDTH)
        part, part_top, part_total = fold_tiles(
            part, part_top, part_total, query, positions, keys, values, table_ptr, head, low, high, length, window,
            scale, softcap, block_stride, position_stride, D, WIDTH, P, TILE, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
            DESCRIPTORS, False,
        )  # fmt: skip
        acc, top, total = merge(acc, top, total, part, part_top, part_total)
    return acc, top, total


@triton.jit
def _at_once(
    acc, top, total, query, positions, keys, values, table_ptr, head, start, end, first_position, length, window,
    scale, softcap, block_stride, position_stride, D: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr, SPECIALISE: tl.constexpr,
):  # fmt: skip
    """One pass: first the tiles that every query sees whole, which need no mask, then those on the diagonal."""
    full = start
    if not HAS_WINDOW:
        full = tl.maximum(tl.minimum(first_position + 1, end) // TILE * TILE, start)
        acc, top, total = fold_tiles(
            acc, top, total, query, positions, keys, values, table_ptr, head, start, full, length, window,
            scale, softcap, block_stride, position_stride, D, WIDTH, P, TILE, False, False, HAS_SOFTCAP, UPCAST,
            DESCRIPTORS, SPECIALISE,
        )  # fmt: skip
    return fold_tiles(
        acc, top, total, query, positions, keys, values, table_ptr, head, full, end, length, window, scale,
        softcap, block_stride, position_stride, D, WIDTH, P, TILE, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        DESCRIPTORS, False,
    )  # fmt: skip


# Behind decodes in a step the tables, lengths and starts of prompts begin anywhere: one variant must do for all.
@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr", "starts_ptr"],
)
def _prefill_kernel(
    queries_ptr, keys, values, tables_ptr, lengths_ptr, starts_ptr, out_ptr,
    scale, softcap, window, query_stride, block_stride, position_stride, table_stride,
    K: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, NEAR: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, INVARIANT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
    SPECIALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(2), tl.program_id(1)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    span_start = tl.load(starts_ptr + span)
    num_queries = tl.load(starts_ptr + span + 1) - span_start
    length = tl.load(lengths_ptr + span)
    per_tile: tl.constexpr = ROWS // G
    num_tiles = tl.cdiv(num_queries, per_tile)
    if tl.program_id(0) >= num_tiles:
        return
    number = num_tiles - 1 - tl.program_id(0)
    rows, inner = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    tokens = number * per_tile + rows // G
    row_mask = ((rows < per_tile * G) & (tokens < num_queries))[:, None] & (inner < D)[None, :]
    heads = head * G + rows % G
    places = (span_start + tokens).to(tl.int64)
    query = tl.load(queries_ptr + places[:, None] * query_stride + heads[:, None] * D + inner[None, :], row_mask, 0.0)
    first_position = length - num_queries + number * per_tile
    positions = first_position + rows // G
    start, end = 0, tl.minimum(first_position + per_tile, length)
    if HAS_WINDOW:
        start = tl.maximum(first_position - window + 1, 0) // TILE * TILE
    acc, top, total = nothing_yet(ROWS, WIDTH)
    table_ptr = tables_ptr + span.to(tl.int64) * table_stride
    if INVARIANT:
        acc, top, total = _in_chunks(
            acc, top, total, query, positions, keys, values, table_ptr, head, start, end, length, window, scale,
            softcap, block_stride, position_stride, ROWS, D, WIDTH, P, TILE, NEAR, SHORT, LONG, HAS_WINDOW,
            HAS_SOFTCAP, UPCAST, DESCRIPTORS,
        )  # fmt: skip
    else:
        acc, top, total = _at_once(
            acc, top, total, query, positions, keys, values, table_ptr, head, start, end, first_position, length,
            window, scale, softcap, block_stride, position_stride, D, WIDTH, P, TILE, HAS_WINDOW, HAS_SOFTCAP,
            UPCAST, DESCRIPTORS, SPECIALISE,
        )  # fmt: skip
    if PDL == 2:
        gdc_launch_dependents()
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    targets = out_ptr + places[:, None] * (K * G * D) + heads[:, None] * D + inner[None, :]
    tl.store(targets, result.to(out_ptr.dtype.element_ty), row_mask)


# Chunks of the batch-invariant form: positions before NEAR, and others. Large ones cost decode parallelism, small ones
# cost prefill merges (measured: docs/log.md). In this form no product is fused into a sum: which of two is, the
# compiler chooses, and two kernels must choose alike.
NEAR, SHORT, LONG = 512, 128, 256


def prefill_attention(
    queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, tables_SB: Tensor, lengths_S: Tensor,
    starts_S1: Tensor, max_query: int, out_THD: Tensor, scale: float, window: int | None = None,
    softcap: float | None = None, invariant: bool = False, rows: int | None = None, tile: int | None = None,
    num_warps: int | None = None, num_stages: int | None = None, descriptors: bool = False, specialise: bool = False,
) -> None:  # fmt: skip
    """Attention of S spans of 1 … max_query tokens; starts_S1 are their tokens' places in queries and out.

    descriptors: read tiles with the tensor copy engine (blocks of at least a tile). specialise: let a warp of its own
    do the reading. Both only where they were measured to pay.
    """
    choice = shape_for(keys_NPKD, queries_THD.shape[1] // keys_NPKD.shape[2], invariant)
    rows, tile = rows or choice[0], tile or choice[1]
    num_warps, num_stages = num_warps or choice[2], num_stages or choice[3]
    num_kv_heads, head_dim = keys_NPKD.shape[2:]
    group = queries_THD.shape[1] // num_kv_heads
    keys, values = keys_NPKD, values_NPKD
    if descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        assert keys_NPKD.shape[1] % tile == 0 and head_dim == next_power_of_2(head_dim)
        keys, values = (
            TensorDescriptor.from_tensor(cache.view(-1, num_kv_heads * head_dim), [tile, head_dim])
            for cache in (keys_NPKD, values_NPKD)
        )
    grid = (triton.cdiv(max_query, rows // group), num_kv_heads, lengths_S.shape[0])
    start(_prefill_kernel, grid,
        queries_THD, keys, values, tables_SB, lengths_S, starts_S1, out_THD,
        scale * LOG2_E, softcap or 1.0, window or 0, queries_THD.stride(0), keys_NPKD.stride(0), keys_NPKD.stride(1),
        tables_SB.stride(0), K=num_kv_heads, G=group, ROWS=rows, D=head_dim, WIDTH=next_power_of_2(head_dim),
        P=keys_NPKD.shape[1], TILE=tile, NEAR=NEAR, SHORT=SHORT, LONG=LONG, INVARIANT=invariant,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, UPCAST=interpreted(),
        DESCRIPTORS=descriptors, SPECIALISE=specialise,
        enable_fp_fusion=not invariant, **options(queries_THD, "attention", num_warps, num_stages),
    )  # fmt: skip


def shape_for(keys_NPKD: Tensor, group: int, invariant: bool) -> tuple[int, int, int, int]:
    """(rows, tile, warps, stages): 128 rows feed the tensor cores, unless 16- or 32-bit tiles outgrow shared memory."""
    width, item = next_power_of_2(keys_NPKD.shape[3]), keys_NPKD.element_size()
    if interpreted():
        return max(16, next_power_of_2(group)), 16, 4, 1
    if item == 4:
        return 32 if group <= 32 else 64, 32 if width <= 128 else 16, 4, 2
    if invariant:
        return 64, 64 if width <= 128 else 32, 4, 2 if width <= 128 else 1
    if width > 128:
        return 128, 32, 8, 2
    return 128, 128, 8, 3
