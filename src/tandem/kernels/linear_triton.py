"""Small-batch matrix products in Triton: the weights are streamed once, and the activations are few.

It knows shapes and tiles; which shape is worth it is measured in linear.py. The weights are the left operand, so that
their rows fill the tensor cores' 64-row tiles whatever the number of tokens. Where there are too few rows for all
multiprocessors the inner dimension is split, and each part writes float32 partial sums of its own: the consumer
(add_rms_norm, norm_rope_store) adds them in order, so nothing is atomic and a result never depends on timing. On
Hopper linear_stream.py takes these products; here is the form for other devices and odd shapes, and the
batch-invariant one for many tokens.
"""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.activation_triton import activate
from tandem.kernels.attention_decode import product
from tandem.kernels.launch import interpreted, options, start
from tandem.kernels.sample_triton import challenge


# T is not specialised: with T = 1 known, the compiler lays the activations out worse.
@triton.jit(do_not_specialize=["T"])
def _skinny_kernel(
    x_ptr, weights, bias_ptr, out_ptr, T, N, num_ids, size, x_stride, part_size,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, BEST: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # out[T, N] = x[T, I] · weights[N, I]ᵀ. GATED: rows n and N + n of the weights give activation(gate) · up; a tile
    # then holds ROWS/2 gate rows and their ROWS/2 up rows.
    part = tl.program_id(1)
    outs: tl.constexpr = ROWS // 2 if GATED else ROWS
    first_row = tl.program_id(0) * outs
    lanes = tl.arange(0, ROWS)
    rows = tl.minimum(first_row + lanes % outs, N - 1) + (lanes // outs) * N
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    start = part * part_size
    end = tl.minimum(start + part_size, size)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    inner = tl.arange(0, STEP)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    token_ptrs = x_ptr + tokens.to(tl.int64) * x_stride
    for step in range(start, end, STEP):
        columns = step + inner
        # Rows of padding are masked, not clamped: every program asking for one row again would queue at its L2 slice.
        if EVEN:
            x = tl.load(token_ptrs[:, None] + columns[None, :], (tokens < T)[:, None], other=0.0)
        else:
            x_mask = (tokens < T)[:, None] & (columns < end)[None, :]
            x = tl.load(token_ptrs[:, None] + columns[None, :], x_mask, other=0.0)
        if EVEN:
            weight = tl.load(weights + (rows.to(tl.int64) * size)[:, None] + columns[None, :])
        else:
            weight_ptrs = weights + (rows.to(tl.int64) * size)[:, None] + columns[None, :]
            weight = tl.load(weight_ptrs, (columns < end)[None, :], other=0.0)
        acc = _accumulate(acc, weight, x, UPCAST)
    if PDL == 2:
        gdc_launch_dependents()
    if HAS_BIAS:
        acc += tl.where(part == 0, tl.load(bias_ptr + rows).to(tl.float32), 0.0)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, outs, TOKENS]), [1, 2, 0]))
        rounding: tl.constexpr = out_ptr.dtype.element_ty
        acc = activate(gate.to(rounding).to(tl.float32), GELU) * up.to(rounding).to(tl.float32)
    out_rows = first_row + tl.arange(0, outs)
    if BEST:
        rounded = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
        challenge(rounded, out_rows, tokens, out_ptr, T, num_ids)
        return
    mask = (out_rows < N)[:, None] & (tokens < T)[None, :]
    targets = out_ptr + (tokens.to(tl.int64) * N)[None, :] + out_rows[:, None]
    if PARTS:
        targets += part.to(tl.int64) * T * N
    tl.store(targets, acc.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _accumulate(acc, weight, x, UPCAST: tl.constexpr):
    if UPCAST:
        return acc + product(weight, tl.trans(x), UPCAST)
    return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")


def skinny(
    x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None, *, tokens: int, rows: int, step: int, num_parts: int = 1,
    num_stages: int = 4, num_warps: int = 4, activation: str | None = None, as_parts: bool = False, num_ids: int = 0,
    winners_TW: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x · Wᵀ + b, bfloat16 or float16, with the given tiles.

    num_parts > 1 or as_parts: float32 partial sums [parts, T, N]. activation "silu" or "gelu": [T, N/2] of the two
    halves of W's rows; num_parts is 1 then. winners_TW: are raised by the first num_ids of W's rows, and returned
    instead of any product; see winners_torch of sample.py.
    """
    num_tokens, size = x_TI.shape
    assert weight_NI.is_contiguous() and x_TI.stride(1) == 1 and (activation is None or num_parts == 1)
    num_rows = weight_NI.shape[0] // (2 if activation else 1)
    as_parts = as_parts or num_parts > 1
    part_size = triton.cdiv(triton.cdiv(size, step), num_parts) * step
    num_parts = triton.cdiv(size, part_size)
    shape = (num_parts, num_tokens, num_rows) if as_parts else (num_tokens, num_rows)
    out = winners_TW
    if out is None:
        out = torch.empty(shape, dtype=torch.float32 if as_parts else x_TI.dtype, device=x_TI.device)
    grid = (triton.cdiv(num_rows, rows // (2 if activation else 1)), num_parts, triton.cdiv(num_tokens, tokens))
    start(_skinny_kernel, grid,
        x_TI, weight_NI, weight_NI if bias_N is None else bias_N, out, num_tokens, num_rows, num_ids, size,
        x_TI.stride(0), part_size, TOKENS=tokens, ROWS=rows, STEP=step, EVEN=size % step == 0, PARTS=as_parts,
        HAS_BIAS=bias_N is not None, GATED=activation is not None, GELU=activation == "gelu",
        BEST=winners_TW is not None, UPCAST=interpreted(), **options(x_TI, "linear", num_warps, num_stages),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])
def _invariant_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, T, N, size, x_stride, part_size, num_tiles_n,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, NUM_PARTS: tl.constexpr,
    SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The inner dimension is summed in NUM_PARTS parts, each from zero, whatever T. SPLIT: a program does one part and
    # writes it; else a program does all of them and adds them in the same order as sum_parts.
    program = tl.program_id(0)
    rows = (program % num_tiles_n) * ROWS + tl.arange(0, ROWS)
    tokens = (program // num_tiles_n) * TOKENS + tl.arange(0, TOKENS)
    near_rows = tl.minimum(rows, N - 1).to(tl.int64)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    row_ptrs, token_ptrs = weight_ptr + near_rows * size, x_ptr + tokens.to(tl.int64) * x_stride
    inner = tl.arange(0, STEP)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    first = tl.program_id(1) if SPLIT else 0
    for number in range(first, first + 1 if SPLIT else NUM_PARTS):
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for step in range(number * part_size, tl.minimum(number * part_size + part_size, size), STEP):
            columns = step + inner
            if EVEN:
                x = tl.load(token_ptrs[:, None] + columns[None, :], (tokens < T)[:, None], other=0.0)
                weight = tl.load(row_ptrs[:, None] + columns[None, :])
            else:
                x_mask = (tokens < T)[:, None] & (columns < size)[None, :]
                x = tl.load(token_ptrs[:, None] + columns[None, :], x_mask, other=0.0)
                weight = tl.load(row_ptrs[:, None] + columns[None, :], (columns < size)[None, :], other=0.0)
            acc = _accumulate(acc, weight, x, UPCAST)
        total += acc
    if PDL == 2:
        gdc_launch_dependents()
    if HAS_BIAS:
        total += tl.load(bias_ptr + near_rows).to(tl.float32)[:, None]
    mask = (rows < N)[:, None] & (tokens < T)[None, :]
    targets = out_ptr + (tokens.to(tl.int64) * N)[None, :] + rows[:, None]
    if SPLIT:
        targets += first.to(tl.int64) * T * N
    tl.store(targets, total.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _sum_kernel(
    parts_ptr, bias_ptr, out_ptr, size, N, NUM_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    total = tl.load(parts_ptr + places, places < size, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + places, places < size, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + places % N, places < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), places < size)


def sum_parts_triton(parts: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add float32 partial sums [parts, T, N] in order, then the bias, and round once."""
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    start(_sum_kernel, (triton.cdiv(out.numel(), 1024),),
        parts, parts if bias_N is None else bias_N, out, out.numel(), parts.shape[2], NUM_PARTS=parts.shape[0],
        HAS_BIAS=bias_N is not None, BLOCK=1024, **options(parts, "linear", num_warps=4),
    )  # fmt: skip
    return out


def invariant_linear(
    x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None, num_parts: int, as_parts: bool = False
) -> Tensor:
    """x · Wᵀ + b such that a token's result is the same number whatever T: fixed parts, fixed order, one rounding.

    as_parts: in float32, [parts, T, N] or their sum [1, T, N], for a consumer that adds in order and rounds once.
    """
    num_tokens, size = x_TI.shape
    num_rows, step = weight_NI.shape[0], 32 if interpreted() else 128
    part_size = triton.cdiv(triton.cdiv(size, 128), num_parts) * 128
    num_parts = triton.cdiv(size, part_size)
    split = num_tokens <= 128 and num_parts > 1
    tokens, rows, warps, stages = (64, 64, 4, 3) if num_tokens <= 128 else (128, 128, 8, 3)
    if interpreted():
        tokens, rows = 16, 32
    elif num_tokens <= 32:
        tokens, stages = 16 if num_tokens <= 16 else 32, 4
    if num_tokens > 128:
        step = min(step, 64)  # how finely the sum is cut does not change it: the tensor cores add 16 at a time
    shape = (num_parts, num_tokens, num_rows) if split else (num_tokens, num_rows)
    wide = split or as_parts
    out = torch.empty(shape, dtype=torch.float32 if wide else x_TI.dtype, device=x_TI.device)
    tiles_n, tiles_t = triton.cdiv(num_rows, rows), triton.cdiv(num_tokens, tokens)
    start(_invariant_kernel, (tiles_n * tiles_t, num_parts if split else 1),
        x_TI, weight_NI, weight_NI if bias_N is None else bias_N, out, num_tokens, num_rows, size, x_TI.stride(0),
        part_size, tiles_n, TOKENS=tokens, ROWS=rows, STEP=step, EVEN=size % step == 0, NUM_PARTS=num_parts,
        SPLIT=split, HAS_BIAS=bias_N is not None and not split, UPCAST=interpreted(),
        **options(x_TI, "linear", warps, stages),
    )  # fmt: skip
    if as_parts:
        return out if split else out[None]
    return sum_parts_triton(out, bias_N, x_TI.dtype) if split else out
