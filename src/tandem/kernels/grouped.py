"""Products of rows sorted by group, each group with a matrix of its own, and the weighted sum that undoes the sorting.

It knows which device has them in the vendor's library; it does not know routers or families. ends[X] says where each
group ends; it stays on the device, so that a step can be captured. See grouped_triton.py for the way that is ours.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.activation import gated
from tandem.kernels.launch import runs_triton, target_of

# Rows a group, on average (measured: docs/log.md):
FEW_ROWS = 12  # up to which small tiles of ours are quicker
LIBRARY_ROWS = 96  # from which on torch's kernel is, about: with 128 groups from 64 on, with 8 from 190


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


def takes_library(num_rows: int, rows_AI: Tensor, weight_XOI: Tensor, invariant: bool) -> bool:
    """Whether torch's kernel is taken: where it is quicker, with many rows a group."""
    return not invariant and num_rows >= LIBRARY_ROWS * len(weight_XOI) and library_has(rows_AI, weight_XOI)


def grouped(rows_AI: Tensor, weight_XOI: Tensor, ends_X: Tensor, invariant: bool = False) -> Tensor:
    """See grouped_torch. ends: int32. invariant: a row's result is the same number whatever the other rows."""
    if not runs_triton(rows_AI):
        return grouped_torch(rows_AI, weight_XOI, ends_X)
    if takes_library(len(rows_AI), rows_AI, weight_XOI, invariant):
        if rows_AI.is_meta:  # torch's check there would import a solver
            return rows_AI.new_empty((rows_AI.shape[0], weight_XOI.shape[1]))
        return grouped_torch(rows_AI, weight_XOI, ends_X)
    from tandem.kernels.grouped_triton import grouped_triton

    return grouped_triton(rows_AI, weight_XOI, ends_X, invariant=invariant)


def gated_grouped(
    hidden_TI: Tensor, tokens_A: Tensor, weight_X2FI: Tensor, ends_X: Tensor, activation: str = "silu",
    invariant: bool = False,
) -> Tensor:  # fmt: skip
    """activation(gate) · up of grouped products with [gate | up] of the rows hidden[tokens]; "silu" or "gelu".

    [T, I], [A] × [X, 2F, I] → [A, F]. tokens: int32.
    """
    if not runs_triton(hidden_TI) or takes_library(len(tokens_A), hidden_TI, weight_X2FI, invariant):
        return gated(grouped(hidden_TI[tokens_A], weight_X2FI, ends_X, invariant), activation)
    from tandem.kernels.grouped_triton import grouped_triton

    return grouped_triton(hidden_TI, weight_X2FI, ends_X, activation, tokens_A, invariant)


def combine_torch(rows_AE: Tensor, places_A: Tensor, weights_TC: Tensor) -> Tensor:
    """Σ over c of weights[t, c] · rows[places[t·C + c]], [T·C, E] → [T, E]."""
    parts_TCE = rows_AE[places_A].view(*weights_TC.shape, rows_AE.shape[-1])
    return (parts_TCE * weights_TC[..., None].to(rows_AE.dtype)).sum(dim=1)


def combine(rows_AE: Tensor, places_A: Tensor, weights_TC: Tensor) -> Tensor:
    """See combine_torch. places: int32; weights: float32. On a GPU in float32, c by c, rounded once."""
    if not runs_triton(rows_AE):
        return combine_torch(rows_AE, places_A, weights_TC)
    from tandem.kernels.grouped_triton import combine_triton

    return combine_triton(rows_AE, places_A, weights_TC)
