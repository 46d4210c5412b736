"""Products of rows sorted by group, each group with a matrix of its own, and the weighted sum that undoes the sorting.

It knows which device has them in the vendor's library; it does not know routers or families. ends[X] says where each
group ends; it stays on the device, so that a step can be captured. See grouped_triton.py for the way that is ours.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.activation import gated
from tandem.kernels.launch import runs_triton, target_of


def grouped_torch(rows_AI: Tensor, weight_XOI: Tensor, ends_X: Tensor) -> Tensor:
    """Each group of rows times its own matrix: rows ends[x-1]..ends[x] with weight x, [A, I] × [X, O, I] → [A, O].

    On a GPU this is captured in graphs only where library_has says so; elsewhere torch reads ends back.
    """
    return F.grouped_mm(rows_AI, weight_XOI.transpose(1, 2), offs=ends_X)


def library_has(rows_AI: Tensor, weight_XOI: Tensor) -> bool:
    """Whether torch has one kernel for it: bfloat16 on capability 9.x and 10.x, every row on 16 bytes."""
    target = target_of(rows_AI.device)
    return (
        target is not None and target.capability[0] in (9, 10) and rows_AI.dtype == torch.bfloat16
        and not any(size % 8 for size in weight_XOI.shape[1:])
    )  # fmt: skip


def grouped(rows_AI: Tensor, weight_XOI: Tensor, ends_X: Tensor, invariant: bool = False) -> Tensor:
    """See grouped_torch. ends: int32. invariant: a row's result is the same number whatever the other rows."""
    if not runs_triton(rows_AI):
        return grouped_torch(rows_AI, weight_XOI, ends_X)
    if not invariant and library_has(rows_AI, weight_XOI):
        if rows_AI.is_meta:  # torch's check there would import a solver
            return rows_AI.new_empty((rows_AI.shape[0], weight_XOI.shape[1]))
        return grouped_torch(rows_AI, weight_XOI, ends_X)
    from tandem.kernels.grouped_triton import grouped_triton

    return grouped_triton(rows_AI, weight_XOI, ends_X)


def gated_grouped(
    rows_AI: Tensor, weight_X2FI: Tensor, ends_X: Tensor, activation: str = "silu", invariant: bool = False
) -> Tensor:
    """activation(gate) · up of grouped products with [gate | up], [A, I] × [X, 2F, I] → [A, F]; "silu" or "gelu"."""
    if not runs_triton(rows_AI) or (not invariant and library_has(rows_AI, weight_X2FI)):
        return gated(grouped(rows_AI, weight_X2FI, ends_X, invariant), activation)
    from tandem.kernels.grouped_triton import grouped_triton

    return grouped_triton(rows_AI, weight_X2FI, ends_X, activation)


def combine_torch(rows_AE: Tensor, places_A: Tensor, weights_TC: Tensor, normalise: bool) -> Tensor:
    """Σ over c of weights[t, c] · rows[places[t·C + c]], [T·C, E] → [T, E].

    normalise: the weights of a token are divided by their sum.
    """
    if normalise:
        weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
    parts_TCE = rows_AE[places_A].view(*weights_TC.shape, rows_AE.shape[-1])
    return (parts_TCE * weights_TC[..., None].to(rows_AE.dtype)).sum(dim=1)


def combine(rows_AE: Tensor, places_A: Tensor, weights_TC: Tensor, normalise: bool) -> Tensor:
    """See combine_torch. weights: float32. On a GPU in float32, c by c, rounded once."""
    if not runs_triton(rows_AE):
        return combine_torch(rows_AE, places_A, weights_TC, normalise)
    from tandem.kernels.grouped_triton import combine_triton

    return combine_triton(rows_AE, places_A, weights_TC, normalise)
