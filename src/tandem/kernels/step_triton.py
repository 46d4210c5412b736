"""The kernels of step.py in Triton. They know rows, block tables and positions."""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tandem.kernels.launch import options, start
from tandem.kernels.sample import NOBODY

NO_WINNER = tl.constexpr(NOBODY)


@triton.jit
def _copy_table(source, target, used, TILE: tl.constexpr):
    for first in range(0, used, TILE):
        columns = first + tl.arange(0, TILE)
        tl.store(target + columns, tl.load(source + columns, mask=columns < used), mask=columns < used)


@triton.jit
def _spread_tokens(
    tile, ids, rows, positions, last, tables, slots, num_tokens, table_stride, P: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    tokens = tile * TILE + tl.arange(0, TILE)
    inside = tokens < num_tokens
    row = tl.load(rows + tokens, mask=inside, other=-1)
    position = tl.load(positions + tokens, mask=inside, other=0)
    token = tl.load(ids + tokens, mask=inside, other=0)
    is_carried = inside & (row >= 0) & (token < 0)
    tl.store(ids + tokens, tl.load(last + row, mask=is_carried, other=0), mask=is_carried)
    block = tl.load(tables + row * table_stride + position // P, mask=row >= 0, other=0).to(tl.int64)
    tl.store(slots + tokens, tl.where(row >= 0, block * P + position % P, -1), mask=inside)


# Not specialised, here and below, is what differs from step to step: a variant takes a fifth of a second to compile.
@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "table_stride", "span_stride"])
def _spread_kernel(
    ids, rows, positions, span_rows, lengths, last, tables, slots, span_tables, num_tokens, num_tiles,
    table_stride, span_stride, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < num_tiles:
        _spread_tokens(program, ids, rows, positions, last, tables, slots, num_tokens, table_stride, P, TILE)
    else:
        span = (program - num_tiles).to(tl.int64)
        row = tl.load(span_rows + span)
        used = tl.where(row >= 0, (tl.load(lengths + span) + P - 1) // P, 0)
        _copy_table(tables + row * table_stride, span_tables + span * span_stride, used, TILE)


@triton.jit
def _advance_kernel(
    rows, starts, last, tables, turn, ids, positions, slots, lengths, span_tables, embedding, embedded, num_turns,
    table_stride, span_stride, size, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # Two programs a span: one looks its token up in the embedding, if there is one, the other does all else.
    span = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + span).to(tl.int64)
    taken = row >= 0
    if tl.program_id(1) == 1:
        token = tl.load(last + row, mask=taken, other=0)
        for first in range(0, size, 1024):
            columns = first + tl.arange(0, 1024)
            x = tl.load(embedding + token * size + columns, mask=columns < size)
            tl.store(embedded + span * size + columns, x, mask=columns < size)
        return
    start = tl.load(starts + span)
    position = tl.where(taken, start, 0)
    block = tl.load(tables + row * table_stride + position // P, mask=taken, other=0).to(tl.int64)
    tl.store(ids + span, tl.load(last + row, mask=taken, other=0))
    tl.store(positions + span, position)
    tl.store(slots + span, tl.where(taken, block * P + position % P, -1))
    tl.store(lengths + span, tl.where(taken, position + 1, 0).to(tl.int32))
    tl.store(starts + span, start + 1)
    used = tl.where(taken, position // P + 1, 0).to(tl.int32)
    _copy_table(tables + row * table_stride, span_tables + span * span_stride, used, TILE)
    if span == 0:
        tl.store(turn, (tl.load(turn) + 1) % num_turns)


# The count is padded by the mask. The pairs may lie in pinned host memory, which the kernel reads over the bus.
@triton.jit(do_not_specialize=["count"])
def _grow_kernel(pairs, tables, count, TILE: tl.constexpr):
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = entries < count
    places = tl.load(pairs + entries, mask=inside, other=0)
    blocks = tl.load(pairs + count + entries, mask=inside, other=0)
    tl.store(tables + places, blocks, mask=inside)


@triton.jit
def _finish_kernel(
    tokens, hidden, rows, last, home, turn, size, token_stride, hidden_stride, home_stride,
    WINNERS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    num_bad = 0
    for first in range(0, size, TILE):
        columns = first + tl.arange(0, TILE)
        x = tl.load(hidden + place * hidden_stride + columns, mask=columns < size, other=0.0).to(tl.float32)
        num_bad += tl.sum((tl.abs(x) < float("inf")).to(tl.int32) ^ 1)
    if PDL > 0:  # the hidden states were there before the kernel that chooses tokens let this one start
        gdc_wait()
    token = tl.load(tokens + place * token_stride).to(tl.int64)
    if WINNERS:
        num_bad += (token == NO_WINNER).to(tl.int32)
        token = 0x7FFFFFFF - (token & 0x7FFFFFFF)
        tl.store(tokens + place * token_stride, NO_WINNER)
    row = tl.load(rows + place).to(tl.int64)
    tl.store(last + row, tl.where(num_bad == 0, token, 0), mask=row >= 0)
    tl.store(home + tl.load(turn) * home_stride + place, tl.where(num_bad == 0, token, -1))


TILE = 128


def spread_triton(
    ids_T: Tensor, rows_T: Tensor, positions_T: Tensor, rows_S: Tensor, lengths_S: Tensor, last_R: Tensor,
    tables_RB: Tensor, block_size: int, slots_T: Tensor, tables_SB: Tensor,
) -> None:  # fmt: skip
    """See spread_torch."""
    num_tiles = -(-len(ids_T) // TILE)
    start(_spread_kernel, (num_tiles + len(rows_S),),
        ids_T, rows_T, positions_T, rows_S, lengths_S, last_R, tables_RB, slots_T, tables_SB, len(ids_T), num_tiles,
        tables_RB.stride(0), tables_SB.stride(0), P=block_size, TILE=TILE,
    )  # fmt: skip


def advance_triton(
    rows_S: Tensor, starts_S: Tensor, last_R: Tensor, tables_RB: Tensor, block_size: int, turn_1: Tensor,
    num_turns: int, ids_S: Tensor, positions_S: Tensor, slots_S: Tensor, lengths_S: Tensor, tables_SB: Tensor,
    embedding_VE: Tensor | None = None, embedded_SE: Tensor | None = None,
) -> None:  # fmt: skip
    """See advance_torch. embedding_VE and embedded_SE are contiguous."""
    has_both = embedding_VE is not None and embedded_SE is not None
    assert not has_both or (embedding_VE.is_contiguous() and embedded_SE.is_contiguous())
    start(_advance_kernel, (len(rows_S), 2 if has_both else 1),
        rows_S, starts_S, last_R, tables_RB, turn_1, ids_S, positions_S, slots_S, lengths_S, tables_SB,
        embedding_VE if has_both else ids_S, embedded_SE if has_both else ids_S, num_turns, tables_RB.stride(0),
        tables_SB.stride(0), embedding_VE.shape[1] if has_both else 0, P=block_size, TILE=TILE,
    )  # fmt: skip


def grow_triton(pairs_2C: Tensor, tables: Tensor) -> None:
    """See grow_torch."""
    count = pairs_2C.shape[1]
    start(_grow_kernel, (triton.cdiv(count, TILE),), pairs_2C, tables, count, TILE=TILE)


def finish_triton(
    tokens_R: Tensor, hidden_RE: Tensor, rows_R: Tensor, last_R: Tensor, home_DR: Tensor, turn_1: Tensor
) -> None:
    """See finish_torch."""
    if len(tokens_R):
        start(_finish_kernel, (len(tokens_R),),
            tokens_R, hidden_RE, rows_R, last_R, home_DR, turn_1, hidden_RE.shape[1], tokens_R.stride(0),
            hidden_RE.stride(0), home_DR.stride(0), WINNERS=tokens_R.dim() == 2, TILE=1024,
            **options(hidden_RE, "sample", num_warps=4),
        )  # fmt: skip
