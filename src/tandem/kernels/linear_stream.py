"""Small-batch matrix products for Hopper: weights are on their way before the kernel waits for the one before it.

It knows tiles, barriers and tensor memory copies; which shapes and how many stages is for linear.py. Weights do not
depend on the predecessor, so a program that was started early (programmatic dependent launch, see launch.py) asks for
as many tiles of them as its shared memory holds, then waits, then asks for the activations:

    predecessor   ───────── work ─────────┤ tail ├
    this kernel            started │ weights 0 … S-1 requested │ wait ├ activations │ product, next tiles │ out

A tile of tokens is two halves of rows that exist, overlapping where there are fewer tokens than twice a half: rows past
the end, which the copy engine fills with zeros, take far longer than others. What two tiles or halves have in common
is computed twice, to the same numbers.

Written in Gluon, where shared memory and waiting are explicit. Other devices and the interpreter take linear_triton.py.
"""

# mypy: ignore-errors
# (Gluon's decorator and builtins carry no types.)

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.launch import options, start
from tandem.kernels.sample import NOBODY as NO_WINNER
from tandem.kernels.sample import WINNER as WINNER_SIZE

INNER = 64  # elements of the inner dimension in 128 bytes, the width of a swizzled tile of shared memory
NOBODY, WINNER = gl.constexpr(NO_WINNER), gl.constexpr(WINNER_SIZE)
LAYOUTS = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 3, 4, 5)}


@gluon.jit
def _wait_for_predecessor():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_successor_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _request_weights(weights, barrier, tiles, first_row, column, GATED: gl.constexpr):
    if GATED:
        tma.async_copy_global_to_shared(weights, [column // 64, first_row // 8, 0, 0, 0], barrier, tiles)
    else:
        tma.async_copy_global_to_shared(weights, [column // 64, first_row, 0], barrier, tiles)


@gluon.jit
def _request_stage(
    weights, barriers, tiles, slot, first_row, column, STAGE_BYTES: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Ask for a stage's weights; its barrier, which expects its tokens, too."""
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, STAGE_BYTES)
    _request_weights(weights, barrier, tiles.index(slot), first_row, column, GATED)
    return barrier


@gluon.jit
def _request_tokens(x, barrier, tiles, first_token, column):
    tma.async_copy_global_to_shared(x, [column // 64, 0, first_token, 0], barrier, tiles)


@gluon.jit
def _activate(gate, GELU: gl.constexpr):
    # As activate in activation_triton.py.
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (2.0 - 2.0 / (gl.exp(2.0 * inner) + 1.0))
    return gate / (1.0 + gl.exp(-gate))


@gluon.jit
def _write(acc, bias_ptr, out_ptr, first_row, first_token, apart, T, N, IS_FIRST, HAS_BIAS: gl.constexpr,
           GATED: gl.constexpr, GELU: gl.constexpr):  # fmt: skip
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    if GATED:
        # Of 16 rows the first 8 are gate rows and the others their up rows: a thread holds both of a pair.
        pairs = gl.permute(gl.reshape(acc, [ROWS // 16, 2, 8, TOKENS]), [0, 2, 3, 1])
        gate, up = gl.split(pairs)
        gate, up = gl.reshape(gate, [ROWS // 2, TOKENS]), gl.reshape(up, [ROWS // 2, TOKENS])
    else:
        gate, up = acc, acc
    layout: gl.constexpr = gate.type.layout
    rows = first_row + gl.arange(0, gate.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    tokens = first_token + columns + gl.where(columns < TOKENS // 2, 0, apart - TOKENS // 2)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + rows, (rows < N) & IS_FIRST, other=0.0).to(gl.float32)
        gate += gl.expand_dims(bias, 1)
    if GATED:
        if HAS_BIAS:
            up += gl.expand_dims(gl.load(bias_ptr + N + rows, rows < N, other=0.0).to(gl.float32), 1)
        rounding: gl.constexpr = out_ptr.dtype.element_ty
        gate = _activate(gate.to(rounding).to(gl.float32), GELU) * up.to(rounding).to(gl.float32)
    mask = gl.expand_dims(rows < N, 1) & gl.expand_dims(tokens < T, 0)
    targets = out_ptr + gl.expand_dims(tokens.to(gl.int64) * N, 0) + gl.expand_dims(rows, 1)
    gl.store(targets, gate.to(out_ptr.dtype.element_ty), mask)


@gluon.jit
def _order(bits):
    """The bits of float32s as integers that order as these do, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _challenge(acc, winners_ptr, first_row, first_token, apart, T, N, num_warps: gl.constexpr, ROUNDING: gl.constexpr):
    """As challenge of sample_triton.py. Rows of a warp are compared; warps do not wait for each other."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    logit = acc.to(ROUNDING).to(gl.float32) + 0.0  # -0.0 becomes 0.0
    # The last 13 bits of a number that was rounded to 16 are all alike: the row within the tile takes their place.
    key = (_order(logit.to(gl.int32, bitcast=True)) & -8192) | gl.expand_dims(8191 - rows, 1)
    key = gl.where((logit > float("-inf")) & gl.expand_dims(first_row + rows < N, 1), key, -0x80000000)
    best = gl.max(gl.reshape(key, [ROWS // (16 * num_warps), num_warps, 16, TOKENS]), axis=2)
    best = gl.max(best, axis=0)
    order = (best & -8192) | gl.where(best < 0, 8191, 0)
    winner = (order.to(gl.int64) << 32) | (0x7FFFFFFF - 8191 - first_row + (best & 8191)).to(gl.int64)
    winner = gl.where(best > -0x80000000, winner, NOBODY)
    columns = gl.arange(0, TOKENS, gl.SliceLayout(0, best.type.layout))
    tokens = first_token + columns + gl.where(columns < TOKENS // 2, 0, apart - TOKENS // 2)
    targets = gl.expand_dims(winners_ptr + tokens * WINNER, 0)
    is_there = gl.expand_dims(tokens < T, 0)
    wins = is_there & (winner > gl.load(targets, is_there, other=NOBODY, cache_modifier=".cg"))
    gl.atomic_max(targets + gl.full([num_warps, TOKENS], 0, gl.int32, best.type.layout), winner, wins, sem="relaxed")


@gluon.jit
def _give(acc, bias_ptr, out_ptr, part, first_row, first_token, apart, T, N, num_ids, ROUNDING: gl.constexpr,
          PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr, BEST: gl.constexpr,
          num_warps: gl.constexpr):  # fmt: skip
    """Raise winners by a tile's results, or write them; partial sums where they are of one part."""
    if BEST:
        _challenge(acc, out_ptr, first_row, first_token, apart, T, num_ids, num_warps, ROUNDING)
    else:
        if PARTS:
            out_ptr += part.to(gl.int64) * T * N
        _write(acc, bias_ptr, out_ptr, first_row, first_token, apart, T, N, part == 0, HAS_BIAS, GATED, GELU)


@gluon.jit
def _multiply(acc, weight_tiles, token_tiles, first_tile, TILES: gl.constexpr):
    for number in gl.static_range(TILES):
        tile = first_tile + number
        acc = warpgroup_mma(weight_tiles.index(tile), token_tiles.index(tile).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit(do_not_specialize=["T", "apart"])
def _stream_kernel(
    x, weights, bias_ptr, out_ptr, T, N, num_ids, size, part_size, apart,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    WHOLE: gl.constexpr, PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr,
    BEST: gl.constexpr, LAG: gl.constexpr, OPERAND: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    # out[T, N] = x[T, I] · weights[N, I]ᵀ, a stage at a time: TILES tiles of ROWS × 64 weights and TOKENS × 64 of x.
    # WHOLE: all stages of a part fit, so that no slot is filled twice. HELD: memory of how many stages is taken.
    # LAG: a slot is filled anew while the product of the next one is at work, else ahead of it. apart: how far a tile's
    # second half of tokens is from the first. Past the end of I and of the rows the copy engine writes zeros.
    STEP: gl.constexpr = TILES * 64
    STAGE_BYTES: gl.constexpr = STEP * (ROWS + TOKENS) * 2
    part = gl.program_id(2)
    first_row = gl.program_id(1) * (ROWS // 2 if GATED else ROWS)
    begin = part * part_size
    end = gl.minimum(begin + part_size, size)
    weight_shape: gl.constexpr = [HELD] + weights.block_type.shape  # noqa: RUF005
    weight_tiles = gl.allocate_shared_memory(weights.dtype, weight_shape, weights.layout)
    token_tiles = gl.allocate_shared_memory(x.dtype, [HELD, TILES, 2, TOKENS // 2, 64], x.layout)
    flat_weights = weight_tiles._reinterpret(weights.dtype, [HELD * TILES, ROWS, 64], OPERAND)
    flat_tokens = token_tiles._reinterpret(x.dtype, [HELD * TILES, TOKENS, 64], OPERAND)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        _request_stage(weights, barriers, weight_tiles, stage, first_row, begin + stage * STEP, STAGE_BYTES, GATED)
    if PDL == 1:
        _let_successor_start()
    if PDL > 0:
        _wait_for_predecessor()
    first_token = gl.maximum(gl.minimum(gl.program_id(0) * TOKENS, T - TOKENS), 0)
    for stage in gl.static_range(STAGES):
        _request_tokens(x, barriers.index(stage), token_tiles.index(stage), first_token, begin + stage * STEP)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TOKENS, 16]))
    if WHOLE:
        for stage in gl.static_range(STAGES):
            mbarrier.wait(barriers.index(stage), 0)
            acc = _multiply(acc, flat_weights, flat_tokens, stage * TILES, TILES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        for step in range((end - begin + STEP - 1) // STEP):
            slot = step % STAGES
            mbarrier.wait(barriers.index(slot), (step // STAGES) & 1)
            acc = _multiply(acc, flat_weights, flat_tokens, slot * TILES, TILES)
            acc = warpgroup_mma_wait(TILES if LAG else 0, deps=(acc,))
            done = step - LAG
            column = begin + (done + STAGES) * STEP
            if (done >= 0) & (column < end):
                slot = done % STAGES
                barrier = _request_stage(weights, barriers, weight_tiles, slot, first_row, column, STAGE_BYTES, GATED)
                _request_tokens(x, barrier, token_tiles.index(slot), first_token, column)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if PDL == 2:
        _let_successor_start()
    _give(acc, bias_ptr, out_ptr, part, first_row, first_token, apart, T, N, num_ids, x.dtype, PARTS, HAS_BIAS, GATED,
          GELU, BEST, num_warps)  # fmt: skip


def stream(
    x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None, *, tokens: int, rows: int, step: int, num_parts: int = 1,
    num_stages: int = 4, least_bytes: int = 0, lag: int = 0, num_warps: int = 4, activation: str | None = None,
    num_ids: int = 0, winners_TW: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As skinny of linear_triton.py, with tiles of 8 tokens and more. See streams and aligned of linear.py.

    tokens: more than 8 are less than twice those that there are. least_bytes: of shared memory, to be taken even where
    fewer are used. lag: 0 or 1, see the kernel. The weights are read before the kernel ahead has ended, so it must not
    be that one which writes them.
    """
    num_tokens, size = x_TI.shape
    num_rows = weight_NI.shape[0] // (2 if activation else 1)
    unit = max(step, 128)  # as invariant_linear cuts
    part_size = triton.cdiv(triton.cdiv(size, unit), num_parts) * unit
    num_parts = triton.cdiv(size, part_size)
    num_stages = min(num_stages, part_size // step)
    num_held = max(num_stages, triton.cdiv(least_bytes, 2 * step * (rows + tokens)))
    shape = (num_parts, num_tokens, num_rows) if num_parts > 1 else (num_tokens, num_rows)
    out = winners_TW
    if out is None:
        out = torch.empty(shape, dtype=torch.float32 if num_parts > 1 else x_TI.dtype, device=x_TI.device)
    # Tiles as the outer dimension, so that one request brings a stage of them. Gate and up rows by turns of 8.
    columns, tiles = size // INNER, step // INNER
    x, apart = _token_tiles(x_TI, tokens, tiles)
    if activation:
        whole, strides = [columns, num_rows // 8, 2, 8, INNER], [INNER, 8 * size, num_rows * size, size, 1]
        weights = TensorDescriptor(weight_NI, whole, strides, [tiles, rows // 16, 2, 8, INNER], LAYOUTS[5])
    else:
        whole, strides = [columns, num_rows, INNER], [INNER, size, 1]
        weights = TensorDescriptor(weight_NI, whole, strides, [tiles, rows, INNER], LAYOUTS[3])
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(num_rows, rows // (2 if activation else 1)), num_parts)
    start(_stream_kernel, grid,
        x, weights, weight_NI if bias_N is None else bias_N, out, num_tokens, num_rows, num_ids, size, part_size, apart,
        TOKENS=tokens, ROWS=rows, TILES=tiles, STAGES=num_stages, HELD=num_held,
        WHOLE=num_stages * step >= part_size, PARTS=num_parts > 1, HAS_BIAS=bias_N is not None,
        GATED=activation is not None, GELU=activation == "gelu",
        BEST=winners_TW is not None, LAG=lag, OPERAND=LAYOUTS[2],
        **options(x_TI, "stream" if winners_TW is None else "linear", num_warps),
    )  # fmt: skip
    return out


def _token_tiles(x_TI: Tensor, tokens: int, tiles: int) -> tuple[TensorDescriptor, int]:
    """Activations as [columns of 64, half, rows of a half, 64], and how many tokens the halves are apart."""
    (num_tokens, size), half = x_TI.shape, tokens // 2
    assert num_tokens > half or tokens <= 8
    stride = size if num_tokens == 1 else x_TI.stride(0)
    if num_tokens > half:
        apart, halves, near = min(half, num_tokens - half), 2, max(half, num_tokens - half)
    else:
        apart, halves, near = half, 1, num_tokens
    whole, strides = [size // INNER, halves, near, INNER], [INNER, apart * stride, stride, 1]
    return TensorDescriptor(x_TI, whole, strides, [tiles, 2, half, INNER], LAYOUTS[4]), apart
