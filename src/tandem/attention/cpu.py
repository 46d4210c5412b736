"""Attention over the paged cache on a CPU. It knows how to batch decodes and when SDPA applies; it starts no threads.

Decodes are gathered to dense keys and values, several requests at once, and attended in one call; the heads that
share a KV head stand as the query rows of that head, so nothing is repeated. Requests of very different lengths go in
groups, so that a long one does not pad the short ones. Longer spans are attended one by one.

What lies behind a request's end in its last block, or in the blocks that pad its table, is whatever was there before,
NaN too, which a mask on the scores would not keep out (0 · NaN is NaN). So the gathered copies hold none of it: padding
is taken from the request's own first block, and what is left is zeroed.

While a group is small, batched products beat SDPA, which is slow for few query rows: their keys are gathered head by
head, as [S·K, L, D]. Such short copies lose to whole blocks once the keys leave the processor's cache.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.attention.contract import AttentionShape, Batch

PADDING_LIMIT = 2.0
PRODUCTS_LIMIT_BYTES = 8 << 20


@dataclass(slots=True)
class _Group:
    """Decodes of similar length.

    rows       their tokens.
    blocks_C   their tables cut to size, one behind another.
    mask_S11L  the positions that each sees; None: all of them.
    lines_X    where [S·K, L] keys lie in a cache seen as lines of D; None: too many for batched products.
    bias_Y1L   the mask as something to add, [S·K, 1, L]; of one zero if there is none.
    stale_X    gathered positions that are none of the request's, to be zeroed where whole blocks are gathered.
    """

    rows: slice | Tensor
    num_rows: int
    blocks_C: Tensor
    length: int
    mask_S11L: Tensor | None
    lines_X: Tensor | None
    bias_Y1L: Tensor
    stale_X: Tensor | None


@dataclass(slots=True)
class _Span:
    """A span of several tokens. mask_QL: None: plain causal from position 0."""

    rows: slice
    blocks_B: Tensor
    length: int
    mask_QL: Tensor | None


@dataclass(slots=True)
class _Work:
    groups: list[_Group]
    spans: list[_Span]


class CpuAttention:
    """Fused attention of torch over gathered blocks; what a step's layers share is worked out once a window.

    deterministic: decodes are attended one by one, so that no neighbour's length changes the order of their sums.
    """

    name = "cpu"

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def prepare(self, batch: Batch, block_size: int) -> None:
        """Forget what an earlier step put into scratch."""
        batch.scratch.clear()

    def attend(
        self, queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, batch: Batch, shape: AttentionShape
    ) -> Tensor:
        """Returns [T, H, D] in the queries' dtype; zeros for padding."""
        key = f"work {shape.window}"
        work = batch.scratch.get(key)
        if not isinstance(work, _Work):
            work = _work(batch, keys_NPKD, shape.window, self.deterministic)
            batch.scratch[key] = work
        if len(work.groups) == 1 and not work.spans and work.groups[0].num_rows == len(queries_THD):
            return _attend_group(queries_THD, keys_NPKD, values_NPKD, work.groups[0], shape)
        output_THD = torch.zeros_like(queries_THD)
        for group in work.groups:
            output_THD[group.rows] = _attend_group(queries_THD[group.rows], keys_NPKD, values_NPKD, group, shape)
        for span in work.spans:
            output_THD[span.rows] = _attend_span(queries_THD[span.rows], keys_NPKD, values_NPKD, span, shape)
        return output_THD


def _attend_group(
    queries_SHD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, group: _Group, shape: AttentionShape
) -> Tensor:
    if group.lines_X is not None:
        return _attend_by_products(queries_SHD, keys_NPKD, values_NPKD, group, shape)
    shared = (group.num_rows, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
    keys_SKLD = _gather(keys_NPKD, group.blocks_C, group.num_rows, group.length, group.stale_X)
    values_SKLD = _gather(values_NPKD, group.blocks_C, group.num_rows, group.length, group.stale_X)
    attended_SKGD = _attend(queries_SHD.view(shared), keys_SKLD, values_SKLD, group.mask_S11L, shape)
    return attended_SKGD.reshape(queries_SHD.shape)


def _attend_by_products(
    queries_SHD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, group: _Group, shape: AttentionShape
) -> Tensor:
    assert group.lines_X is not None
    dense = (group.num_rows * shape.num_kv_heads, group.length, shape.head_dim)
    keys_YLD = keys_NPKD.view(-1, shape.head_dim).index_select(0, group.lines_X).view(dense)
    values_YLD = values_NPKD.view(-1, shape.head_dim).index_select(0, group.lines_X).view(dense)
    queries_YGD = queries_SHD.reshape(dense[0], -1, shape.head_dim)
    if shape.softcap is None:
        scores_YGL = torch.baddbmm(group.bias_Y1L, queries_YGD, keys_YLD.transpose(1, 2), alpha=shape.scale)
    else:
        scores_YGL = torch.bmm(queries_YGD, keys_YLD.transpose(1, 2)) * (shape.scale / shape.softcap)
        scores_YGL = torch.tanh(scores_YGL) * shape.softcap + group.bias_Y1L
    return torch.bmm(scores_YGL.softmax(dim=-1), values_YLD).view(queries_SHD.shape)


def _attend_span(
    queries_QHD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, span: _Span, shape: AttentionShape
) -> Tensor:
    keys_1KLD = _gather(keys_NPKD, span.blocks_B, 1, span.length)
    values_1KLD = _gather(values_NPKD, span.blocks_B, 1, span.length)
    queries_1HQD = queries_QHD.transpose(0, 1)[None]
    if shape.softcap is not None:
        keys_1KLD, values_1KLD = (
            x.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1) for x in (keys_1KLD, values_1KLD)
        )
    attended_1HQD = _attend(queries_1HQD, keys_1KLD, values_1KLD, span.mask_QL, shape, is_causal=span.mask_QL is None)
    return attended_1HQD[0].transpose(0, 1)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, shape: AttentionShape, is_causal: bool = False
) -> Tensor:
    """[S, heads, Q, D] against [S, heads or KV heads, L, D]; SDPA knows no softcap, so that is written out."""
    if shape.softcap is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=shape.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )  # fmt: skip
    scores = queries.float() @ keys.float().transpose(-1, -2) * shape.scale
    scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if is_causal:
        mask = causal_mask(0, scores.shape[-2], 0, scores.shape[-1], None)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(dim=-1) @ values.float()).to(queries.dtype)


def _gather(cache_NPKD: Tensor, blocks_C: Tensor, num_rows: int, length: int, stale_X: Tensor | None = None) -> Tensor:
    """Blocks of several requests, one behind another → [S, K, length, D], a view of dense memory; zeros at stale_X."""
    dense_CPKD = cache_NPKD.index_select(0, blocks_C)
    if stale_X is not None:
        dense_CPKD.flatten(0, 1).index_fill_(0, stale_X, 0.0)
    dense_SLKD = dense_CPKD.view(num_rows, -1, *cache_NPKD.shape[2:])
    return dense_SLKD[:, :length].transpose(1, 2)


def causal_mask(first_query: int, num_queries: int, first_key: int, num_keys: int, window: int | None) -> Tensor:
    """True where a query position sees a key position, [Q, L]."""
    query_Q1 = torch.arange(first_query, first_query + num_queries)[:, None]
    key_1L = torch.arange(first_key, first_key + num_keys)[None]
    seen_QL = key_1L <= query_Q1
    if window is not None:
        seen_QL &= key_1L > query_Q1 - window
    return seen_QL


def _work(batch: Batch, keys_NPKD: Tensor, window: int | None, deterministic: bool) -> _Work:
    """Groups of decodes and longer spans, with tables cut to what the window sees."""
    block_size = keys_NPKD.shape[1]
    spans = batch.host_spans
    if not spans:
        starts, lengths = batch.query_starts_S1.tolist(), batch.lengths_S.tolist()
        counts = [after - first for first, after in pairwise(starts)]
        spans = [(length - count, count) if length else (0, 0) for length, count in zip(lengths, counts, strict=True)]
    decodes = [(start + 1, span) for span, (start, count) in enumerate(spans[: batch.num_decodes]) if count]
    members_of = [[decode] for decode in decodes] if deterministic else _by_length(decodes)
    groups = [_group(batch, members, keys_NPKD, window) for members in members_of]
    work, row = _Work(groups, []), batch.num_decodes
    for span, (start, count) in enumerate(spans[batch.num_decodes :], batch.num_decodes):
        if count:
            work.spans.append(_span(batch, span, slice(row, row + count), start, block_size, window))
        row += count
    return work


def _by_length(decodes: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split (length, span) pairs so that no group's longest is more than PADDING_LIMIT times its shortest."""
    if not decodes:
        return []
    shortest = min(decodes)[0]
    if max(decodes)[0] <= PADDING_LIMIT * shortest + 64:
        return [decodes]
    groups: list[list[tuple[int, int]]] = []
    limit = 0.0
    for length, span in sorted(decodes):
        if length > limit:
            groups.append([])
            limit = PADDING_LIMIT * length + 64
        groups[-1].append((length, span))
    return groups


def _group(batch: Batch, members: list[tuple[int, int]], keys_NPKD: Tensor, window: int | None) -> _Group:
    block_size = keys_NPKD.shape[1]
    spans = [span for _, span in members]
    lengths_S = torch.tensor([length for length, _ in members])
    firsts_S = torch.zeros_like(lengths_S)
    if window is not None:
        firsts_S = (lengths_S - window).clamp(min=0) // block_size
    seen_S = lengths_S - firsts_S * block_size
    longest = int(seen_S.max())
    in_order = spans == list(range(len(spans)))
    rows: slice | Tensor = slice(0, len(spans)) if in_order else torch.tensor(spans)
    places_SB, stale_X = _places(seen_S, -(-longest // block_size), block_size)
    last = batch.tables_SB.shape[1] - 1
    blocks_C = batch.tables_SB[rows].gather(1, (firsts_S[:, None] + places_SB).clamp(max=last)).reshape(-1)
    mask_S11L = None
    positions_SL = (firsts_S * block_size)[:, None] + torch.arange(longest)
    seen_SL = positions_SL < lengths_S[:, None]
    if window is not None:
        seen_SL &= positions_SL >= lengths_S[:, None] - window
    if not bool(seen_SL.all()):
        mask_S11L = seen_SL[:, None, None]
    blocks_C = blocks_C.long()
    lines_X = _lines(blocks_C, seen_S, longest, keys_NPKD)
    return _Group(rows, len(spans), blocks_C, longest, mask_S11L, lines_X, _bias(mask_S11L, keys_NPKD), stale_X)


def _places(seen_S: Tensor, num_columns: int, block_size: int) -> tuple[Tensor, Tensor | None]:
    """Which of its blocks a request has in each column, the first instead of any behind its last, and what is stale."""
    columns = torch.arange(num_columns)
    is_own_SB = columns * block_size < seen_S[:, None]
    places_SB = torch.where(is_own_SB, columns, 0)
    stale_SBP = places_SB[..., None] * block_size + torch.arange(block_size) >= seen_S[:, None, None]
    stale_X = stale_SBP.flatten().nonzero()[:, 0]
    return places_SB, stale_X if len(stale_X) else None


def _lines(blocks_C: Tensor, seen_S: Tensor, length: int, keys_NPKD: Tensor) -> Tensor | None:
    """Line of each key in keys seen as [N·P·K, D], flat, in the order [S, K, L]; of a request's first if it ends."""
    num_rows = len(seen_S)
    _, block_size, num_kv_heads, head_dim = keys_NPKD.shape
    num_bytes = num_rows * num_kv_heads * length * head_dim * keys_NPKD.element_size()
    if keys_NPKD.dtype != torch.float32 or num_bytes > PRODUCTS_LIMIT_BYTES:
        return None
    slots_CP = (blocks_C * block_size)[:, None] + torch.arange(block_size)
    slots_S1L = slots_CP.view(num_rows, 1, -1)[..., :length]
    slots_S1L = torch.where(torch.arange(length) < seen_S[:, None, None], slots_S1L, slots_S1L[..., :1])
    return (slots_S1L * num_kv_heads + torch.arange(num_kv_heads)[:, None]).flatten()


def _bias(mask_S11L: Tensor | None, keys_NPKD: Tensor) -> Tensor:
    if mask_S11L is None:
        return torch.zeros(1, 1, 1)
    bias_S1L = torch.zeros(mask_S11L.shape[0], 1, mask_S11L.shape[-1]).masked_fill_(~mask_S11L[:, 0], float("-inf"))
    return bias_S1L.repeat_interleave(keys_NPKD.shape[2], dim=0)


def _span(batch: Batch, span: int, rows: slice, start: int, block_size: int, window: int | None) -> _Span:
    count = rows.stop - rows.start
    first = 0 if window is None else max(0, start - window + 1) // block_size
    length = start + count - first * block_size
    blocks_B = batch.tables_SB[span, first : -(-(start + count) // block_size)].long()
    plain = start == 0 and (window is None or count <= window)
    mask_QL = None if plain else causal_mask(start, count, first * block_size, length, window)
    return _Span(rows, blocks_B, length, mask_QL)
