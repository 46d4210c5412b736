"""Gated activations in Triton. It knows one matrix [gate | up]."""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.launch import next_power_of_2, options, start


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """silu(gate), or gelu(gate) with the tanh approximation; float32."""
    if GELU:
        # tanh(y) = 1 - 2 / (exp(2y) + 1): exact at both ends, where exp is infinity or 0.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _gated_kernel(x_ptr, out_ptr, x_stride, F, num_columns, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    program = tl.program_id(0)
    row = (program // num_columns).to(tl.int64)
    columns = (program % num_columns) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    gate = tl.load(x_ptr + row * x_stride + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + F + columns, mask, other=0.0).to(tl.float32)
    if PDL == 2:
        gdc_launch_dependents()
    tl.store(out_ptr + row * F + columns, (activate(gate, GELU) * up).to(out_ptr.dtype.element_ty), mask)


def gated_triton(gate_up_T2F: Tensor, gelu: bool) -> Tensor:
    """See silu_mul_torch and gelu_tanh_mul_torch."""
    x = gate_up_T2F.reshape(-1, gate_up_T2F.shape[-1])
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(next_power_of_2(size), 1024 if num_tokens <= 64 else 2048)
        num_columns = triton.cdiv(size, block)
        start(
            _gated_kernel,
            (num_tokens * num_columns,),
            x,
            out,
            x.stride(0),
            size,
            num_columns,
            GELU=gelu,
            BLOCK=block,
            **options(x, "activation", num_warps=4),
        )
    return out.view(*gate_up_T2F.shape[:-1], size)
