"""Root-mean-square normalisation (Zhang & Sennrich 2019), plain and behind a residual add."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm_torch(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32, returned in x's dtype."""
    return F.rms_norm(x_TE.float(), (x_TE.shape[-1],), weight_E.float(), eps).to(x_TE.dtype)


def add_rms_norm_torch(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total_TE = x_TE + residual_TE
    return rms_norm_torch(total_TE, weight_E, eps), total_TE


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See rms_norm_torch."""
    return rms_norm_torch(x_TE, weight_E, eps)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See add_rms_norm_torch."""
    return add_rms_norm_torch(x_TE, residual_TE, weight_E, eps)
