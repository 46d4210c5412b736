"""Built-in shapes, as the numbers of a config.json. They name no weights: those are random or come from elsewhere."""

import copy
import difflib
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _shape(
    family: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, positions: int,
    theta: float, eps: float, **rest: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
        "max_position_embeddings": positions, "rope_theta": theta, "rms_norm_eps": eps, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", **rest,
    }  # fmt: skip


_NAMED = {
    "tiny": _shape("llama", 512, 64, 2, 4, 2, 128, 512, 10000.0, 1e-5, tie_word_embeddings=True, torch_dtype="float32"),
    "smollm2-135m": _shape("llama", 49152, 576, 30, 9, 3, 1536, 8192, 100000.0, 1e-5, tie_word_embeddings=True),
    "llama-3.2-1b": _shape(
        "llama", 128256, 2048, 16, 32, 8, 8192, 131072, 500000.0, 1e-5, head_dim=64, tie_word_embeddings=True,
        rope_scaling={**_LLAMA3_ROPE, "factor": 32.0},
    ),
    "llama-3.1-8b": _shape(
        "llama", 128256, 4096, 32, 32, 8, 14336, 131072, 500000.0, 1e-5, rope_scaling=_LLAMA3_ROPE
    ),
    "llama-3.1-70b": _shape(
        "llama", 128256, 8192, 80, 64, 8, 28672, 131072, 500000.0, 1e-5, rope_scaling=_LLAMA3_ROPE
    ),
    "llama-7b": _shape("llama", 32000, 4096, 32, 32, 32, 11008, 2048, 10000.0, 1e-6),
    "llama-13b": _shape("llama", 32000, 5120, 40, 40, 40, 13824, 2048, 10000.0, 1e-6),
    "mistral-7b": _shape("mistral", 32000, 4096, 32, 32, 8, 14336, 32768, 10000.0, 1e-5, sliding_window=4096),
    "mixtral-8x7b": _shape(
        "mixtral", 32000, 4096, 32, 32, 8, 14336, 32768, 1e6, 1e-5, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2.5-0.5b": _shape("qwen2", 151936, 896, 24, 14, 2, 4864, 32768, 1e6, 1e-6, tie_word_embeddings=True),
    "qwen2.5-7b": _shape("qwen2", 152064, 3584, 28, 28, 4, 18944, 32768, 1e6, 1e-6),
    "qwen3-0.6b": _shape(
        "qwen3", 151936, 1024, 28, 16, 8, 3072, 40960, 1e6, 1e-6, head_dim=128, tie_word_embeddings=True
    ),
    "qwen3-8b": _shape("qwen3", 151936, 4096, 36, 32, 8, 12288, 40960, 1e6, 1e-6, head_dim=128),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", 151936, 2048, 48, 32, 4, 6144, 40960, 1e6, 1e-6, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "gemma-3-1b": _shape(
        "gemma3_text", 262144, 1152, 26, 4, 1, 6912, 32768, 1e6, 1e-6, head_dim=256, sliding_window=512,
        sliding_window_pattern=6, rope_local_base_freq=10000.0, query_pre_attn_scalar=256, tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh",
    ),
}  # fmt: skip

NAMES = tuple(_NAMED)


def named_config(name: str) -> dict[str, Any] | None:
    """A fresh copy of a built-in shape's config, or None. Case does not matter."""
    config = _NAMED.get(name.lower())
    return None if config is None else copy.deepcopy(config)


def hint_for(name: str) -> str:
    """What to say to somebody whose model was not found: the nearest spelling, and which shapes there are."""
    near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.5)
    first = f"did you mean {near[0]!r}? " if near else ""
    if name.lower() in NAMES:
        first = f"{name} is a built-in shape, without weights: add --load-format random. "
    return f"{first}The built-in shapes, with --load-format random, are: {', '.join(NAMES)}."
