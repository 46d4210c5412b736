"""Query/key norm, rotary embedding and the write into the paged cache, as one operation."""

import torch
from torch import Tensor

from tandem.kernels.launch import runs_triton
from tandem.kernels.norm import rms_norm_torch, sum_parts


def rotate_torch(x_THD: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotary position embedding in the half-split ("NeoX") layout, in float32.

    The halves (a, b) of each head become (a·cos - b·sin, b·cos + a·sin); cos_Td and sin_Td are [T, D/2].
    """
    first_THd, second_THd = x_THD.float().chunk(2, dim=-1)
    cos_T1d, sin_T1d = cos_Td[:, None], sin_Td[:, None]
    turned_THd = torch.addcmul(first_THd * cos_T1d, second_THd, sin_T1d, value=-1.0)
    return torch.cat((turned_THd, torch.addcmul(second_THd * cos_T1d, first_THd, sin_T1d)), dim=-1).to(x_THD.dtype)


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
    qkv_TX = qkv if qkv.dim() == 2 else sum_parts(qkv).to(keys_NPKD.dtype)
    heads_TYD = qkv_TX.view(len(qkv_TX), num_heads + 2 * num_kv_heads, head_dim)
    rotated_TYD, values = heads_TYD[:, : num_heads + num_kv_heads], heads_TYD[:, num_heads + num_kv_heads :]
    if query_norm_D is not None and key_norm_D is not None:
        queries, keys = rotated_TYD[:, :num_heads], rotated_TYD[:, num_heads:]
        rotated_TYD = torch.cat((rms_norm_torch(queries, query_norm_D, eps), rms_norm_torch(keys, key_norm_D, eps)), 1)
    rotated_TYD = rotate_torch(rotated_TYD, *cos_sin_LD.index_select(0, positions_T).chunk(2, dim=-1))
    keys, slots = rotated_TYD[:, num_heads:], slots_T
    if len(slots_T) and int(slots_T.min()) < 0:
        written = slots_T >= 0
        keys, values, slots = keys[written], values[written], slots_T[written]
    keys_NPKD.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, keys.to(keys_NPKD.dtype))
    values_NPKD.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, values.to(values_NPKD.dtype))
    return rotated_TYD[:, :num_heads]


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
