"""The attention part of a decoder block. It knows projections, rotary and cache; a backend does the attending."""

import torch
from torch import Tensor, nn

from tandem import kernels
from tandem.attention.contract import AttentionBackend, AttentionShape, Batch, KVCache
from tandem.layers.linear import Linear, LinearScheme
from tandem.layers.norm import norm_weight

__all__ = ["Attention", "AttentionBackend", "AttentionShape", "Batch", "KVCache"]


class Attention(nn.Module):
    """Merged qkv projection, optional norms of queries and keys, rotary, cache write, attention, output projection."""

    def __init__(
        self, hidden_size: int, shape: AttentionShape, cos_sin_LD: Tensor, *, qkv_bias: bool, output_bias: bool,
        qk_norm: bool, eps: float, scheme: LinearScheme, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape = shape
        self.eps = eps
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv: Linear = scheme.create(hidden_size, (queries, keys, keys), qkv_bias, dtype, device)
        self.output: Linear = scheme.create(queries, (hidden_size,), output_bias, dtype, device)
        self.query_norm_D = norm_weight(shape.head_dim, device) if qk_norm else None
        self.key_norm_D = norm_weight(shape.head_dim, device) if qk_norm else None
        self.cos_sin_LD = cos_sin_LD

    def forward(
        self, hidden_TE: Tensor, batch: Batch, keys_NPKD: Tensor, values_NPKD: Tensor, backend: AttentionBackend,
        wanted_R: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, E] → [T, E], or partial sums of it (see Linear.forward_parts); wanted_R: of these tokens only, [R, E].

        Keys and values of all tokens are written in any case.
        """
        queries_THD = kernels.norm_rope_store(
            self.qkv.forward_parts(hidden_TE), batch.positions_T, self.cos_sin_LD, batch.slots_T, keys_NPKD,
            values_NPKD, self.shape.num_heads, self.query_norm_D, self.key_norm_D, self.eps,
        )  # fmt: skip
        if wanted_R is not None and not len(wanted_R):
            return hidden_TE[:0]
        attended_TF = backend.attend(queries_THD, keys_NPKD, values_NPKD, batch, self.shape).flatten(1)
        return self.output.forward_parts(attended_TF if wanted_R is None else attended_TF.index_select(0, wanted_R))
