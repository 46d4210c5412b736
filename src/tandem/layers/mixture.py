"""A mixture of experts behind a softmax router. It knows grouped matrix products; it does not know any family.

Every shape is fixed by the number of tokens, and nothing is read back to the host, so that a step can be captured:

    tokens t0 t1 t2, two experts each    sorted by expert          one product a group       back in order, summed
    (e2 e0) (e0 e1) (e2 e1)          →   t0 t1 │ t1 t2 │ t0 t2  →   e0     │ e1    │ e2   →   t0 t1 t2
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
    invariant: on a GPU a token's result is the same number whatever the other tokens in the step. Softmax and topk go
    by rows, sorting and places are whole numbers, each place written once.
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
        weights_TC, experts_TC = torch.topk(torch.softmax(scores_TX.float(), dim=-1), self.num_chosen, dim=-1)
        sorted_A, order_A = torch.sort(experts_TC.flatten(), stable=True)
        ends_X = torch.searchsorted(
            sorted_A, torch.arange(self.num_experts, device=sorted_A.device), right=True, out_int32=True
        )
        places_A = torch.empty_like(order_A)
        places_A[order_A] = torch.arange(len(order_A), device=order_A.device)
        sorted_AE = hidden_TE[order_A // self.num_chosen]
        inner_AF = kernels.gated_grouped(sorted_AE, self.gate_up_X2FE, ends_X, self.activation, self.invariant)
        outer_AE = kernels.grouped(inner_AF, self.down_XEF, ends_X, self.invariant)
        return kernels.combine(outer_AE, places_A, weights_TC, self.normalise)

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
