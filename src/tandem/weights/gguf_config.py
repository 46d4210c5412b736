"""GGUF metadata and tensor names in Hugging Face words. It knows architectures, not tensor data or tokenizers."""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.errors import WeightsError
from tandem.weights.gguf import GGUF, TensorInfo

# GGUF architecture: (model_type, class), for llama see _family.
_FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_PERMUTED = ("llama", "mistral")

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_BLOCK_BY_MODEL = {
    "gemma3_text": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    },
}
_ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Rename:
    """What a GGUF tensor is called in a Hugging Face checkpoint, and how its stored form differs.

    name            with "{expert}" where the first dimension counts experts.
    permuted_heads  number of heads whose rows are stored pairwise, or 0.
    minus_one       the stored values are one above the checkpoint's (Gemma's norms).
    """

    name: str
    permuted_heads: int = 0
    minus_one: bool = False


def renames(gguf: GGUF) -> Iterator[tuple[TensorInfo, Rename]]:
    """Each tensor but the rotary factors, which gguf_config() turns into rope_scaling. Unknown ones keep their name."""
    model_type, _ = _family(gguf)
    block = _BLOCK | _BLOCK_BY_MODEL.get(model_type, {})
    heads = _heads(gguf) if gguf.architecture in _PERMUTED else {}
    for info in gguf.tensors.values():
        if info.name == _ROPE_FREQS:
            continue
        stem, _, suffix = info.name.rpartition(".")
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match and match[2] in block:
            name = f"model.layers.{match[1]}.{block[match[2]]}.{suffix}"
            minus_one = model_type == "gemma3_text" and match[2].endswith("_norm")
            yield info, Rename(name, heads.get(match[2], 0), minus_one)
        elif stem in _TOP:
            minus_one = model_type == "gemma3_text" and stem == "output_norm"
            yield info, Rename(f"{_TOP[stem]}.{suffix}", minus_one=minus_one)
        else:
            yield info, Rename(info.name)


def gguf_config(gguf: GGUF) -> dict[str, Any]:
    """A config.json from the metadata. Raises WeightsError for an architecture or rope scaling that is not known."""
    model_type, architecture = _family(gguf)
    number = _Numbers(gguf)
    hidden, heads = number.int("embedding_length"), number.int("attention.head_count")
    # rope.dimension_count stands for the head's size where the head's size itself is left out.
    head_dim = number.get("attention.key_length") or number.get("rope.dimension_count") or hidden // heads
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": number.int("feed_forward_length"),
        "num_hidden_layers": number.int("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": number.int("context_length"),
        "rms_norm_eps": _decimal(number.float("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(number.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(gguf, number, head_dim),
        "vocab_size": _rows(gguf, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "torch_dtype": _dtype(gguf),
    }
    if number.get("attention.sliding_window"):
        config["sliding_window"] = number.int("attention.sliding_window")
    return config | _EXTRA.get(model_type, _no_extra)(number, config)


class _Numbers:
    """Numbers under the architecture's own prefix."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf, self.prefix = gguf, gguf.architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self.gguf.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            return value[0]
        if isinstance(value, list):
            raise WeightsError(f"{self.gguf.path}: {self.prefix}.{key} differs from layer to layer: {value[:8]}.")
        return value

    def int(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or value <= 0:
            raise WeightsError(f"{self.gguf.path}: {self.prefix}.{key} is {value!r}; a count of at least 1 is needed.")
        return value

    def float(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float):
            raise WeightsError(f"{self.gguf.path}: {self.prefix}.{key} is {value!r}; a number is needed.")
        return value


def _family(gguf: GGUF) -> tuple[str, str]:
    name = gguf.architecture
    if name not in _FAMILIES:
        raise WeightsError(
            f"{gguf.path} holds the architecture {name!r}; from GGUF these are read: {', '.join(sorted(_FAMILIES))}.",
            hint="use the model's safetensors checkpoint if its family is supported.",
        )
    if name == "llama" and gguf.metadata.get("llama.expert_count"):
        return "mixtral", "MixtralForCausalLM"
    return _FAMILIES[name]


def _heads(gguf: GGUF) -> dict[str, int]:
    number = _Numbers(gguf)
    heads = number.int("attention.head_count")
    return {"attn_q": heads, "attn_k": number.get("attention.head_count_kv", heads)}


def _moe(number: _Numbers, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": number.int("expert_count"),
        "num_experts_per_tok": number.int("expert_used_count"),
        "moe_intermediate_size": number.int("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _mixtral(number: _Numbers, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": number.int("expert_count"),
        "num_experts_per_tok": number.int("expert_used_count"),
    }


def _gemma3(number: _Numbers, config: dict[str, Any]) -> dict[str, Any]:
    # Gemma 3 is fixed at five sliding layers to one full; only the 27B (62 layers) scales queries by hidden / heads.
    layers, pattern = config["num_hidden_layers"], 6
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": _decimal(number.get("rope.freq_base_swa", 10000.0)),
        "sliding_window_pattern": pattern,
        "layer_types": [
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)
        ],
        "attn_logit_softcapping": number.get("attn_logit_softcapping"),
        "final_logit_softcapping": number.get("final_logit_softcapping"),
    }  # fmt: skip


def _no_extra(number: _Numbers, config: dict[str, Any]) -> dict[str, Any]:
    return {}


_EXTRA = {"qwen3_moe": _moe, "mixtral": _mixtral, "gemma3_text": _gemma3}


def _rope_scaling(gguf: GGUF, number: _Numbers, head_dim: int) -> dict[str, Any] | None:
    if any(name.startswith("rope_factors_") for name in gguf.tensors):
        raise WeightsError(f"{gguf.path} uses long-rope factors, which are not supported.")
    if _ROPE_FREQS in gguf.tensors:
        return llama3_scaling(gguf, _decimal(number.get("rope.freq_base", 10000.0)), head_dim)
    kind, factor = number.get("rope.scaling.type"), number.get("rope.scaling.factor") or number.get("rope.scale_linear")
    if kind in (None, "none") and factor in (None, 0.0, 1.0):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        for ours, theirs in (
            ("original_max_position_embeddings", "original_context_length"),
            ("attention_factor", "attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if number.get(f"rope.scaling.{theirs}"):
                scaling[ours] = number.get(f"rope.scaling.{theirs}")
        return scaling
    raise WeightsError(f"{gguf.path}: the rope scaling {kind!r} is not supported.")


def llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """What each rotary frequency is divided by under "llama3" scaling, lowest pair first.

    Wavelengths under original / high keep their frequency, those over original / low are stretched by `factor`, with a
    smooth ramp between. Source: Llama 3.1's reference, as in transformers' modeling_rope_utils.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for pair in range(head_dim // 2):
        turns = scaling["original_max_position_embeddings"] * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors


def llama3_scaling(gguf: GGUF, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The "llama3" parameters that give the file's rope_freqs, found from them and checked against them.

    The factors fix only ratios of the parameters, so low_freq_factor is taken as 1, as Llama 3 has it. Raises
    WeightsError when no parameters give these factors.
    """
    info = gguf.tensors[_ROPE_FREQS]
    if info.type != "F32" or info.num_elements != head_dim // 2:
        raise WeightsError(
            f"{gguf.path}: rope_freqs has {info.num_elements} elements of type {info.type}; "
            f"{head_dim // 2} of F32 are needed."
        )
    found = struct.unpack_from(f"<{info.num_elements}f", gguf.file.view, info.start)
    if all(abs(f - 1) < 1e-6 for f in found):
        return None
    for scaling in _candidates(found, theta, head_dim):
        made = llama3_factors(theta, head_dim, scaling)
        if all(abs(a - b) <= 1e-3 * b for a, b in zip(made, found, strict=True)):
            return scaling
    raise WeightsError(f"{gguf.path}: its rope_freqs are no llama3 scaling; other factors are not supported.")


def _candidates(found: tuple[float, ...], theta: float, head_dim: int) -> Iterator[dict[str, Any]]:
    factor = _decimal(max(found))
    base = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    yield base | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    # On the ramp, smooth = a · (1 / wavelength) - b with a = original / (high - low), b = low / (high - low).
    ramp = [
        (theta ** (-2 * i / head_dim) / (2 * math.pi), (1 / f - 1 / factor) / (1 - 1 / factor))
        for i, f in enumerate(found)
        if 1 + 1e-4 < f < factor * (1 - 1e-4)
    ]
    if len(ramp) >= 2 and factor > 1:
        (x0, y0), (x1, y1) = ramp[0], ramp[-1]
        slope = (y1 - y0) / (x1 - x0)
        width = 1 / (slope * x0 - y0) if slope * x0 != y0 else 0.0
        if width > 0:
            yield base | {
                "high_freq_factor": round(1 + width, 4),
                "original_max_position_embeddings": round(slope * width),
            }


def _rows(gguf: GGUF, name: str) -> int:
    if name not in gguf.tensors:
        raise WeightsError(f"{gguf.path} has no tensor {name!r}.")
    return gguf.tensors[name].shape[0]


def _dtype(gguf: GGUF) -> str:
    kinds = {info.type for info in gguf.tensors.values() if len(info.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else "bfloat16"


def _decimal(value: float) -> float:
    """The decimal number that a float32 was written for: 9.99999975e-06 → 1e-05."""
    return float(f"{value:.7g}")
