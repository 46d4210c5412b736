"""Matrix products by shape: own kernels where a few tokens meet many weights, the vendor's library elsewhere.

It knows shapes and what was measured (docs/benchmarks.md, Kernels); weights are [out, in] as in the checkpoint.
Partial sums: where the inner dimension is split, linear_parts returns float32 [parts, T, N] and leaves the adding, in
order, to the kernel that reads it (add_rms_norm, norm_rope_store), which saves a pass and is deterministic.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.activation import gated
from tandem.kernels.launch import num_multiprocessors, runs_triton
from tandem.kernels.norm import sum_parts

MOST_TOKENS = 64  # above, a layer took as long with the library's products


def linear(x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None = None, invariant: bool = False) -> Tensor:
    """x · Wᵀ + b, [T, I] × [N, I] → [T, N].

    invariant: a token's result is the same number whatever the other tokens and their count.
    """
    if not _is_ours(x_TI, weight_NI):
        return F.linear(x_TI, weight_NI, bias_N)
    if invariant:
        from tandem.kernels.linear_triton import invariant_linear

        return invariant_linear(x_TI, weight_NI, bias_N, invariant_parts(weight_NI.shape[0], weight_NI.shape[1]))
    tiles = _tiles(x_TI, weight_NI)
    if tiles is None or tiles["num_parts"] > 1:
        return F.linear(x_TI, weight_NI, bias_N)
    from tandem.kernels.linear_triton import skinny

    return skinny(x_TI, weight_NI, bias_N, **tiles)


def linear_parts(x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b as [T, N], or as float32 partial sums [parts, T, N] for a consumer that adds them in order."""
    if not _is_ours(x_TI, weight_NI):
        return F.linear(x_TI, weight_NI, bias_N)
    tiles = _tiles(x_TI, weight_NI)
    if tiles is None:
        return F.linear(x_TI, weight_NI, bias_N)
    from tandem.kernels.linear_triton import skinny

    return skinny(x_TI, weight_NI, bias_N, **tiles)


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
    if _is_ours(x_TI, weight_2FI) and not invariant:
        tiles = gated_tiles_for(x_TI.shape[0], weight_2FI.shape[0], weight_2FI.shape[1])
        if tiles is not None:
            from tandem.kernels.linear_triton import skinny

            return skinny(x_TI, weight_2FI, bias_2F, activation=activation, **tiles)
    return gated(linear(x_TI, weight_2FI, bias_2F, invariant), activation)


def _is_ours(x_TI: Tensor, weight_NI: Tensor) -> bool:
    return (
        x_TI.dim() == 2 and weight_NI.dtype == x_TI.dtype and x_TI.dtype in (torch.bfloat16, torch.float16)
        and x_TI.shape[0] > 0 and runs_triton(x_TI) and weight_NI.is_contiguous() and x_TI.stride(1) == 1
    )  # fmt: skip


def _tiles(x_TI: Tensor, weight_NI: Tensor) -> dict[str, Any] | None:
    num_rows, size = weight_NI.shape
    return tiles_for(x_TI.shape[0], num_rows, size, num_multiprocessors(x_TI.device))


def token_tile(num_tokens: int) -> int:
    return 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64


def tiles_for(num_tokens: int, num_rows: int, size: int, num_processors: int) -> dict[str, Any] | None:
    """Tiles of our kernel, or None where the library was measured to be at least as fast.

    Parts make about one program a multiprocessor: that many run at the same pace to the end.
    """
    if num_rows >= 65536 and num_tokens <= 32:
        return {"tokens": token_tile(num_tokens), "rows": 64, "step": 128, "num_parts": 1, "num_stages": 4}
    if num_rows > 8192 or num_tokens > MOST_TOKENS:
        return None
    num_parts = max(1, min(round(num_processors / -(-num_rows // 64)), size // 256))
    return {
        "tokens": token_tile(num_tokens), "rows": 64, "step": 128, "num_parts": num_parts, "num_stages": 6,
    }  # fmt: skip


def gated_tiles_for(num_tokens: int, num_rows: int, size: int) -> dict[str, Any] | None:
    """Tiles of the product with the activation folded in; num_rows counts gate and up."""
    if num_tokens > MOST_TOKENS:
        return None
    rows, step, stages = (64, 128, 4) if num_rows < 12288 else (128, 128, 3) if num_tokens <= 16 else (128, 64, 4)
    return {"tokens": token_tile(num_tokens), "rows": rows, "step": step, "num_stages": stages}


def invariant_parts(num_rows: int, size: int) -> int:
    """Parts of the inner dimension in the batch-invariant form: of the shape alone, never of T or of the device."""
    return max(1, min(round(256 / -(-num_rows // 64)), size // 512, 8))
