"""GGUF metadata and names in Hugging Face words: configs, rope scalings (C32), Gemma's norms, experts."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import LLAMA, RecordingModule, llama_tensors
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_files import gguf_name, permute, write_gguf

from tandem.errors import WeightsError
from tandem.weights.gguf import read_gguf
from tandem.weights.gguf_config import gguf_config, llama3_factors
from tandem.weights.gguf_tensors import gguf_stored
from tandem.weights.load import load
from tandem.weights.source import locate


@pytest.mark.parametrize(
    ("factor", "low", "high", "original", "theta", "head_dim"),
    [
        (8.0, 1.0, 4.0, 8192, 500000.0, 128), (32.0, 1.0, 4.0, 8192, 500000.0, 64), (8.0, 1.0, 4.0, 8192, 5e5, 16),
        (16.0, 1.0, 8.0, 4096, 10000.0, 128), (8.0, 2.0, 8.0, 16384, 500000.0, 64),
    ],
)  # fmt: skip
def test_c32_rope_freqs_become_the_configs_scaling(tmp_path, factor, low, high, original, theta, head_dim) -> None:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config = LLAMA | {"rope_scaling": scaling, "rope_theta": theta, "head_dim": head_dim}
    tensors = llama_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", tensors, config)
    found = locate(str(path)).config["rope_scaling"]
    if low == 1.0:
        assert found == pytest.approx(scaling)
    np.testing.assert_allclose(
        llama3_factors(theta, head_dim, found), llama3_factors(theta, head_dim, scaling), rtol=1e-3
    )
    load(RecordingModule({name: tuple(t.shape) for name, t in tensors.items()}), locate(str(path)))


def test_c32_rope_freqs_of_no_known_scaling_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("gguf_files.llama3_freqs", lambda config: np.array([1, 9, 2, 7, 3, 5, 4, 6], np.float32))
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA | {"rope_scaling": {"rope_type": "llama3"}})
    with pytest.raises(WeightsError, match="rope_freqs are no llama3 scaling"):
        locate(str(path))


def test_config_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA, architecture="rwkv6")
    with pytest.raises(WeightsError, match="'rwkv6'"):
        locate(str(path))


def test_config_equals_what_was_written(tmp_path: Path) -> None:
    config = locate(str(write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA))).config
    assert {key: config[key] for key in LLAMA} == LLAMA


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4}),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
             "llama.rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
        ),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)  # fmt: skip
def test_rope_scaling_of_the_metadata(tmp_path: Path, extra, wanted) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA, extra=extra)
    assert locate(str(path)).config["rope_scaling"] == wanted


def test_gemma3_names_norms_and_config(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gemma3")
    numbers = {
        "context_length": 512, "embedding_length": 8, "block_count": 7, "feed_forward_length": 16,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 4,
        "attention.sliding_window": 64,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"gemma3.{key}", value)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("gemma3.rope.freq_base", 1e6)
    norms = ["attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"]
    writer.add_tensor("token_embd.weight", np.ones((5, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.full(8, 1.5, np.float32))
    for name in norms:
        writer.add_tensor(f"blk.0.{name}.weight", np.full(8, 3.0, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parsed = read_gguf(tmp_path / "g.gguf")
    config = gguf_config(parsed)
    assert config["model_type"] == "gemma3_text" and config["rope_local_base_freq"] == 10000.0
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config["sliding_window"] == 64 and config["query_pre_attn_scalar"] == 4 and config["head_dim"] == 4
    found = {stored.name: stored.read() for stored in gguf_stored(parsed)}
    layer = "model.layers.0"
    assert set(found) == {
        "model.embed_tokens.weight", "model.norm.weight", f"{layer}.input_layernorm.weight",
        f"{layer}.pre_feedforward_layernorm.weight", f"{layer}.post_attention_layernorm.weight",
        f"{layer}.post_feedforward_layernorm.weight", f"{layer}.self_attn.q_norm.weight",
        f"{layer}.self_attn.k_norm.weight",
    }  # fmt: skip
    assert torch.equal(found["model.norm.weight"], torch.full((8,), 0.5))
    assert torch.equal(found[f"{layer}.self_attn.k_norm.weight"], torch.full((8,), 2.0))
    assert torch.equal(found["model.embed_tokens.weight"], torch.ones(5, 8))


@pytest.mark.parametrize(
    ("architecture", "extra", "model_type", "expert"),
    [
        ("qwen3moe", {"expert_feed_forward_length": 32}, "qwen3_moe", "mlp.experts.{}.down_proj"),
        ("llama", {}, "mixtral", "block_sparse_moe.experts.{}.w2"),
    ],
)
def test_experts_come_one_by_one(tmp_path: Path, architecture: str, extra, model_type: str, expert: str) -> None:
    values = np.random.default_rng(0).normal(size=(3, 8, 32)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    numbers = {
        "context_length": 64, "embedding_length": 8, "block_count": 1, "feed_forward_length": 32,
        "attention.head_count": 2, "expert_count": 3, "expert_used_count": 2,
    }  # fmt: skip
    for key, value in {**numbers, **extra}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("token_embd.weight", np.ones((5, 8), np.float32))
    raw = quantize(values, Kind.Q8_0)
    writer.add_tensor("blk.0.ffn_down_exps.weight", raw, raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parsed = read_gguf(tmp_path / "m.gguf")
    config = gguf_config(parsed)
    assert config["model_type"] == model_type and config["num_experts_per_tok"] == 2
    found = {stored.name: stored for stored in gguf_stored(parsed)}
    for i in range(3):
        stored = found[f"model.layers.0.{expert.format(i)}.weight"]
        assert stored.shape == (8, 32)
        np.testing.assert_allclose(stored.read().numpy(), dequantize(raw, Kind.Q8_0)[i], rtol=1e-6)


def test_permutation_of_the_converter_is_undone_by_hand() -> None:
    """Two heads of size 4: rows 0 1 2 3 pair as (0, 2), (1, 3); GGUF stores 0 2 1 3."""
    assert permute(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf_name("model.layers.3.self_attn.k_proj.weight") == "blk.3.attn_k.weight"
