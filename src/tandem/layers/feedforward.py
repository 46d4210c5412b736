"""Gated feed-forward layers, dense. They know one activation each and nothing of the block around them."""

import torch
from torch import Tensor, nn

from tandem.layers.linear import Linear, LinearScheme

# Name in a config.json → name of the kernel. Gemma's "gelu_pytorch_tanh" is the tanh approximation.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)), gate and up merged."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool, scheme: LinearScheme,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_up: Linear = scheme.create(hidden_size, (intermediate_size, intermediate_size), bias, dtype, device)
        self.down: Linear = scheme.create(intermediate_size, (hidden_size,), bias, dtype, device)
        self.activation = ACTIVATIONS[activation]

    def forward(self, hidden_TE: Tensor) -> Tensor:
        """[T, E] → [T, E], or partial sums of it (see Linear.forward_parts)."""
        return self.down.forward_parts(self.gate_up.forward_gated(hidden_TE, self.activation))
