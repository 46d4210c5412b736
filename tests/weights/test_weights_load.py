"""Loading: every parameter exactly once, or an error that names the tensor (C30)."""

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import LLAMA, RecordingModule, llama_tensors, write_folder
from safetensors.torch import save_file

from tandem.errors import WeightsError
from tandem.weights.load import load
from tandem.weights.source import ModelSource, locate

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def shapes_of(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_tensor_arrives_once_and_unchanged(tmp_path: Path, num_shards: int) -> None:
    tensors = llama_tensors()
    module, calls = RecordingModule(shapes_of(tensors)), []
    source = locate(str(write_folder(tmp_path, tensors, num_shards=num_shards)))
    report = load(module, source, on_progress=lambda done, total: calls.append((done, total)))
    for name, tensor in tensors.items():
        assert torch.equal(module.value(name), tensor)
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert report.num_tensors == len(tensors) and report.num_bytes == total and report.dtype == "F32"
    assert calls[-1] == (total, total) and [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_dtypes_arrive_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in llama_tensors().items()}
    module = RecordingModule(shapes_of(tensors))
    load(module, locate(str(write_folder(tmp_path, tensors))))
    assert all(torch.equal(module.value(name), tensor) for name, tensor in tensors.items())


def test_c30_tied_without_a_head(tmp_path: Path) -> None:
    tensors = llama_tensors(head=False)
    module = RecordingModule(shapes_of(tensors), tied=True)
    report = load(module, locate(str(write_folder(tmp_path, tensors))))
    assert not report.warnings and torch.equal(module.value(EMBEDDING), tensors[EMBEDDING])


def test_c30_tied_module_with_a_place_for_the_head_gets_the_embedding(tmp_path: Path) -> None:
    tensors = llama_tensors(head=False)
    module = RecordingModule({**shapes_of(tensors), HEAD: tensors[EMBEDDING].shape}, tied=True)
    load(module, locate(str(write_folder(tmp_path, tensors))))
    assert torch.equal(module.value(HEAD), tensors[EMBEDDING])


def test_c30_tied_with_another_head_warns_and_the_embedding_wins(tmp_path: Path, caplog) -> None:
    tensors = llama_tensors()
    inner = {name: shape for name, shape in shapes_of(tensors).items() if name != HEAD}
    module = RecordingModule(inner, tied=True)
    with caplog.at_level(logging.WARNING):
        report = load(module, locate(str(write_folder(tmp_path, tensors))))
    assert HEAD in report.warnings[0] and HEAD in caplog.text
    assert torch.equal(module.value(EMBEDDING), tensors[EMBEDDING])


def test_c30_tied_with_an_equal_head_is_silent(tmp_path: Path) -> None:
    tensors = llama_tensors(head=False)
    module = RecordingModule(shapes_of(tensors), tied=True)
    folder = write_folder(tmp_path, tensors | {HEAD: tensors[EMBEDDING].clone()})
    report = load(module, locate(str(folder)))
    assert report.warnings == () and report.ignored == (HEAD,)


def test_c30_untied_without_a_head_names_the_tensor(tmp_path: Path) -> None:
    module = RecordingModule(shapes_of(llama_tensors()))
    source = locate(str(write_folder(tmp_path, llama_tensors(head=False))))
    with pytest.raises(WeightsError, match=r"missing \(1\): lm_head.weight"):
        load(module, source)
    assert module.untouched()


def test_c30_index_naming_an_absent_shard(tmp_path: Path) -> None:
    tensors = llama_tensors()
    folder = write_folder(tmp_path, tensors, num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    module = RecordingModule(shapes_of(tensors))
    with pytest.raises(WeightsError, match=r"model-00002-of-00002\.safetensors"):
        load(module, locate(str(folder)))
    assert module.untouched()


def test_c30_index_naming_a_tensor_that_the_shard_lacks(tmp_path: Path) -> None:
    tensors = llama_tensors()
    folder = write_folder(tmp_path, tensors, num_shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = sorted(set(index["weight_map"].values()))
    index["weight_map"][EMBEDDING] = second if index["weight_map"][EMBEDDING] == first else first
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=EMBEDDING):
        load(RecordingModule(shapes_of(tensors)), locate(str(folder)))


def test_c30_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(WeightsError, match="no safetensors weights"):
        load(RecordingModule({}), locate(str(tmp_path)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"only pytorch_model\.bin"):
        load(RecordingModule({}), locate(str(tmp_path)))


def test_c30_incomplete_shards_without_an_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, llama_tensors(), num_shards=3)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match="only some shards"):
        load(RecordingModule({}), locate(str(folder)))


def test_c30_bin_beside_safetensors_is_not_touched(tmp_path: Path) -> None:
    tensors = llama_tensors()
    folder = write_folder(tmp_path, tensors)
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle at all")
    save_file({"other": torch.zeros(1)}, folder / "consolidated.safetensors")
    module = RecordingModule(shapes_of(tensors))
    assert load(module, locate(str(folder))).num_tensors == len(tensors)


def test_c30_stray_rotary_buffers_are_ignored_and_others_named(tmp_path: Path) -> None:
    tensors = llama_tensors()
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = write_folder(tmp_path, tensors | {rotary: torch.ones(8)})
    assert load(RecordingModule(shapes_of(tensors)), locate(str(folder))).ignored == (rotary,)
    stray = "model.layers.7.mlp.up_proj.weight"
    folder = write_folder(tmp_path, tensors | {stray: torch.ones(8)})
    with pytest.raises(WeightsError, match=rf"left over \(1\): {stray}"):
        load(RecordingModule(shapes_of(tensors)), locate(str(folder)))


def test_c30_ill_shaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = llama_tensors()
    module = RecordingModule(shapes_of(tensors) | {"model.norm.weight": (63,)})
    with pytest.raises(WeightsError, match=r"model.norm.weight is \[64\], not \[63\]"):
        load(module, locate(str(write_folder(tmp_path, tensors))))
    assert module.untouched()


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for part in (1, 2):
        save_file({"a": torch.ones(2)}, tmp_path / f"model-0000{part}-of-00002.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="'a' is in"):
        load(RecordingModule({"a": (2,)}), locate(str(tmp_path)))


def test_scaled_types_without_a_scale_are_refused(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    with pytest.raises(WeightsError, match="a is F8_E4M3"):
        load(RecordingModule({"a": (4, 4)}), locate(str(write_folder(tmp_path, tensors))))


@pytest.mark.parametrize(
    ("theirs", "plain"),
    [
        ("language_model.model.layers.0.w", "model.layers.0.w"),
        ("model.language_model.layers.0.w", "model.layers.0.w"),
    ],
)
def test_text_models_inside_multimodal_checkpoints(tmp_path: Path, theirs: str, plain: str) -> None:
    value = torch.randn(3, 3)
    folder = write_folder(tmp_path, {theirs: value, "vision_tower.w": torch.ones(1)})
    for name in (plain, theirs):  # the module may use either name
        module = RecordingModule({name: (3, 3)}, ignored=("vision_tower.w",))
        load(module, locate(str(folder)))
        assert torch.equal(module.value(name), value)


def test_checkpoints_of_the_bare_decoder(tmp_path: Path) -> None:
    tensors = llama_tensors(head=False)
    folder = write_folder(tmp_path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    module = RecordingModule(shapes_of(tensors), tied=True)
    load(module, locate(str(folder)))
    assert torch.equal(module.value("model.norm.weight"), tensors["model.norm.weight"])


@pytest.mark.parametrize("damage", ["truncated", "pointer", "header", "empty", "offsets"])
def test_damaged_safetensors(tmp_path: Path, damage: str) -> None:
    folder = write_folder(tmp_path, llama_tensors())
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"] = [0, 1]
    encoded = json.dumps(header).encode()
    path.write_bytes(
        {
            "truncated": raw[:-10],
            "pointer": b"version https://example/spec/v1\noid sha256:00\nsize 12\n",
            "header": raw[:8] + b"{" * length + raw[8 + length :],
            "empty": b"",
            "offsets": len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :],
        }[damage]
    )
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(RecordingModule({}), locate(str(folder)))


def test_random_weights_are_a_function_of_seed_and_name() -> None:
    shapes = {"model.layers.0.mlp.up_proj.weight": (64, 48), "model.norm.weight": (48,), "b": (64, 48)}
    source = ModelSource(name="x", kind="random")

    def values(order: list[str], seed: int) -> dict[str, torch.Tensor]:
        module = RecordingModule({name: shapes[name] for name in order})
        report = load(module, source, seed=seed)
        assert report.dtype == "random"
        return {name: module.value(name) for name in order}

    one, again = values(list(shapes), 1), values(list(reversed(shapes)), 1)
    assert all(torch.equal(one[name], again[name]) for name in shapes)
    assert not torch.equal(one["b"], values(["b"], 2)["b"]) and not torch.equal(one["b"], one[next(iter(shapes))])
    assert torch.equal(one["model.norm.weight"], torch.ones(48))
    assert abs(one["b"].std().item() - 0.02) < 0.002 and abs(one["b"].mean().item()) < 0.002


def test_random_weights_use_what_the_target_offers() -> None:
    module, seen = RecordingModule({"w": (2, 2)}), []
    module.places["w"].randomize = lambda generator, std: seen.append((generator.initial_seed(), std))
    module.places["w"].device = torch.device("cpu")
    load(module, ModelSource(name="x", kind="random"), seed=3)
    load(module, ModelSource(name="x", kind="random"), seed=4)
    assert seen[0][1] == 0.02 and seen[0][0] != seen[1][0] and not module.places["w"].written


_PEAK = r"""
import re, sys, torch
from pathlib import Path
from tandem.weights.load import load
from tandem.weights.source import locate
from types import SimpleNamespace

class Module:
    spec = SimpleNamespace(tied=False)
    def __init__(self):
        self.values = {f"w{i}": torch.zeros(2 << 20) for i in range(12)}
    def targets(self):
        return {n: SimpleNamespace(shape=(2 << 20,), write=v.copy_) for n, v in self.values.items()}
    def ignored(self, name):
        return False

def kibibytes(key):
    return int(re.search(key + r':\s+(\d+)', Path('/proc/self/status').read_text())[1])

source = locate(sys.argv[1])
torch.zeros(1).copy_(torch.ones(1, dtype=torch.bfloat16))
before = kibibytes('VmRSS')
load(module := Module(), source)
assert all(v[-1] == i for i, v in enumerate(module.values.values()))
print(kibibytes('VmHWM') - before)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_stays_under_1_3_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """96 MiB of parameters; the mapped file counts as long as its pages are resident."""
    tensors = {f"w{i}": torch.full((2 << 20,), float(i), dtype=dtype) for i in range(12)}
    write_folder(tmp_path, tensors)
    out = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert 96 * 0.9 < int(out) / 1024 < 96 * 1.3


def test_random_source_of_a_folder_writes_no_stored_tensor(tmp_path: Path) -> None:
    tensors = llama_tensors()
    folder = write_folder(tmp_path, tensors)
    module = RecordingModule(shapes_of(tensors))
    source = locate(str(folder), load_format="random")
    assert source == dataclasses.replace(locate(str(folder)), kind="random")
    load(module, source)
    assert not torch.equal(module.value(EMBEDDING), tensors[EMBEDDING])
