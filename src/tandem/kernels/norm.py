"""Root-mean-square normalisation (Zhang & Sennrich 2019), plain and behind a residual add."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.launch import runs_triton


def rms_norm_torch(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32, returned in x's dtype."""
    return F.rms_norm(x_TE.float(), (x_TE.shape[-1],), weight_E.float(), eps).to(x_TE.dtype)


def add_rms_norm_torch(x: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual).

    x is [T, E], or float32 partial sums [parts, T, E] as linear_parts returns them, added in order.
    """
    if x.dim() == 3:
        total_TE = (sum_parts(x) + residual_TE.float()).to(residual_TE.dtype)
    else:
        total_TE = x + residual_TE
    return rms_norm_torch(total_TE, weight_E, eps), total_TE


def sum_parts(x: Tensor) -> Tensor:
    """Add float32 partial sums [parts, T, N] in order; [T, N] is returned as it is."""
    if x.dim() == 2:
        return x
    total: Tensor = x[0]
    for part in x[1:]:
        total = total + part
    return total.to(torch.float32)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See rms_norm_torch."""
    if runs_triton(x_TE):
        from tandem.kernels.norm_triton import rms_norm_triton

        return rms_norm_triton(x_TE, weight_E, eps)
    return rms_norm_torch(x_TE, weight_E, eps)


def add_rms_norm(x: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See add_rms_norm_torch."""
    if runs_triton(x):
        from tandem.kernels.norm_triton import add_rms_norm_triton

        return add_rms_norm_triton(x, residual_TE, weight_E, eps)
    return add_rms_norm_torch(x, residual_TE, weight_E, eps)
