"""Gated feed-forward layers, dense. They know one activation each and nothing of the block around them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tandem import kernels
from tandem.layers.linear import Linear, LinearScheme

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": kernels.silu_mul,
    "gelu_pytorch_tanh": kernels.gelu_tanh_mul,
}


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)), gate and up merged."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool, scheme: LinearScheme,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_up: Linear = scheme.create(hidden_size, (intermediate_size, intermediate_size), bias, dtype, device)
        self.down: Linear = scheme.create(intermediate_size, (hidden_size,), bias, dtype, device)
        self.activate = ACTIVATIONS[activation]

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(hidden_TE)))
