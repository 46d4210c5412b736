"""Matrix products by shape: own kernels where a few tokens meet many weights, the vendor's library elsewhere.

It knows shapes and what was measured (docs/benchmarks.md, Kernels); weights are [out, in] as in the checkpoint.
Partial sums: where the inner dimension is split, linear_parts returns float32 [parts, T, N] and leaves the adding, in
order, to the kernel that reads it (add_rms_norm, norm_rope_store), which saves a pass and is deterministic.
Weights may be read before the kernel ahead in the stream has ended (linear_stream.py): they are settled once the host
has waited for them, or another kernel lies between.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.activation import gated
from tandem.kernels.launch import has_streams, num_multiprocessors, runs_triton
from tandem.kernels.norm import sum_parts

FEW_TOKENS, MOST_TOKENS = 64, 256  # up to the first the weights alone count; above the last the library is taken
STREAM_BYTES = 222 * 1024  # shared memory of a program of linear_stream.py, most of a multiprocessor's 228 KiB
# At least this much, too much for two: programs that start while others end would else pile up on the few
# multiprocessors that are free first.
SPREAD_BYTES = 114 * 1024
WIDE_TILES = ((64, 64), (64, 128), (128, 128), (256, 128))  # rows and tokens, above FEW_TOKENS
WIDE_BYTES = 192 * 1024
VOCABULARY = 1 << 16  # rows of the largest matrices that are not gated
LARGE = 1 << 24  # weights: above, the bandwidth of memory counts more than what a kernel's start and end take


def linear(x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None = None, invariant: bool = False) -> Tensor:
    """x · Wᵀ + b, [T, I] × [N, I] → [T, N].

    invariant: a token's result is the same number whatever the other tokens and their count.
    """
    if not _is_ours(x_TI, weight_NI):
        return _library(x_TI, weight_NI, bias_N)
    if invariant:
        return _invariant(x_TI, weight_NI, bias_N)
    tiles = _tiles(x_TI, weight_NI)
    if tiles is None or tiles["num_parts"] > 1:
        return _library(x_TI, weight_NI, bias_N)
    return _product(x_TI, weight_NI, bias_N, tiles)


def linear_parts(x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None = None, invariant: bool = False) -> Tensor:
    """x · Wᵀ + b as [T, N], or as float32 partial sums [parts, T, N] for a consumer that adds them in order.

    invariant: what the consumer gets by adding and rounding once is the same number whatever the other tokens.
    """
    if not _is_ours(x_TI, weight_NI):
        return _library(x_TI, weight_NI, bias_N)
    if invariant:
        return _invariant(x_TI, weight_NI, bias_N, as_parts=bias_N is None)
    tiles = _tiles(x_TI, weight_NI)
    if tiles is None:
        return _library(x_TI, weight_NI, bias_N)
    return _product(x_TI, weight_NI, bias_N, tiles)


def _library(x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
    """The vendor's product; on "meta" its shape alone: torch's check there would import a solver (0.5 s)."""
    if x_TI.is_meta:
        return x_TI.new_empty((x_TI.shape[0], weight_NI.shape[0]))
    return F.linear(x_TI, weight_NI, bias_N)


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Partial sums [parts, T, N] added in order and rounded once, [T, N]."""
    if runs_triton(parts):
        from tandem.kernels.linear_triton import sum_parts_triton

        return sum_parts_triton(parts, None, dtype)
    return sum_parts(parts).to(dtype)


def gated_linear(
    x_TI: Tensor, weight_2FI: Tensor, bias_2F: Tensor | None = None, activation: str = "silu", invariant: bool = False
) -> Tensor:
    """activation(x · gateᵀ) · (x · upᵀ), [T, I] × [gate | up] → [T, F]; "silu" or "gelu" (tanh approximation)."""
    if _is_ours(x_TI, weight_2FI):
        if invariant:
            return _invariant(x_TI, weight_2FI, bias_2F, activation=activation)
        tiles = _tiles(x_TI, weight_2FI, gated=True)
        if tiles is not None:
            return _product(x_TI, weight_2FI, bias_2F, tiles, activation)
    return gated(linear(x_TI, weight_2FI, bias_2F), activation)


def raise_winners(x_TI: Tensor, weight_VI: Tensor, num_ids: int, winners_TW: Tensor, invariant: bool = False) -> bool:
    """Raise winners_TW (winners_torch of sample.py) by the first num_ids logits of each token, writing none of them.

    Returns False, with nothing done, for shapes that own products were not measured to be best at.
    """
    if not _is_ours(x_TI, weight_VI) or (invariant and not streams(weight_VI, False)):
        return False
    tiles = _tiles(x_TI, weight_VI) if weight_VI.shape[0] >= VOCABULARY else None
    if tiles is None:
        return False
    _product(x_TI, weight_VI, None, {**tiles, "num_ids": num_ids, "winners_TW": winners_TW})
    return True


def _is_ours(x_TI: Tensor, weight_NI: Tensor) -> bool:
    return (
        x_TI.dim() == 2 and weight_NI.dtype == x_TI.dtype and x_TI.dtype in (torch.bfloat16, torch.float16)
        and x_TI.shape[0] > 0 and runs_triton(x_TI) and weight_NI.is_contiguous() and x_TI.stride(1) == 1
    )  # fmt: skip


def _product(
    x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None, tiles: dict[str, Any], activation: str | None = None
) -> Tensor:
    if streams(weight_NI, activation is not None):
        from tandem.kernels.linear_stream import stream

        return stream(aligned(x_TI), weight_NI, bias_N, activation=activation, **tiles)
    from tandem.kernels.linear_triton import skinny

    return skinny(x_TI, weight_NI, bias_N, activation=activation, **tiles)


def _invariant(
    x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None, as_parts: bool = False, activation: str | None = None
) -> Tensor:
    """The sum over I in parts that depend on the shape of W alone, added in order and rounded once.

    as_parts: left to the consumer, as linear_parts says. One part of many tokens is their sum already.
    """
    from tandem.kernels.linear_triton import invariant_linear, sum_parts_triton

    parts = 1 if activation else invariant_parts(*weight_NI.shape)
    as_parts = as_parts and parts > 1
    if not streams(weight_NI, activation is not None):
        y = invariant_linear(x_TI, weight_NI, bias_N, parts)
    elif x_TI.shape[0] > MOST_TOKENS:
        y = invariant_linear(x_TI, weight_NI, bias_N, parts, as_parts)
    else:
        tiles = _invariant_tiles(x_TI, weight_NI, parts, activation is not None)
        y = _product(x_TI, weight_NI, bias_N if parts == 1 else None, tiles, activation)
        return sum_parts_triton(y, bias_N, x_TI.dtype) if parts > 1 and not as_parts else y
    return gated(y, activation) if activation else y


def _invariant_tiles(x_TI: Tensor, weight_NI: Tensor, parts: int, gated: bool) -> dict[str, Any]:
    """Of linear_stream.py, up to MOST_TOKENS."""
    num_tokens, (num_rows, size) = x_TI.shape[0], weight_NI.shape
    if num_tokens > FEW_TOKENS:
        return wide_tiles(num_tokens, num_rows, parts, num_multiprocessors(x_TI.device))
    if num_rows >= VOCABULARY and not gated:
        return vocabulary_tiles(num_tokens, size)
    return stream_tiles(num_tokens, gated_rows(num_rows) if gated else 64, size, parts)


def streams(weight_NI: Tensor, gated: bool) -> bool:
    """Whether linear_stream.py takes these weights: on its device, whole tiles of 64, gate rows by eights."""
    num_rows, size = weight_NI.shape
    return (
        has_streams(weight_NI.device) and size % 64 == 0 and weight_NI.data_ptr() % 16 == 0
        and not (gated and num_rows % 16)
    )  # fmt: skip


def aligned(x_TI: Tensor) -> Tensor:
    """x itself, or a copy of it, with every row on 16 bytes."""
    good = x_TI.data_ptr() % 16 == 0 and (x_TI.stride(0) % 8 == 0 or x_TI.shape[0] == 1)
    return x_TI if good else x_TI.clone(memory_format=torch.contiguous_format)


def _tiles(x_TI: Tensor, weight_NI: Tensor, gated: bool = False) -> dict[str, Any] | None:
    choose = stream_tiles_for if streams(weight_NI, gated) else tiles_for
    num_rows, size = weight_NI.shape
    return choose(x_TI.shape[0], num_rows, size, num_multiprocessors(x_TI.device), gated)


def token_tile(num_tokens: int) -> int:
    return 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64


def gated_rows(num_rows: int) -> int:
    return 64 if num_rows < 12288 else 128


def tiles_for(
    num_tokens: int, num_rows: int, size: int, num_processors: int, gated: bool = False
) -> dict[str, Any] | None:
    """Tiles of linear_triton.py, or None where the library was measured to be at least as fast.

    gated: the activation is folded in, and num_rows counts gate and up. Parts make about one program a
    multiprocessor: that many run at the same pace to the end.
    """
    if num_tokens > FEW_TOKENS:
        return None
    tokens = token_tile(num_tokens)
    if gated:
        rows, step = gated_rows(num_rows), 64 if num_rows >= 12288 and num_tokens > 16 else 128
        return {"tokens": tokens, "rows": rows, "step": step, "num_stages": 3 if rows * step > 8192 else 4}
    if num_rows >= VOCABULARY and num_tokens <= 32:
        return {"tokens": tokens, "rows": 64, "step": 128, "num_parts": 1, "num_stages": 4}
    if num_rows > 8192:
        return None
    num_parts = max(1, min(round(num_processors / -(-num_rows // 64)), size // 256))
    return {"tokens": tokens, "rows": 64, "step": 128, "num_parts": num_parts, "num_stages": 6}


def stream_tiles_for(
    num_tokens: int, num_rows: int, size: int, num_processors: int, gated: bool = False
) -> dict[str, Any] | None:
    """As tiles_for, of linear_stream.py."""
    if num_tokens > FEW_TOKENS:
        return wide_tiles_for(num_tokens, num_rows, size, num_processors, gated)
    if not gated and 8192 < num_rows < VOCABULARY:
        return None
    if gated:
        return stream_tiles(num_tokens, gated_rows(num_rows), size, 1)
    if num_rows >= VOCABULARY:
        return vocabulary_tiles(num_tokens, size)
    return stream_tiles(num_tokens, 64, size, stream_parts(num_rows, size, num_processors))


def stream_parts(num_rows: int, size: int, num_processors: int) -> int:
    """Parts of the inner dimension: about one program a multiprocessor, or half as many where the weights are few.

    Such a program has all its weights on their way before it waits; fewer parts are less to add for the consumer.
    """
    tiles = -(-num_rows // 64)
    if num_rows * size * 2 <= num_processors // 2 * 128 * 1024:
        num_processors //= 2
    return max(1, min(round(num_processors / tiles), size // 256))


def stream_tiles(
    num_tokens: int, rows: int, size: int, num_parts: int, num_bytes: int = STREAM_BYTES
) -> dict[str, Any]:
    """As many stages as shared memory takes. Parts are whole numbers of 128, as those of invariant_linear.

    lag: with two stages none would be on its way meanwhile; with more it paid up to 16 tokens.
    """
    tokens = 8 if num_tokens <= 8 else token_tile(num_tokens)
    step = 256 if -(-size // 128 // num_parts) % 2 == 0 else 128
    stages = num_bytes // (2 * step * (rows + tokens))
    return {
        "tokens": tokens, "rows": rows, "step": step, "num_parts": num_parts, "num_stages": stages,
        "least_bytes": SPREAD_BYTES, "lag": int(num_tokens <= 16 and stages > 2),
    }  # fmt: skip


def vocabulary_tiles(num_tokens: int, size: int) -> dict[str, Any]:
    """Up to FEW_TOKENS: two programs a multiprocessor, of which one begins as the other ends; so many spread anyway."""
    rows, tokens = 64 if num_tokens <= 32 else 128, 8 if num_tokens <= 8 else token_tile(num_tokens)
    step = min(128, size)
    stages = STREAM_BYTES // 2 // (2 * step * (rows + tokens))
    return {
        "tokens": tokens, "rows": rows, "step": step, "num_parts": 1, "num_stages": stages,
        "lag": int(num_tokens <= 16),
    }  # fmt: skip


def wide_tiles_for(
    num_tokens: int, num_rows: int, size: int, num_processors: int, gated: bool
) -> dict[str, Any] | None:
    """As stream_tiles_for, above FEW_TOKENS. Two parts at most: the consumer reads them for as many tokens."""
    parts = 1 if gated else max(1, min(2, num_processors // -(-num_rows // 64), size // 1024))
    tiles = wide_tiles(num_tokens, num_rows, parts, num_processors)
    programs = -(-num_rows // tiles["rows"]) * -(-num_tokens // tiles["tokens"]) * parts
    if num_tokens > MOST_TOKENS or programs > num_processors:
        return None
    if num_tokens > 128 and (num_rows * size >= LARGE or tiles["rows"] > 128):
        return None  # bound by the tensor cores, or nearly: the library's larger tiles
    return None if num_rows * size > LARGE and not gated and parts == 1 else tiles


def wide_tiles(num_tokens: int, num_rows: int, num_parts: int, num_processors: int) -> dict[str, Any]:
    """The smallest tile that makes no more programs than multiprocessors, else the largest.

    A multiprocessor receives (rows + tokens) · size / parts elements: about 100 KB/us each, 10 TB/s all together.
    """
    for rows, tokens in WIDE_TILES:
        if -(-num_rows // rows) * -(-num_tokens // tokens) * num_parts <= num_processors:
            break
    else:
        rows, tokens = (128, 256) if num_tokens > 128 else (256, 128)
    step = 128 if rows == 64 else 64
    return {
        "tokens": tokens, "rows": rows, "step": step, "num_parts": num_parts, "lag": 1,
        "num_stages": WIDE_BYTES // (2 * step * (rows + tokens)), "num_warps": 4 if rows == 64 else 8,
        "least_bytes": SPREAD_BYTES,
    }  # fmt: skip


def invariant_parts(num_rows: int, size: int) -> int:
    """Parts of the inner dimension in the batch-invariant form: of the shape alone, never of T or of the device."""
    return stream_parts(num_rows, size, 132) if num_rows <= 8192 else 1
