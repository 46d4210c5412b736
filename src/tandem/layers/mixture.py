"""A mixture of experts behind a softmax router. It knows the order of its parts; it does not know any family.

scores of tokens → copies sorted by expert → one product a group → back in the order of tokens, weighted, summed
"""

from typing import Any

import torch
from torch import Tensor, nn

from tandem import kernels
from tandem.kernels.linear import linear
from tandem.layers.feedforward import ACTIVATIONS
from tandem.layers.linear import Linear, host_layer
from tandem.layers.target import Target, whole


class Mixture(nn.Module):
    """Router → the best experts a token → their gated feed-forwards, weighted and summed.

    normalise: the chosen experts' probabilities are divided by their sum (Mixtral; Qwen3-MoE by its norm_topk_prob).
    invariant: on a GPU a token's result is the same number whatever the other tokens in the step. Choices and sums go
    by rows, places are whole numbers. On a CPU see HostMixture.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, num_chosen: int, normalise: bool,
        activation: str, *, invariant: bool = False, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.invariant = invariant
        self.num_experts, self.num_chosen, self.normalise = num_experts, num_chosen, normalise
        self.intermediate_size = intermediate_size
        self.activation = ACTIVATIONS[activation]
        self._hold(hidden_size, dtype, device)

    def _hold(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the weights."""
        num_experts, intermediate_size = self.num_experts, self.intermediate_size
        self.router_XE = _parameter(num_experts, hidden_size, dtype=dtype, device=device)
        self.gate_up_X2FE = _parameter(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype, device=device)
        self.down_XEF = _parameter(num_experts, hidden_size, intermediate_size, dtype=dtype, device=device)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        scores_TX = linear(hidden_TE, self.router_XE, invariant=self.invariant)
        weights_TC, tokens_A, places_A, ends_X = kernels.route(scores_TX, self.num_chosen, self.normalise)
        inner_AF = kernels.gated_grouped(
            hidden_TE, tokens_A, self.gate_up_X2FE, ends_X, self.activation, self.invariant
        )  # fmt: skip
        outer_AE = kernels.grouped(inner_AF, self.down_XEF, ends_X, self.invariant)
        return kernels.combine(outer_AE, places_A, weights_TC)

    def router_target(self) -> Target:
        return whole(self.router_XE.data)

    def targets(self, expert: int) -> dict[str, Target]:
        """gate, up and down of one expert, each as the checkpoint has it."""
        gate_up_2FE = self.gate_up_X2FE.data[expert]
        return {
            "gate": whole(gate_up_2FE[: self.intermediate_size]),
            "up": whole(gate_up_2FE[self.intermediate_size :]),
            "down": whole(self.down_XEF.data[expert]),
        }


class HostMixture(Mixture):
    """On a CPU: expert by expert over its rows, in layers that are invariant there as torch's grouped product is not.

    A call a visited expert and matrix: slower for small experts (3 times for 256 × 128), quicker for larger ones.
    """

    def _hold(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        def layer(in_size: int, *parts: int) -> Linear:
            return host_layer(in_size, parts, False, dtype, device)

        inner = self.intermediate_size
        self.router = layer(hidden_size, self.num_experts)
        self.gate_up = nn.ModuleList([layer(hidden_size, inner, inner) for _ in range(self.num_experts)])
        self.down = nn.ModuleList([layer(inner, hidden_size) for _ in range(self.num_experts)])

    def forward(self, hidden_TE: Tensor) -> Tensor:
        weights_TC, tokens_A, places_A, ends_X = kernels.route(self.router(hidden_TE), self.num_chosen, self.normalise)
        rows_AE, start = hidden_TE[tokens_A], 0
        for expert, end in enumerate(ends_X.tolist()):
            if end > start:
                inner_AF = kernels.gated(self.gate_up[expert](rows_AE[start:end]), self.activation)
                rows_AE[start:end] = self.down[expert](inner_AF)
            start = end
        return kernels.combine(rows_AE, places_A, weights_TC)

    def router_target(self) -> Target:
        return self.router.target()

    def targets(self, expert: int) -> dict[str, Target]:
        gate_up, down = self.gate_up[expert], self.down[expert]
        assert isinstance(gate_up, Linear) and isinstance(down, Linear)
        return {"gate": gate_up.target(0), "up": gate_up.target(1), "down": down.target()}


def mixture(
    hidden_size: int, intermediate_size: int, *how: Any, invariant: bool, dtype: torch.dtype, device: torch.device
) -> Mixture:  # fmt: skip
    """See Mixture. On a CPU torch's grouped product takes only rows of whole 16 bytes."""
    is_odd = any(size * dtype.itemsize % 16 for size in (hidden_size, intermediate_size))
    kind = HostMixture if device.type == "cpu" and (invariant or is_odd) else Mixture
    return kind(hidden_size, intermediate_size, *how, invariant=invariant, dtype=dtype, device=device)


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
