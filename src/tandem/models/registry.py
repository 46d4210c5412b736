"""From config.json to a spec, and from a spec to a decoder. It knows the families' spellings; it reads no files.

A family here is a table of defaults (the reference's, for keys that a config leaves out) and a function for what
differs. Whatever changes the arithmetic and is not known raises ModelError: a model is right or refused.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tandem.errors import ModelError
from tandem.layers.feedforward import ACTIVATIONS
from tandem.layers.linear import LinearScheme, linear_scheme
from tandem.layers.rotary import RopeSpec, rope_from_config
from tandem.models.decoder import Decoder
from tandem.models.spec import MixtureSpec, ModelSpec

DTYPES = ("float32", "bfloat16", "float16")


def build(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, linear: LinearScheme | None = None, *,
    max_length: int | None = None,
) -> Decoder:  # fmt: skip
    """A decoder with uninitialised parameters. max_length cuts the rope tables; None: the model's own."""
    place = torch.device(device)
    if max_length is not None:
        spec = dataclasses.replace(spec, max_length=min(max_length, spec.max_length))
    return Decoder(spec, dtype, place, linear or linear_scheme(None, place)).requires_grad_(False)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read the content of config.json. Raises ModelError, naming what is missing or unsupported."""
    config = dict(config)
    multimodal = config.get("model_type") == "gemma3" and isinstance(config.get("text_config"), Mapping)
    if multimodal:
        inherited: dict[str, Any] = {
            key: config[key] for key in ("torch_dtype", "dtype", "quantization_config") if key in config
        }
        config = {**inherited, **config["text_config"], "model_type": "gemma3_text"}
    family = _family(config)
    reader = _Reader({**FAMILIES[family].defaults, **{k: v for k, v in config.items() if v is not None}}, family)
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "?")
        raise ModelError(f"the checkpoint is quantised ({method}), which is not supported.")
    numbers = {**_sizes(reader), **_ropes(reader), **FAMILIES[family].differences(reader)}
    spec = ModelSpec(family=family, multimodal=multimodal, dtype=_dtype(config), **numbers)
    _check(spec)
    return spec


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"model_type {family!r} is not supported.", hint=f"the families are: {', '.join(sorted(FAMILIES))}."
        )
    return str(family)


class _Reader:
    """A config whose missing keys are named in the error."""

    def __init__(self, values: dict[str, Any], family: str) -> None:
        self.values, self.family = values, family

    def __call__(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise ModelError(f"config.json has no {name!r}, which family {self.family!r} needs.")
        return self.values[name]

    def size(self, name: str) -> int:
        value = self(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{name} is {value!r}; it must be a positive integer.")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def _sizes(reader: _Reader) -> dict[str, Any]:
    num_heads, hidden_size = reader.size("num_attention_heads"), reader.size("hidden_size")
    head_dim = reader.size("head_dim") if reader.get("head_dim") else hidden_size // num_heads
    activation = reader.get("hidden_activation") or reader("hidden_act")
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"activation {activation!r} is not supported.", hint=f"the activations are: {', '.join(ACTIVATIONS)}."
        )
    return {
        "num_logits": reader.size("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": reader.size("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": reader.get("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "intermediate_size": reader.size("intermediate_size"),
        "norm_eps": float(reader("rms_norm_eps")),
        "tied": bool(reader.get("tie_word_embeddings", False)),
        "attention_scale": head_dim**-0.5,
        "activation": activation,
    }


def _ropes(reader: _Reader) -> dict[str, Any]:
    """The rope of full and of sliding layers, and the context length that follows."""
    block = {**reader.get("rope_parameters", {}), **reader.get("rope_scaling", {})}
    nested = {key: value for key, value in block.items() if key in ("full_attention", "sliding_attention")}
    flat = {key: value for key, value in block.items() if key not in nested}
    theta = float(reader.get("rope_theta", 10000.0))
    rope = _rope(reader, nested.get("full_attention", flat), theta)
    local = rope
    if "rope_local_base_freq" in reader.values:
        local = _rope(reader, nested.get("sliding_attention"), float(reader("rope_local_base_freq")))
    elif "sliding_attention" in nested:
        local = _rope(reader, nested["sliding_attention"], theta)
    # Gemma 3's max_position_embeddings counts its scaling already.
    scaled = "rope_local_base_freq" not in reader.values
    return {
        "rope": rope,
        "local_rope": local,
        "max_length": rope.context_length if scaled else reader.size("max_position_embeddings"),
    }


def _rope(reader: _Reader, block: Mapping[str, Any] | None, theta: float) -> RopeSpec:
    num_heads, hidden_size = reader.size("num_attention_heads"), reader.size("hidden_size")
    return rope_from_config(
        block,
        head_dim=reader.get("head_dim", hidden_size // num_heads),
        theta=theta,
        trained_length=reader.size("max_position_embeddings"),
        original_length=reader.get("original_max_position_embeddings"),
    )


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    name = str(name).removeprefix("torch.") if name is not None else None
    if name is not None and name not in DTYPES:
        raise ModelError(f"the dtype {name!r} is not supported.", hint=f"the dtypes are: {', '.join(DTYPES)}.")
    return name


def _check(spec: ModelSpec) -> None:
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"num_key_value_heads is {spec.num_kv_heads}; it must divide num_attention_heads, {spec.num_heads}."
        )
    if spec.head_dim % 2:
        raise ModelError(f"head_dim is {spec.head_dim}; rotary embedding needs an even one.")


def _windows(reader: _Reader, default: Callable[[int], bool], *, used: bool = True) -> dict[str, Any]:
    """Which layers slide: by layer_types where the config lists them, else by the family's rule."""
    window = reader.get("sliding_window") if used else None
    if window is None:
        return {"window": None, "sliding": frozenset()}
    num_layers = reader.size("num_hidden_layers")
    types = reader.get("layer_types")
    if types is None:
        sliding = frozenset(layer for layer in range(num_layers) if default(layer))
    else:
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown or len(types) != num_layers:
            raise ModelError(f"layer_types lists {len(types)} layers for {num_layers}, or unknown types {unknown}.")
        sliding = frozenset(layer for layer, name in enumerate(types) if name == "sliding_attention")
    return {"window": reader.size("sliding_window") if sliding else None, "sliding": sliding}


def _llama(reader: _Reader) -> dict[str, Any]:
    bias = bool(reader.get("attention_bias", False))
    return {"attention_bias": bias, "output_bias": bias, "mlp_bias": bool(reader.get("mlp_bias", False))}


def _mistral(reader: _Reader) -> dict[str, Any]:
    return _windows(reader, lambda layer: True)


def _qwen_windows(reader: _Reader) -> dict[str, Any]:
    first = reader.get("max_window_layers", 0)
    return _windows(reader, lambda layer: layer >= first, used=bool(reader.get("use_sliding_window", False)))


def _qwen2(reader: _Reader) -> dict[str, Any]:
    return {"attention_bias": True, **_qwen_windows(reader)}


def _qwen3(reader: _Reader) -> dict[str, Any]:
    bias = bool(reader.get("attention_bias", False))
    return {"attention_bias": bias, "output_bias": bias, "qk_norm": True, **_qwen_windows(reader)}


def _num_experts(reader: _Reader) -> int:
    """Two spellings, and transformers writes either for both families."""
    return reader.size("num_experts" if reader.get("num_experts") else "num_local_experts")


def _qwen3_moe(reader: _Reader) -> dict[str, Any]:
    step, dense = reader.get("decoder_sparse_step", 1), set(reader.get("mlp_only_layers", []))
    layers = range(reader.size("num_hidden_layers"))
    mixture = MixtureSpec(
        num_experts=_num_experts(reader),
        num_chosen=reader.size("num_experts_per_tok"),
        intermediate_size=reader.size("moe_intermediate_size"),
        normalise=bool(reader.get("norm_topk_prob", False)),
        layers=frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
    )
    return {**_qwen3(reader), "mixture": mixture}


def _mixtral(reader: _Reader) -> dict[str, Any]:
    mixture = MixtureSpec(
        num_experts=_num_experts(reader),
        num_chosen=reader.size("num_experts_per_tok"),
        intermediate_size=reader.size("intermediate_size"),
        normalise=True,
        layers=frozenset(range(reader.size("num_hidden_layers"))),
    )
    return {**_windows(reader, lambda layer: True), "mixture": mixture}


def _gemma(reader: _Reader) -> dict[str, Any]:
    if reader.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is set; only causal attention is supported.")
    bias, pattern = bool(reader.get("attention_bias", False)), reader.get("sliding_window_pattern")
    return {
        "attention_bias": bias,
        "output_bias": bias,
        "sandwich": True,
        "norm_offset": 1.0,
        "embedding_scale": float(reader.size("hidden_size")) ** 0.5,
        "attention_scale": float(reader("query_pre_attn_scalar")) ** -0.5,
        "score_softcap": reader.get("attn_logit_softcapping"),
        "logit_softcap": reader.get("final_logit_softcapping"),
        **_windows(reader, lambda layer: (layer + 1) % pattern != 0),
    }


def _gemma3(reader: _Reader) -> dict[str, Any]:
    return {**_gemma(reader), "qk_norm": True}


@dataclasses.dataclass(frozen=True, slots=True)
class _Family:
    differences: Callable[[_Reader], dict[str, Any]]
    defaults: dict[str, Any]


_DENSE = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
FAMILIES: dict[str, _Family] = {
    "llama": _Family(_llama, _DENSE),
    "mistral": _Family(_mistral, _DENSE),
    "qwen2": _Family(_qwen2, {**_DENSE, "max_window_layers": 28}),
    "qwen3": _Family(_qwen3, {**_DENSE, "head_dim": 128, "max_window_layers": 28}),
    "qwen3_moe": _Family(_qwen3_moe, {**_DENSE, "max_window_layers": 0}),
    "mixtral": _Family(_mixtral, {**_DENSE, "rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    "gemma2": _Family(
        _gemma,
        {**_GEMMA, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": _Family(
        _gemma3,
        {
            **_GEMMA, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "vocab_size": 262208, "max_position_embeddings": 131072,
        },
    ),
}  # fmt: skip
