"""Finding a model: folders, files, shapes, the hub; what each says of tokens, templates and ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import LLAMA, llama_tensors, write_folder
from gguf_files import SPECIALS, TEMPLATE, byte_level_tokenizer, with_bos, write_gguf
from tokenizers import pre_tokenizers

from tandem.errors import DownloadError, WeightsError
from tandem.weights import pull as pulling
from tandem.weights.source import locate

DIGITS = [pre_tokenizers.Digits(individual_digits=True)]


def chat_folder(folder: Path, **generation) -> Path:
    write_folder(folder, llama_tensors(), LLAMA | {"eos_token_id": 9})
    with_bos(byte_level_tokenizer(DIGITS, use_regex=True), SPECIALS[1]).save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "<pad>",
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_folder_says_everything(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "chat", eos_token_id=[5, 2, 7], temperature=0.6)
    source = locate(str(folder))
    assert (source.name, source.path, source.kind) == ("chat", folder, "folder")
    assert source.config == LLAMA | {"eos_token_id": 9}
    assert source.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert (source.bos_token, source.eos_token, source.pad_token) == ("<|im_start|>", "<|im_end|>", "<pad>")
    assert (source.bos_id, source.eos_id, source.pad_id, source.add_bos) == (1, 2, 3, True)
    assert source.eos_ids == (2, 5, 7)  # the tokenizer's own first, then generation_config's; config.json's is older
    assert source.generation_defaults == {"eos_token_id": [5, 2, 7], "temperature": 0.6}
    assert source.chat_template == TEMPLATE


def test_folder_without_generation_config_ends_as_config_says(tmp_path: Path) -> None:
    assert locate(str(chat_folder(tmp_path))).eos_ids == (2, 9)


def test_template_in_a_file_of_its_own_wins(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert locate(str(folder)).chat_template == "{{ messages }}"


def test_folder_without_a_tokenizer_serves_ids(tmp_path: Path) -> None:
    source = locate(str(write_folder(tmp_path, llama_tensors(), LLAMA | {"eos_token_id": [4, 5], "bos_token_id": 3})))
    assert source.tokenizer_json is None and source.eos_ids == (4, 5) and source.bos_id == 3 and not source.add_bos


@pytest.mark.parametrize("as_file", [True, False])
def test_another_tokenizer(tmp_path: Path, as_file: bool) -> None:
    chat = chat_folder(tmp_path / "chat")
    plain = write_folder(tmp_path / "plain", llama_tensors())
    source = locate(str(plain), tokenizer=str(chat / "tokenizer.json" if as_file else chat))
    assert source.path == plain and source.eos_ids[0] == 2 and source.chat_template == TEMPLATE
    with pytest.raises(WeightsError, match="no tokenizer"):
        locate(str(plain), tokenizer=str(plain))


def test_random_from_config_folder_or_shape(tmp_path: Path) -> None:
    path = tmp_path / "shape" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    named = {"tiny": LLAMA | {"eos_token_id": 4}}.get
    for model in (path, path.parent):
        source = locate(str(model), load_format="random", named_config=named)
        assert source.kind == "random" and source.config == LLAMA and source.name == "shape"
    source = locate("tiny", load_format="random", named_config=named)
    assert (source.name, source.path, source.kind, source.eos_ids) == ("tiny", None, "random", (4,))
    gguf = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA)
    assert locate(str(gguf), load_format="random").kind == "random"


def test_shape_names_need_random_weights(tmp_path: Path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(pulling, "pull", lambda model, **more: asked.append(model) or tmp_path)
    with pytest.raises(WeightsError):
        locate("tiny", named_config={"tiny": LLAMA}.get)
    assert asked == ["tiny"]


def test_gguf_by_file_and_by_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", llama_tensors(), LLAMA)
    for model in (path, tmp_path):
        source = locate(str(model))
        assert (source.name, source.path, source.kind) == ("small", path, "gguf")
    write_gguf(tmp_path / "other.gguf", llama_tensors(), LLAMA)
    with pytest.raises(WeightsError, match=r"2 \.gguf files: other\.gguf, small\.gguf"):
        locate(str(tmp_path))


def test_hub_ids_are_pulled_without_weights_for_random(tmp_path: Path, monkeypatch) -> None:
    asked = []

    def pull(model, **more):
        asked.append((model, more["weights"]))
        return chat_folder(tmp_path)

    monkeypatch.setattr(pulling, "pull", pull)
    assert locate("owner/model").name == "owner/model"
    assert locate("owner/model", load_format="random").kind == "random"
    assert asked == [("owner/model", True), ("owner/model", False)]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "no file or folder"), ("/nowhere/at/all", "no file or folder"), ("a/b/c", "no file or folder"),
        ("model.gguf", "no file model.gguf"), ("two words", "no file or folder"),
    ],
)  # fmt: skip
def test_what_is_not_there(model: str, words: str, monkeypatch) -> None:
    monkeypatch.setattr(pulling, "pull", lambda *a, **k: pytest.fail("asked the network"))
    with pytest.raises(WeightsError, match=words):
        locate(model)


def test_load_format_is_held(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", llama_tensors())
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA)
    assert locate(str(folder), load_format="safetensors").kind == "folder"
    assert locate(str(path), load_format="gguf").kind == "gguf"
    for model, load_format in ((folder, "gguf"), (path, "safetensors"), (path, "pickle")):
        with pytest.raises(WeightsError):
            locate(str(model), load_format=load_format)


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_broken_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(WeightsError, match=r"config\.json"):
        locate(str(tmp_path))


def test_without_network_the_error_says_what_was_tried(monkeypatch, tmp_path: Path) -> None:
    import huggingface_hub

    def fail(*args, **more):
        raise ConnectionError("no route to https://user:secret@host/x")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadError, match=r"'owner/model' could not be fetched from the hub.*no route") as caught:
        locate("owner/model")
    assert "secret" not in str(caught.value)


def test_finding_a_model_loads_no_torch() -> None:
    code = "import sys, tandem.weights.source; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
