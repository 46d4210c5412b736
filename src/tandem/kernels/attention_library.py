"""Where libraries were measured to attend faster than our kernel; whole prompts by cuDNN, through torch.

For cuDNN it knows spans that start at position 0. Keys and values are gathered from the cache first: a copy of a few
megabytes, against an amount of arithmetic that grows with the square of the length. cuDNN builds a plan for each new
length, about 45 ms on the host, so lengths are rounded up; causality hides the rows behind the end.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

STEP = 512  # lengths are rounded up to a multiple, so that few plans are built
SHORTEST = 2048  # below, our kernel is as fast and needs neither gather nor plan
SHORTEST_PAGED = 64  # mean tokens of a span, from which on FlashInfer's paged prefill is faster than our kernel
SHORTEST_ALONE = 8192  # tokens of a whole prompt, from which on cuDNN is 3 to 7 % faster than that


def padded_length(length: int) -> int:
    return -(-length // STEP) * STEP


def is_worth_it(start: int, length: int, dtype: torch.dtype, head_dim: int) -> bool:
    """A whole prompt, long enough, of which rounding up adds less than a third to the arithmetic."""
    return (
        start == 0 and length >= SHORTEST and dtype in (torch.bfloat16, torch.float16) and head_dim in (64, 128)
        and padded_length(length) ** 2 < 1.33 * length**2
    )  # fmt: skip


def paged_is_worth_it(spans: Sequence[tuple[int, int]]) -> bool:
    """Whether FlashInfer attends spans (start, length) of several tokens faster, all of them in one launch.

    It gives each span and head tiles of 128 queries, and was 1.3 to 1.8 times faster than our kernel with spans of 64
    to 8,192 tokens, behind a prefix or not, but slower with many spans of 32 (docs/benchmarks.md).
    """
    return sum(length for _, length in spans) >= SHORTEST_PAGED * len(spans) > 0


def beats_paged(spans: Sequence[tuple[int, int]]) -> bool:
    """Whether cuDNN attends whole prompts faster than FlashInfer: only one alone, and only if it is long."""
    return len(spans) == 1 and spans[0][1] >= SHORTEST_ALONE


def whole_prompt_attention(
    queries_THD: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor, table_B: Tensor, first: int, length: int, scale: float
) -> Tensor:
    """Causal attention of one span of ``length`` tokens, at ``first`` in queries, over itself: [length, H, D].

    table_B  block table of the span, at least the blocks of ``length`` tokens. Same heads a group as the contract's.
    """
    block_size, padded = keys_NPKD.shape[1], padded_length(length)
    num_blocks, wanted = -(-length // block_size), -(-padded // block_size)
    blocks = table_B[:num_blocks]
    if wanted > num_blocks:  # any block will do: it is blanked
        blocks = torch.cat((blocks, blocks[-1:].expand(wanted - num_blocks)))
    keys, values = (
        cache.index_select(0, blocks).flatten(0, 1)[None, :padded].transpose(1, 2) for cache in (keys_NPKD, values_NPKD)
    )
    if padded > length:
        for gathered in (keys, values):  # what a former owner left there may be NaN, and 0 · NaN is not 0
            gathered[:, :, length:] = 0
    queries = queries_THD[first : first + padded]
    if queries.shape[0] < padded:
        queries = F.pad(queries, (0, 0, 0, 0, 0, padded - queries.shape[0]))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if queries.is_cuda else SDPBackend.MATH):
        attended = F.scaled_dot_product_attention(
            queries[None].transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    return attended[0].transpose(0, 1)[:length]
