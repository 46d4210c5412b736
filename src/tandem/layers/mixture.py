"""A mixture of experts behind a softmax router. It knows grouped matrix products; it does not know any family.

Every shape is fixed by the number of tokens, and nothing is read back to the host, so that a step can be captured:

    tokens t0 t1 t2, two experts each    sorted by expert          one product a group       back in order, summed
    (e2 e0) (e0 e1) (e2 e1)          →   t0 t1 │ t1 t2 │ t0 t2  →   e0     │ e1    │ e2   →   t0 t1 t2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem import kernels
from tandem.layers.feedforward import ACTIVATIONS
from tandem.layers.target import Target, whole


class Mixture(nn.Module):
    """Router → the best experts a token → their gated feed-forwards, weighted and summed.

    normalise: the chosen experts' probabilities are divided by their sum (Mixtral; Qwen3-MoE by its norm_topk_prob).
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, num_chosen: int, normalise: bool,
        activation: str, *, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_experts, self.num_chosen, self.normalise = num_experts, num_chosen, normalise
        self.intermediate_size = intermediate_size
        self.activation = ACTIVATIONS[activation]
        self.router_XE = _parameter(num_experts, hidden_size, dtype=dtype, device=device)
        self.gate_up_X2FE = _parameter(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype, device=device)
        self.down_XEF = _parameter(num_experts, hidden_size, intermediate_size, dtype=dtype, device=device)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        probabilities_TX = torch.softmax(F.linear(hidden_TE, self.router_XE).float(), dim=-1)
        weights_TC, experts_TC = torch.topk(probabilities_TX, self.num_chosen, dim=-1)
        if self.normalise:
            weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
        order_A = experts_TC.flatten().argsort(stable=True)
        counts_X = torch.zeros(self.num_experts, dtype=torch.int32, device=hidden_TE.device)
        counts_X.scatter_add_(0, experts_TC.flatten(), torch.ones_like(order_A, dtype=torch.int32))
        ends_X = counts_X.cumsum(0, dtype=torch.int32)
        sorted_AE = hidden_TE[order_A // self.num_chosen]
        inner_AF = kernels.gated(_grouped(sorted_AE, self.gate_up_X2FE, ends_X), self.activation)
        outer_AE = _grouped(inner_AF, self.down_XEF, ends_X)
        in_order_AE = torch.empty_like(outer_AE).index_copy_(0, order_A, outer_AE)
        parts_TCE = in_order_AE.view(-1, self.num_chosen, outer_AE.shape[-1]) * weights_TC[..., None].to(outer_AE.dtype)
        mixed_TE: Tensor = parts_TCE.sum(dim=1)
        return mixed_TE

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


def _grouped(rows_AI: Tensor, weight_XOI: Tensor, ends_X: Tensor) -> Tensor:
    """Each group of rows times its own matrix: rows ends[x-1]..ends[x] with weight x."""
    return F.grouped_mm(rows_AI, weight_XOI.transpose(1, 2), offs=ends_X)


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
