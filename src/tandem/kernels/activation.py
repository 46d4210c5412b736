"""Gated activations over the two halves of one matrix: [gate | up]."""

import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.launch import runs_triton


def silu_mul_torch(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) · up, [T, 2F] → [T, F] (SwiGLU, Shazeer 2020)."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def gelu_tanh_mul_torch(gate_up_T2F: Tensor) -> Tensor:
    """gelu(gate) · up with the tanh approximation, [T, 2F] → [T, F] (GEGLU, Shazeer 2020)."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.gelu(gate_TF, approximate="tanh") * up_TF


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """See silu_mul_torch."""
    if runs_triton(gate_up_T2F):
        from tandem.kernels.activation_triton import gated_triton

        return gated_triton(gate_up_T2F, gelu=False)
    return silu_mul_torch(gate_up_T2F)


def gelu_tanh_mul(gate_up_T2F: Tensor) -> Tensor:
    """See gelu_tanh_mul_torch."""
    if runs_triton(gate_up_T2F):
        from tandem.kernels.activation_triton import gated_triton

        return gated_triton(gate_up_T2F, gelu=True)
    return gelu_tanh_mul_torch(gate_up_T2F)


def gated(gate_up_T2F: Tensor, activation: str) -> Tensor:
    """activation(gate) · up, [T, 2F] → [T, F]; activation "silu" or "gelu" (tanh approximation)."""
    return silu_mul(gate_up_T2F) if activation == "silu" else gelu_tanh_mul(gate_up_T2F)
