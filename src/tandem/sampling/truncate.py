"""Top-k, top-p and min-p as one threshold on the probabilities of a row. It knows no seeds and draws nothing.

    top-k   the k best (Fan et al. 2018)
    top-p   the fewest best whose mass reaches p of what top-k left (nucleus, Holtzman et al. 2020)
    min-p   at least min_p times the best one's probability (Nguyen et al. 2024)

Legend: R rows, V rows of the output matrix, K best entries that are looked at.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.sampling.rows import Numbers, RowFacts

_SLICES = (256, 4096)
"""Entries looked at first for a top-p row; most nuclei are smaller, and a slice costs far less than a sort."""


def threshold(probabilities_RV: Tensor, numbers: Numbers, facts: Sequence[RowFacts]) -> Tensor:
    """The least probability that stays, [R]: all below it go, ties at it stay. numbers and facts are of these rows."""
    best_R = probabilities_RV.amax(dim=-1)
    floor_R = (numbers.min_p_R * best_R).float()
    if not any(fact.sorts for fact in facts):
        return floor_R
    num_ids = probabilities_RV.shape[1]
    # Rows with a top-k need that many entries and no more; rows without one may need them all.
    widest = max((fact.top_k for fact in facts if fact.sorts and fact.top_k < num_ids), default=1)
    if all(fact.top_k < num_ids for fact in facts if fact.sorts):
        widths = [widest]
    elif probabilities_RV.device.type == "cuda":
        widths = [num_ids]  # whether a slice was enough could only be known by reading back
    else:
        widths = [max(widest, width) for width in _SLICES if max(widest, width) < num_ids] + [num_ids]
    edge_R, complete_R = _edge(probabilities_RV, numbers, widths[0])
    for width in widths[1:]:
        short = (~complete_R).nonzero()[:, 0]
        if not len(short):
            break
        part = type(numbers)(*(column_R[short] for column_R in numbers))
        edge_R[short], complete_R[short] = _edge(probabilities_RV[short], part, width)
    return torch.maximum(floor_R, edge_R)


def _edge(probabilities_RV: Tensor, numbers: Numbers, num_best: int) -> tuple[Tensor, Tensor]:
    """Probability of the last entry that top-k and top-p keep, and whether num_best entries were enough to find it."""
    num_ids = probabilities_RV.shape[1]
    if num_best < num_ids:
        best_RK = probabilities_RV.topk(num_best, dim=-1, sorted=True).values
    else:
        best_RK = probabilities_RV.sort(dim=-1, descending=True).values
    cumulative_RK = best_RK.cumsum(dim=-1, dtype=torch.float64)
    limit_R = numbers.top_k_R.clamp(max=num_best)
    has_top_k_R = numbers.top_k_R < num_ids
    at_limit_R = cumulative_RK.gather(1, limit_R[:, None] - 1)[:, 0]
    # Without top-k the mass is the whole row's, one by construction, so a slice and a sort agree to the last bit.
    wanted_R = numbers.top_p_R * torch.where(has_top_k_R, at_limit_R, torch.ones_like(at_limit_R))
    wanted_R = torch.where(numbers.top_p_R < 1.0, wanted_R, torch.inf)
    kept_R = 1 + (cumulative_RK < wanted_R[:, None]).sum(dim=-1)
    last_R = torch.minimum(kept_R, limit_R) - 1
    edge_R = best_RK.gather(1, last_R[:, None])[:, 0]
    everything_R = (numbers.top_p_R >= 1.0) & ~has_top_k_R
    complete_R = has_top_k_R | everything_R | (cumulative_RK[:, -1] >= wanted_R)
    return torch.where(everything_R, 0.0, edge_R), complete_R
