"""Query/key norm, rotary embedding and cache write as one Triton kernel. It knows tokens, heads and cache slots."""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.launch import next_power_of_2, options, reads_ahead, start


@triton.jit
def _rope_kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, slots_ptr, keys_ptr, values_ptr, queries_ptr, query_norm_ptr, key_norm_ptr,
    eps, qkv_stride, part_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, NUM_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A program takes HEADS of the H + 2K heads of one token, each as its two halves, so that rotation is elementwise.
    half: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inner = tl.arange(0, HALF)
    is_query, is_key, is_value = heads < H, (heads >= H) & (heads < H + K), (heads >= H + K) & (heads < H + 2 * K)
    within = inner < half
    mask = (heads < H + 2 * K)[:, None] & within[None, :]
    if HAS_NORM:
        q_first = tl.load(query_norm_ptr + inner, within, other=0.0).to(tl.float32)
        q_second = tl.load(query_norm_ptr + half + inner, within, other=0.0).to(tl.float32)
        k_first = tl.load(key_norm_ptr + inner, within, other=0.0).to(tl.float32)
        k_second = tl.load(key_norm_ptr + half + inner, within, other=0.0).to(tl.float32)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    offsets = token * qkv_stride + heads[:, None] * D + inner[None, :]
    first = tl.load(qkv_ptr + offsets, mask, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + offsets + half, mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        first += tl.load(qkv_ptr + part * part_stride + offsets, mask, other=0.0)
        second += tl.load(qkv_ptr + part * part_stride + offsets + half, mask, other=0.0)
    cos = tl.load(cos_sin_ptr + position * D + inner, within, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * D + half + inner, within, other=0.0)[None, :]
    rounding: tl.constexpr = queries_ptr.dtype.element_ty
    first, second = first.to(rounding).to(tl.float32), second.to(rounding).to(tl.float32)
    value_first, value_second = first, second
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = tl.rsqrt(squares / D + eps)[:, None]
        first = first * inverse * tl.where(is_query[:, None], q_first[None, :], k_first[None, :])
        second = second * inverse * tl.where(is_query[:, None], q_second[None, :], k_second[None, :])
        first, second = first.to(rounding).to(tl.float32), second.to(rounding).to(tl.float32)
    if PDL == 2:
        gdc_launch_dependents()
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    q_offsets = token * (H * D) + heads[:, None] * D + inner[None, :]
    q_mask = is_query[:, None] & within[None, :]
    tl.store(queries_ptr + q_offsets, turned_first.to(rounding), q_mask)
    tl.store(queries_ptr + q_offsets + half, turned_second.to(rounding), q_mask)
    if slot >= 0:
        cached: tl.constexpr = keys_ptr.dtype.element_ty
        k_offsets = slot * (K * D) + (heads - H)[:, None] * D + inner[None, :]
        k_mask = is_key[:, None] & within[None, :]
        tl.store(keys_ptr + k_offsets, turned_first.to(cached), k_mask)
        tl.store(keys_ptr + k_offsets + half, turned_second.to(cached), k_mask)
        v_offsets = slot * (K * D) + (heads - H - K)[:, None] * D + inner[None, :]
        v_mask = is_value[:, None] & within[None, :]
        tl.store(values_ptr + v_offsets, value_first.to(cached), v_mask)
        tl.store(values_ptr + v_offsets + half, value_second.to(cached), v_mask)


# One shape of program for any number of tokens, and no products fused into sums: where they are, the compiler chooses
# which, and another choice in another variant of the kernel rounds a head's squares differently.
HEADS, NUM_WARPS = 16, 8


def norm_rope_store_triton(
    qkv: Tensor, positions_T: Tensor, cos_sin_LD: Tensor, slots_T: Tensor, keys_NPKD: Tensor, values_NPKD: Tensor,
    num_heads: int, query_norm_D: Tensor | None = None, key_norm_D: Tensor | None = None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """See norm_rope_store_torch. The caches are contiguous."""
    num_kv_heads, head_dim = keys_NPKD.shape[2:]
    num_tokens = qkv.shape[-2]
    assert keys_NPKD.is_contiguous() and values_NPKD.is_contiguous() and cos_sin_LD.is_contiguous()
    dtype = keys_NPKD.dtype if qkv.dim() == 3 else qkv.dtype
    queries = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype, device=qkv.device)
    has_norm = query_norm_D is not None and key_norm_D is not None
    if num_tokens:
        grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))
        start(_rope_kernel, grid,
            qkv, positions_T, cos_sin_LD, slots_T, keys_NPKD, values_NPKD, queries,
            query_norm_D if has_norm else cos_sin_LD, key_norm_D if has_norm else cos_sin_LD, eps,
            qkv.stride(-2), qkv.stride(0) if qkv.dim() == 3 else 0,
            H=num_heads, K=num_kv_heads, D=head_dim, HALF=next_power_of_2(head_dim // 2), HEADS=HEADS,
            HAS_NORM=has_norm, NUM_PARTS=qkv.shape[0] if qkv.dim() == 3 else 1,
            enable_fp_fusion=False, **options(qkv, "early rope" if reads_ahead(num_tokens) else "rope", NUM_WARPS),
        )  # fmt: skip
    return queries
