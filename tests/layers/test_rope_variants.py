"""Rope settings in every spelling against transformers' cosines and sines; what is unknown or incomplete is named."""

from typing import Any

import pytest
import torch

from tandem.errors import ModelError
from tandem.layers.rotary import cos_sin_table
from tandem.models.registry import spec_from_config

BASE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({}, 2048),
    "null": ({"rope_scaling": None, "rope_theta": 500000.0}, 2048),
    "default": ({"rope_scaling": {"rope_type": "default"}}, 2048),
    "llama3": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500000.0}, 2048),
    "linear by the older key": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 4096),
    "both keys": ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}}, 4096),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
    "yarn": ({"rope_scaling": YARN}, 4096),
    "yarn, own numbers": ({"rope_scaling": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}}, 4096),
    "yarn, magnitude given": ({"rope_scaling": {**YARN, "attention_factor": 1.5}}, 4096),
    "yarn, two magnitudes": ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}, 4096),
    "newer block": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}}, 4096),
    "newer block, llama3": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}}, 2048),
}  # fmt: skip


def reference_cos_sin(config: dict[str, Any], position: int) -> torch.Tensor:
    """transformers' table row of one position, its halves as ours."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = {key: value for key, value in config.items() if key != "model_type" and value is not None}
    rotary = LlamaRotaryEmbedding(LlamaConfig(**values))
    cos, sin = rotary(torch.zeros(1), torch.tensor([[position]]))
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, 0, :half], sin[0, 0, :half]))


@pytest.mark.parametrize("name", VARIANTS)
def test_c29_rope_settings_match_the_reference(name: str) -> None:
    changes, length = VARIANTS[name]
    config = {**BASE, **changes}
    spec = spec_from_config(config)
    assert spec.max_length == length
    table_LD = cos_sin_table(spec.rope, length, torch.device("cpu"))
    assert table_LD.shape == (length, 32)
    for position in {0, 1, 511, 513, 1023, 1025, 2047, min(2049, length - 1), length - 1}:
        expected = reference_cos_sin(config, position)
        torch.testing.assert_close(table_LD[position], expected, atol=1e-5, rtol=0, msg=f"{name} at {position}")


def test_c29_yarn_scales_the_magnitude() -> None:
    spec = spec_from_config({**BASE, "rope_scaling": YARN})
    assert cos_sin_table(spec.rope, 1, torch.device("cpu"))[0, 0] == pytest.approx(1.1386294, abs=1e-6)


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "spiral"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "longrope"),
        ({"type": "linear"}, "'factor'"),
        ({"type": "dynamic"}, "'factor'"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "'low_freq_factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "'high_freq_factor'"),
        ({"rope_type": "linear", "factor": "two"}, "'two'"),
        ({"rope_type": "linear", "factor": 0.5}, "0.5"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_c29_unknown_or_incomplete_settings_are_named(key: str, block: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        spec_from_config({**BASE, key: block})


def test_c29_nested_blocks_go_to_their_layers() -> None:
    config = {
        **BASE, "model_type": "gemma3_text", "num_hidden_layers": 2, "head_dim": 32, "sliding_window": 8,
        "sliding_window_pattern": 2,
    }  # fmt: skip
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    newer = spec_from_config({**config, "rope_parameters": nested})
    linear = {"rope_type": "linear", "factor": 8.0}
    older = spec_from_config({**config, "rope_scaling": linear, "rope_theta": 2e6, "rope_local_base_freq": 3e4})
    for spec in (newer, older):
        assert (spec.rope_of(1).kind, spec.rope_of(1).theta, spec.rope_of(1).factor) == ("linear", 2e6, 8.0)
        assert (spec.rope_of(0).kind, spec.rope_of(0).theta) == ("default", 3e4)
        assert spec.max_length == 2048
