"""Root-mean-square normalisation in Triton, one program a row. It knows rows; what they mean it does not."""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.launch import next_power_of_2, options, start


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, x_stride, residual_stride, part_stride, E,
    HAS_RESIDUAL: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < E
    weight = tl.load(weight_ptr + columns, mask, other=0.0).to(tl.float32)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + columns, mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        x += tl.load(x_ptr + part * part_stride + row * x_stride + columns, mask, other=0.0)
    if PDL == 2:
        gdc_launch_dependents()
    if HAS_RESIDUAL:
        total = (x + residual).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * E + columns, total, mask)
        x = total.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / E + eps)
    tl.store(out_ptr + row * E + columns, (x * weight).to(out_ptr.dtype.element_ty), mask)


def _launch(
    x: Tensor, residual_TE: Tensor | None, weight_E: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    num_tokens, size = x.shape[-2:]
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty((num_tokens, size), dtype=dtype, device=x.device)
    total = torch.empty((num_tokens, size), dtype=dtype, device=x.device) if residual_TE is not None else out
    if residual_TE is not None and residual_TE.stride(-1) != 1:
        residual_TE = residual_TE.contiguous()
    if num_tokens:
        block = next_power_of_2(size)
        start(_norm_kernel, (num_tokens,),
            x, x if residual_TE is None else residual_TE, weight_E, out, total, eps, x.stride(-2),
            0 if residual_TE is None else residual_TE.stride(0), x.stride(0) if x.dim() == 3 else 0,
            size, HAS_RESIDUAL=residual_TE is not None, NUM_PARTS=x.shape[0] if x.dim() == 3 else 1, BLOCK=block,
            **options(x, "first norm" if residual_TE is None else "norm", num_warps=min(max(block // 512, 1), 16)),
        )  # fmt: skip
    return out, total


def rms_norm_triton(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See rms_norm_torch."""
    flat = x_TE.reshape(-1, x_TE.shape[-1])
    return _launch(flat, None, weight_E, eps, x_TE.dtype)[0].view(x_TE.shape)


def add_rms_norm_triton(x: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See add_rms_norm_torch."""
    return _launch(x, residual_TE, weight_E, eps, residual_TE.dtype)
