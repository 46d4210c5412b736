"""Attention over the paged cache, slowly and obviously right: the yardstick of every other backend.

It gathers each span's keys and values and writes the softmax out, in float32. It knows nothing of speed.
"""

import torch
from torch import Tensor

from tandem.attention.contract import AttentionShape, Batch


class ReferenceAttention:
    """One span at a time, one formula: softmax(mask(cap(scale · q·kᵀ))) · v."""

    name = "reference"

    def prepare(self, batch: Batch, block_size: int) -> None:
        """Nothing is shared between layers."""

    def attend(
        self, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, batch: Batch, shape: AttentionShape
    ) -> Tensor:
        """Returns [T, H, D] in the queries' dtype; zeros for padding."""
        output_THD = torch.zeros_like(queries_THD)
        starts, lengths = batch.query_starts_S1.tolist(), batch.lengths_S.tolist()
        for span, length in enumerate(lengths):
            rows = slice(starts[span], starts[span + 1])
            if length == 0 or rows.start == rows.stop:
                continue
            table_B = batch.tables_SB[span].long()
            keys_LKD = keys_NPKD[table_B].flatten(0, 1)[:length]
            values_LKD = values_NPKD[table_B].flatten(0, 1)[:length]
            output_THD[rows] = _span(queries_THD[rows], keys_LKD, values_LKD, shape).to(output_THD.dtype)
        return output_THD


def _span(queries_QHD: Tensor, keys_LKD: Tensor, values_LKD: Tensor, shape: AttentionShape) -> Tensor:
    """The span's queries are its request's last Q positions."""
    group = shape.num_heads // shape.num_kv_heads
    keys_LHD = keys_LKD.float().repeat_interleave(group, dim=1)
    values_LHD = values_LKD.float().repeat_interleave(group, dim=1)
    scores_HQL = torch.einsum("qhd,lhd->hql", queries_QHD.float(), keys_LHD) * shape.scale
    if shape.softcap is not None:
        scores_HQL = torch.tanh(scores_HQL / shape.softcap) * shape.softcap
    length, num_queries = len(keys_LKD), len(queries_QHD)
    query_Q1 = torch.arange(length - num_queries, length, device=keys_LKD.device)[:, None]
    key_1L = torch.arange(length, device=keys_LKD.device)[None]
    seen_QL = key_1L <= query_Q1
    if shape.window is not None:
        seen_QL &= key_1L > query_Q1 - shape.window
    weights_HQL = scores_HQL.masked_fill(~seen_QL, float("-inf")).softmax(dim=-1)
    return torch.einsum("hql,lhd->qhd", weights_HQL, values_LHD)
