"""A mixture of experts behind a softmax router. It knows the order of its parts; it does not know any family.

scores of tokens → copies sorted by expert → one product a group → back in the order of tokens, weighted, summed
"""

import torch
from torch import Tensor, nn

from tandem import kernels
from tandem.kernels.linear import linear
from tandem.layers.feedforward import ACTIVATIONS
from tandem.layers.target import Target, whole


class Mixture(nn.Module):
    """Router → the best experts a token → their gated feed-forwards, weighted and summed.

    normalise: the chosen experts' probabilities are divided by their sum (Mixtral; Qwen3-MoE by its norm_topk_prob).
    invariant: on a GPU a token's result is the same number whatever the other tokens in the step. Choices and sums go
    by rows, places are whole numbers.
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


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
