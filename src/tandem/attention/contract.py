"""What a layer asks of attention over a paged KV cache. It knows shapes; it does not know how any backend computes.

Shape legend (used in every room that holds tensors)
    T tokens in the step      S spans in the step       R rows that are sampled
    H query heads             K key/value heads         D head dimension      E hidden size      F intermediate size
    N blocks in the pool      P positions in a block    B blocks in a table   V rows of the output matrix

A cache of one layer, and where token t of a request lies:

    keys_NPKD, values_NPKD       block table of the request: [ 7, 2, 9 ]
    position 37, P = 16      →   block table[37 // 16] = 9, offset 37 % 16 = 5, slot 9·16 + 5 = 149
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """The tensors of one step, all on the device, spans of one token first.

    ids_T           token ids, int64 or int32.
    positions_T     position of each token in its request, int64.
    slots_T         cache slot of each token (block·P + offset), int64; -1: padding, written nowhere.
    query_starts_S1 first token of each span and T at the end, int32.
    lengths_S       tokens of the request in the cache once this step has written its own, int32; 0: padding.
    tables_SB       block tables, int32; entries behind the last block are arbitrary but valid ids.
    sampled_R       indices into T of the tokens whose logits are wanted, int64; None: every token.
    num_decodes     spans at the front that have one token.
    max_query, max_length   upper bounds of span length and lengths_S, known on the host.
    host_spans      (start position, length) of each span for backends that loop on the host; empty under a graph.
    order_S         the spans of one token, longest first, for backends that start in order; int64; None: unknown.
    embedded_TE     the tokens' rows of the embedding, if whoever made the batch has looked them up; else None.
    is_uneven       the longest of the spans of one token is much longer than their mean, as far as the host knows.
    scratch         what a backend prepared for this step.
    """

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_starts_S1: Tensor
    lengths_S: Tensor
    tables_SB: Tensor
    sampled_R: Tensor | None
    num_decodes: int
    max_query: int
    max_length: int
    host_spans: list[tuple[int, int]] = field(default_factory=list)
    order_S: Tensor | None = None
    is_uneven: bool = False
    embedded_TE: Tensor | None = None
    scratch: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class KVCache:
    """Keys and values of every layer: lists of [N, P, K, D]."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    @classmethod
    def allocate(
        cls, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> "KVCache":  # fmt: skip
        """Fresh zeroed caches. Bytes: 2 · layers · blocks · block_size · kv_heads · head_dim · bytes of dtype."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        return cls(keys, values)

    def copy_blocks(self, sources_C: Tensor, targets_C: Tensor) -> None:
        """Copy whole blocks (int64 ids) in every layer: copy-on-write for sequences that share a prefix.

        No block may be source and target. Without memory for all of a layer's at once they are copied one by one.
        """
        for cache in (*self.keys, *self.values):
            try:
                cache[targets_C] = cache[sources_C]
            except torch.OutOfMemoryError:
                for source, target in zip(sources_C.tolist(), targets_C.tolist(), strict=True):
                    cache[target].copy_(cache[source])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one layer's attention looks like. window: how many latest positions are seen, itself included; None: all.

    softcap: s·tanh(x/s) on the scores before the softmax (Gemma 2); None: off.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Causal attention of each span over its own request's cached positions. The step's K and V are already written."""

    name: str

    def prepare(self, batch: Batch, block_size: int) -> None:
        """Called once a step, before the layers: what all layers share may be put into batch.scratch."""

    def attend(
        self, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, batch: Batch, shape: AttentionShape
    ) -> Tensor:
        """Returns [T, H, D] in the dtype of the queries."""
