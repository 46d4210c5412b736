"""Attention by tandem's own Triton kernels. It knows the contract and which kernel takes which spans."""

from typing import Any

import torch
from torch import Tensor

from tandem.attention.contract import AttentionShape, Batch
from tandem.kernels.attention_form import decode_form, graph_bound
from tandem.kernels.launch import target_or_h200


class TritonAttention:
    """Spans of one token go to split decode, longer ones to paged prefill, both in place on the paged cache.

    Whole long prompts go to the vendor's fused attention, which is faster there.

    Nothing here reads the device, so a pure decode step can be captured as a CUDA graph; what a graph bakes in is the
    number of spans, the form of the launches (decode_form) and the scratch memory.

    deterministic: fixed chunks merged in order, so that a token's result depends on its own request alone.
    """

    name = "triton"

    def __init__(self, device: torch.device, deterministic: bool = False) -> None:
        from tandem.kernels.attention_decode import Scratch

        self.device = device
        self.deterministic = deterministic
        self.scratch = Scratch(device)

    def prepare(self, batch: Batch, block_size: int) -> None:
        """Nothing is shared between layers but scratch memory, which attend takes as it needs."""

    def reserve(self, num_spans: int, max_length: int, shape: AttentionShape, item_bytes: int) -> int:
        """Take scratch memory for any decode of so many spans, before the cache is sized. Returns the bytes held.

        max_length: of a request, in tokens; graphs are captured for no less than SHORTEST_BOUND. item_bytes: of the
        cache's dtype. No later step takes more, and none of it is given back.
        """
        from tandem.kernels.attention_invariant import most_chunks, spans_at_once

        num_kv_heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        bound = graph_bound(max_length)
        if self.deterministic:
            largest = max(
                min(spans_at_once(num_chunks, shape.num_heads, shape.head_dim), num_spans) * num_chunks
                for num_chunks in range(1, most_chunks(bound) + 1)
            )
        else:
            cache = num_kv_heads, group, shape.head_dim, item_bytes, target_or_h200(self.device)
            largest = max(
                count * decode_form(count, bound, *cache, is_uneven).num_splits
                for count in range(1, num_spans + 1)
                for is_uneven in (False, True)
            )
        self.scratch.reserve(largest * num_kv_heads, 1, group, shape.head_dim)
        return self.scratch.num_bytes

    def attend(
        self, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, batch: Batch, shape: AttentionShape
    ) -> Tensor:
        if batch.num_decodes == 0 and self._all_whole_prompts(batch, keys_NPKD, shape):
            found = self._whole_prompts(queries_THD, keys_NPKD, values_NPKD, batch, shape)
            return found[0].contiguous() if len(found) == 1 else torch.cat(found)
        out_THD = torch.empty(queries_THD.shape, dtype=queries_THD.dtype, device=queries_THD.device)
        if batch.num_decodes:
            self._decode(queries_THD, keys_NPKD, values_NPKD, batch, shape, out_THD)
        if batch.lengths_S.shape[0] > batch.num_decodes:
            self._prefill(queries_THD, keys_NPKD, values_NPKD, batch, shape, out_THD)
        return out_THD

    def decode_form(
        self, num_decodes: int, max_length: int, keys_NPKD: Tensor, shape: AttentionShape, is_uneven: bool = False
    ) -> Any:
        """How a decode step is launched for layers of this shape; part of the key of a captured graph."""
        group = shape.num_heads // shape.num_kv_heads
        if self.deterministic:
            from tandem.kernels.attention_invariant import invariant_form

            return invariant_form(num_decodes, max_length, keys_NPKD, group, shape.window)
        longest, item_bytes = min(max_length, shape.window or max_length), keys_NPKD.element_size()
        return decode_form(
            num_decodes, longest, shape.num_kv_heads, group, shape.head_dim, item_bytes, target_or_h200(self.device),
            is_uneven,
        )  # fmt: skip

    def _decode(
        self, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, batch: Batch, shape: AttentionShape,
        out_THD: Tensor,
    ) -> None:  # fmt: skip
        from tandem.kernels.attention_decode import decode_attention
        from tandem.kernels.attention_invariant import invariant_decode_attention

        num = batch.num_decodes
        tables_SB, lengths_S = batch.tables_SB[:num], batch.lengths_S[:num]
        if self.deterministic:
            invariant_decode_attention(
                queries_THD, keys_NPKD, values_NPKD, tables_SB, lengths_S, batch.max_length, out_THD, self.scratch,
                shape.scale, shape.window, shape.softcap,
            )  # fmt: skip
            return
        form = self.decode_form(num, batch.max_length, keys_NPKD, shape, batch.is_uneven)
        decode_attention(
            queries_THD, keys_NPKD, values_NPKD, tables_SB, lengths_S, out_THD, self.scratch, shape.scale,
            form.num_splits, shape.window, shape.softcap, form.num_warps, form.num_stages, form.tile,
            order_S=batch.order_S if form.by_length else None, ahead=form.ahead,
        )  # fmt: skip

    def _prefill(
        self, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, batch: Batch, shape: AttentionShape,
        out_THD: Tensor,
    ) -> None:  # fmt: skip
        from tandem.kernels.attention_prefill import prefill_attention

        num = batch.num_decodes
        if self._all_whole_prompts(batch, keys_NPKD, shape):
            torch.cat(self._whole_prompts(queries_THD, keys_NPKD, values_NPKD, batch, shape), out=out_THD[num:])
            return
        prefill_attention(
            queries_THD, keys_NPKD, values_NPKD, batch.tables_SB[num:], batch.lengths_S[num:],
            batch.query_starts_S1[num:], batch.max_query, out_THD, shape.scale, shape.window, shape.softcap,
            self.deterministic,
        )  # fmt: skip

    def _whole_prompts(
        self, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, batch: Batch, shape: AttentionShape
    ) -> list[Tensor]:
        """Attention of each span of several tokens, all of them whole prompts."""
        from tandem.kernels.attention_library import whole_prompt_attention

        first, found = batch.num_decodes, []
        for table_B, (_, length) in zip(batch.tables_SB[first:], batch.host_spans[batch.num_decodes :], strict=True):
            found.append(
                whole_prompt_attention(queries_THD, keys_NPKD, values_NPKD, table_B, first, length, shape.scale)
            )
            first += length
        return found

    def _all_whole_prompts(self, batch: Batch, keys_NPKD: Tensor, shape: AttentionShape) -> bool:
        from tandem.kernels.attention_library import is_worth_it

        spans = batch.host_spans[batch.num_decodes :]
        if self.deterministic or shape.softcap or len(spans) != batch.lengths_S.shape[0] - batch.num_decodes:
            return False
        longest = batch.max_length if shape.window is None else shape.window
        return all(
            length <= longest and is_worth_it(start, length, keys_NPKD.dtype, keys_NPKD.shape[3])
            for start, length in spans
        )
