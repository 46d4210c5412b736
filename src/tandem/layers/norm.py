"""Root-mean-square norms as layers. They know their weight; the arithmetic is in kernels/norm.py."""

import torch
from torch import Tensor, nn

from tandem import kernels


def norm_weight(size: int, device: torch.device) -> nn.Parameter:
    """A norm's weight, float32 whatever the model's dtype: Gemma's 1 + weight does not survive bfloat16."""
    return nn.Parameter(torch.empty(size, dtype=torch.float32, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """The norm of a hidden state, alone or behind the addition to the residual stream."""

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight_E = norm_weight(size, device)
        self.eps = eps

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return kernels.rms_norm(hidden_TE, self.weight_E, self.eps)

    def add(self, hidden_TE: Tensor, residual_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum); a stream that has no residual yet is its own sum."""
        if residual_TE is None:
            return kernels.rms_norm(hidden_TE, self.weight_E, self.eps), hidden_TE
        return kernels.add_rms_norm(hidden_TE, residual_TE, self.weight_E, self.eps)
