"""Small checkpoints for the tests of the weights room, and a module that records what is written into it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


class RecordingTarget:
    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape, self.written = name, shape, []

    def write(self, tensor: Tensor) -> None:
        assert tuple(tensor.shape) == self.shape
        self.written.append(tensor.clone())


class RecordingModule:
    """Targets of given shapes; value() says what each was written, and that it was written exactly once."""

    def __init__(self, shapes: Mapping[str, Iterable[int]], *, tied: bool = False, ignored: tuple[str, ...] = ()):
        self.places = {name: RecordingTarget(name, tuple(shape)) for name, shape in shapes.items()}
        self.spec, self.not_wanted = SimpleNamespace(tied=tied), ignored

    def targets(self) -> dict[str, RecordingTarget]:
        return dict(self.places)

    def ignored(self, name: str) -> bool:
        return name.endswith(self.not_wanted) if self.not_wanted else False

    def value(self, name: str) -> Tensor:
        assert len(self.places[name].written) == 1, f"{name} written {len(self.places[name].written)} times"
        return self.places[name].written[0]

    def untouched(self) -> bool:
        return not any(place.written for place in self.places.values())


def llama_tensors(config: Mapping[str, Any] = LLAMA, *, seed: int = 0, head: bool = True) -> dict[str, Tensor]:
    """A random Llama checkpoint under its Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries), "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            }.items()
        }  # fmt: skip
    shapes["model.norm.weight"] = (hidden,)
    if head:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = LLAMA, *, num_shards: int = 1
) -> Path:
    """A Hugging Face folder, sharded with an index when num_shards is above 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    own = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if num_shards == 1:
        save_file(own, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(own.items()) if i % num_shards == shard}
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
