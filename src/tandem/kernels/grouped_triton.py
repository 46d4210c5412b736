"""Grouped products in Triton for every device and dtype: how many rows a group has is found on the device.

It knows sorted rows and where groups end. The grid has as many tiles of rows as there can be at most; each program
scans the ends for its tile's group and does nothing if there are fewer tiles:

    groups of 5, 0, 1, 9 rows, tiles of 4     0 0 │ 2 │ 3 3 3 │ none …     at most min(A, X) + (A - min(A, X)) // 4

The order of summation hangs on the tiles. In batch-invariant mode these depend on dtype and size alone, so that a
row's result is the same number whatever the other rows. The weights are the left operand, as in linear_triton.py.
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
from tandem.kernels.grouped import FEW_ROWS
from tandem.kernels.launch import interpreted, next_power_of_2, options, start

LEAST_EXPERTS = 16  # of the scan: one form for all smaller mixtures
STEP = 64


@triton.jit
def _find_tile(ends_ptr, tile, X, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """The group of a tile of rows, its first row and its group's end; group X if there are fewer tiles."""
    groups = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + groups, groups < X, other=0)
    begins = tl.load(ends_ptr + groups - 1, (groups > 0) & (groups < X), other=0)
    tiles = (ends - begins + TOKENS - 1) // TOKENS
    tiles = tl.where(groups < X, tiles, 0)
    last_tiles = tl.cumsum(tiles, 0)
    group = tl.sum(((last_tiles <= tile) & (groups < X)).to(tl.int32), 0)
    is_it = groups == group
    begin = tl.sum(tl.where(is_it, begins, 0), 0)
    number = tile - tl.sum(tl.where(is_it, last_tiles - tiles, 0), 0)
    return group, begin + number * TOKENS, tl.sum(tl.where(is_it, ends, 0), 0)


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_kernel(
    x_ptr, tokens_ptr, weight_ptr, ends_ptr, out_ptr, num_tiles, X, N, size, x_stride, GATHERED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # out[A, N] = x[A, I] · weight[group of a, N, I]ᵀ. Tiles of rows change first, so that those of a group read a tile
    # of weights one beside the other. GATHERED: row a is x[tokens[a]]. GATED: as in linear_triton.py.
    outs: tl.constexpr = ROWS // 2 if GATED else ROWS
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    group, first, end = _find_tile(ends_ptr, tl.program_id(0) % num_tiles, X, TOKENS, EXPERTS)
    first_row = (tl.program_id(0) // num_tiles) * outs
    lanes = tl.arange(0, ROWS)
    rows = tl.minimum(first_row + lanes % outs, N - 1) + (lanes // outs) * N
    places = first + tl.arange(0, TOKENS)
    is_there = (group < X) & (places < end)
    tokens = tl.load(tokens_ptr + places, is_there, other=0) if GATHERED else places
    weights_of: tl.constexpr = 2 if GATED else 1
    weight_ptr += tl.minimum(group, X - 1).to(tl.int64) * N * weights_of * size
    row_ptrs, token_ptrs = weight_ptr + rows.to(tl.int64) * size, x_ptr + tokens.to(tl.int64) * x_stride
    inner = tl.arange(0, STEP)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in range(0, tl.where(group < X, size, 0), STEP):
        columns = step + inner
        if EVEN:
            x = tl.load(token_ptrs[:, None] + columns[None, :], is_there[:, None], other=0.0)
            weight = tl.load(row_ptrs[:, None] + columns[None, :])
        else:
            x_mask = is_there[:, None] & (columns < size)[None, :]
            x = tl.load(token_ptrs[:, None] + columns[None, :], x_mask, other=0.0)
            weight = tl.load(row_ptrs[:, None] + columns[None, :], (columns < size)[None, :], other=0.0)
        if UPCAST:
            acc += product(weight, tl.trans(x), UPCAST)
        else:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if PDL == 2:
        gdc_launch_dependents()
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, outs, TOKENS]), [1, 2, 0]))
        rounding: tl.constexpr = out_ptr.dtype.element_ty
        acc = activate(gate.to(rounding).to(tl.float32), GELU) * up.to(rounding).to(tl.float32)
    out_rows = first_row + tl.arange(0, outs)
    targets = out_ptr + (places.to(tl.int64) * N)[None, :] + out_rows[:, None]
    tl.store(targets, acc.to(out_ptr.dtype.element_ty), (out_rows < N)[:, None] & is_there[None, :])


def tiles_of(dtype: torch.dtype, size: int, is_few: bool) -> dict[str, int]:
    """Tiles and launch; is_few: few rows a group. float32 has no tensor cores here, since their TF32 would round it."""
    if interpreted():
        return {"tokens": 16, "rows": 32, "step": 32, "num_warps": 4, "num_stages": 2}
    if dtype == torch.float32:
        return {"tokens": 16, "rows": 64, "step": 32, "num_warps": 4, "num_stages": 2}
    tokens, rows = (64, 64) if size % STEP else (16, 64) if is_few else (64, 128)  # what is masked takes registers
    return {"tokens": tokens, "rows": rows, "step": STEP, "num_warps": 4, "num_stages": 4}


def most_tiles(num_rows: int, num_groups: int, tile: int) -> int:
    """Tiles that so many rows need at most, however they are spread: one begins with each group that has any."""
    begun = min(num_rows, num_groups)
    return begun + (num_rows - begun) // tile


def grouped_triton(
    x: Tensor, weight_XOI: Tensor, ends_X: Tensor, activation: str | None = None, tokens_A: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:  # fmt: skip
    """See grouped_torch; with an activation, "silu" or "gelu", and tokens gated_grouped."""
    num_rows, size = len(x) if tokens_A is None else len(tokens_A), x.shape[1]
    num_groups, num_outs = weight_XOI.shape[0], weight_XOI.shape[1] // (2 if activation else 1)
    assert weight_XOI.is_contiguous() and x.stride(1) == 1 and ends_X.dtype == torch.int32
    out = torch.empty((num_rows, num_outs), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    how = tiles_of(x.dtype, size, not invariant and num_rows <= FEW_ROWS * num_groups)
    num_tiles = most_tiles(num_rows, num_groups, how["tokens"])
    tiles_n = triton.cdiv(num_outs, how["rows"] // (2 if activation else 1))
    start(_grouped_kernel, (num_tiles * tiles_n,),
        x, ends_X if tokens_A is None else tokens_A, weight_XOI, ends_X, out, num_tiles, num_groups, num_outs, size,
        x.stride(0), GATHERED=tokens_A is not None,
        TOKENS=how["tokens"], ROWS=how["rows"], STEP=how["step"], EVEN=size % how["step"] == 0,
        EXPERTS=max(LEAST_EXPERTS, next_power_of_2(num_groups)), GATED=activation is not None,
        GELU=activation == "gelu", UPCAST=interpreted(),
        **options(x, "linear", how["num_warps"], how["num_stages"]),
    )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    rows_ptr, places_ptr, weights_ptr, out_ptr, size, num_columns,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // num_columns).to(tl.int64)
    columns = (tl.program_id(0) % num_columns) * BLOCK + tl.arange(0, BLOCK)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    mixed = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(CHOSEN):
        place = tl.load(places_ptr + token * CHOSEN + number).to(tl.int64)
        weight = tl.load(weights_ptr + token * CHOSEN + number)
        mixed += weight * tl.load(rows_ptr + place * size + columns, columns < size, other=0.0).to(tl.float32)
    if PDL == 2:
        gdc_launch_dependents()
    tl.store(out_ptr + token * size + columns, mixed.to(out_ptr.dtype.element_ty), columns < size)


def combine_triton(rows_AE: Tensor, places_A: Tensor, weights_TC: Tensor) -> Tensor:
    """See combine_torch; c by c in float32, rounded once."""
    (num_tokens, num_chosen), size = weights_TC.shape, rows_AE.shape[1]
    assert rows_AE.is_contiguous() and weights_TC.is_contiguous() and weights_TC.dtype == torch.float32
    out = torch.empty((num_tokens, size), dtype=rows_AE.dtype, device=rows_AE.device)
    if num_tokens:
        block = min(next_power_of_2(size), 1024)
        num_columns = triton.cdiv(size, block)
        start(_combine_kernel, (num_tokens * num_columns,),
            rows_AE, places_A, weights_TC, out, size, num_columns, CHOSEN=num_chosen, BLOCK=block,
            **options(rows_AE, "linear", num_warps=4),
        )  # fmt: skip
    return out
