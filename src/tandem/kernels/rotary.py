"""Query/key norm, rotary embedding and the write into the paged cache, as one operation."""

import torch
from torch import Tensor

from tandem.kernels.launch import runs_triton
from tandem.kernels.norm import rms_norm_torch, sum_parts


def rotate_torch(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary position embedding in the half-split ("NeoX") layout: x·cos + rotate_half(x)·sin, in float32.

    cos_TD and sin_TD have the two halves equal, [T, D].
    """
    first_THd, second_THd = x_THD.float().chunk(2, dim=-1)
    rotated_THD = torch.cat((-second_THd, first_THd), dim=-1)
    return (x_THD.float() * cos_TD[:, None] + rotated_THD * sin_TD[:, None]).to(x_THD.dtype)


def norm_rope_store_torch(
    qkv: Tensor, positions_T: Tensor, cos_sin_LD: Tensor, slots_T: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor,
    num_heads: int, query_norm_D: Tensor | None = None, key_norm_D: Tensor | None = None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Split qkv, normalise q and k per head if norms are given, rotate both, write K and V into the cache.

    qkv          [T, (H + 2K)·D]: queries, keys, values; or float32 partial sums of it, [parts, T, (H + 2K)·D], as
                 linear_parts returns them, added in order and rounded to the cache's dtype.
    cos_sin_LD   float32 [positions, D]: D/2 cosines, then D/2 sines, of each position.
    slots_T      cache slot of each token; -1 writes nowhere.
    Returns the rotated queries, [T, H, D].
    """
    num_kv_heads, head_dim = keys_NPKD.shape[2:]
    widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    qkv_TX = qkv if qkv.dim() == 2 else sum_parts(qkv).to(keys_NPKD.dtype)
    queries, keys, values = (part.unflatten(-1, (-1, head_dim)) for part in qkv_TX.split(widths, dim=-1))
    if query_norm_D is not None and key_norm_D is not None:
        queries, keys = rms_norm_torch(queries, query_norm_D, eps), rms_norm_torch(keys, key_norm_D, eps)
    cos_Td, sin_Td = cos_sin_LD[positions_T].chunk(2, dim=-1)
    cos_TD, sin_TD = torch.cat((cos_Td, cos_Td), -1), torch.cat((sin_Td, sin_Td), -1)
    written = slots_T >= 0
    slots, written_all = (slots_T, True) if bool(written.all()) else (slots_T[written], False)
    keys = rotate_torch(keys, cos_TD, sin_TD)
    keys_NPKD.flatten(0, 1)[slots] = (keys if written_all else keys[written]).to(keys_NPKD.dtype)
    values_NPKD.flatten(0, 1)[slots] = (values if written_all else values[written]).to(values_NPKD.dtype)
    return rotate_torch(queries, cos_TD, sin_TD)


def norm_rope_store(
    qkv: Tensor, positions_T: Tensor, cos_sin_LD: Tensor, slots_T: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor,
    num_heads: int, query_norm_D: Tensor | None = None, key_norm_D: Tensor | None = None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """See norm_rope_store_torch."""
    if runs_triton(qkv):
        from tandem.kernels.rotary_triton import norm_rope_store_triton

        return norm_rope_store_triton(
            qkv, positions_T, cos_sin_LD, slots_T, keys_NPKD, values_NPKD, num_heads, query_norm_D, key_norm_D, eps
        )
    return norm_rope_store_torch(
        qkv, positions_T, cos_sin_LD, slots_T, keys_NPKD, values_NPKD, num_heads, query_norm_D, key_norm_D, eps
    )
