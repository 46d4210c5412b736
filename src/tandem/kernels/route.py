"""Which experts a token visits, and where its copies stand once all are sorted by expert.

It knows scores; it does not know experts' products (grouped.py). Every shape is fixed by the number of tokens, and
nothing is read back to the host, so that a step can be captured:

    tokens t0 t1 t2, two experts each    sorted by expert           tokens    places            ends
    (e2 e0) (e0 e1) (e2 e1)          →   e0 e0 │ e1 e1 │ e2 e2      0 1 1 2 0 2    4 0 1 2 5 3    2 4 6
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.launch import runs_triton


class Routing(NamedTuple):
    """T tokens, C experts each, X experts in all; A = T·C copies of tokens, sorted by expert, then by token.

    weights_TC  float32, what each chosen expert's result counts.
    tokens_A    int32, the token that stands at each place.
    places_A    int32, the place of each token's copies, in the order of weights_TC.
    ends_X      int32, where each expert's copies end.
    """

    weights_TC: Tensor
    tokens_A: Tensor
    places_A: Tensor
    ends_X: Tensor


def route_torch(scores_TX: Tensor, num_chosen: int, normalise: bool) -> Routing:
    """The num_chosen best of each row by softmax over all; normalise: their weights are divided by their sum."""
    weights_TC, experts_TC = torch.topk(torch.softmax(scores_TX.float(), dim=-1), num_chosen, dim=-1)
    if normalise:
        weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
    sorted_A, order_A = torch.sort(experts_TC.flatten(), stable=True)
    ends_X = torch.searchsorted(
        sorted_A, torch.arange(scores_TX.shape[1], device=sorted_A.device), right=True, out_int32=True
    )
    places_A = torch.empty_like(order_A, dtype=torch.int32)
    places_A[order_A] = torch.arange(len(order_A), device=order_A.device, dtype=torch.int32)
    return Routing(weights_TC, (order_A // num_chosen).int(), places_A, ends_X)


def route(scores_TX: Tensor, num_chosen: int, normalise: bool) -> Routing:
    """See route_torch. On a GPU the lower expert wins among equals.

    A score that is NaN or +infinite makes that token's weights NaN, as in torch; its experts are some that there are.
    """
    if not runs_triton(scores_TX):
        return route_torch(scores_TX, num_chosen, normalise)
    from tandem.kernels.route_triton import route_triton

    return route_triton(scores_TX, num_chosen, normalise)
