"""Where a model comes from and what it says of itself. It knows folders, GGUF files and the hub, not tensors."""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.errors import WeightsError
from tandem.weights import pull as pulling
from tandem.weights.gguf import GGUF, read_gguf
from tandem.weights.gguf_config import gguf_config
from tandem.weights.gguf_tokenizer import adds_bos, bos_id, gguf_tokenizer
from tandem.weights.shards import read_json

LOAD_FORMATS = ("auto", "safetensors", "gguf", "random")
# Tokens that end a turn of a chat; older GGUF files name only the end of the text.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_CONTROL = 3


@dataclass(frozen=True)
class TextSide:
    """What a front end needs to turn text into ids and back.

    tokenizer_json  ready for tokenizers.Tokenizer.from_str, or None: then only ids can be served. Its post-processor
                    adds BOS where the model wants it: encode(..., add_special_tokens=True) for plain prompts, False
                    for rendered chat templates, which write their special tokens themselves.
    add_bos         whether that post-processor does.
    eos_ids         all ids that end an answer, the tokenizer's own first.
    """

    tokenizer_json: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    add_bos: bool = False
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None


@dataclass(frozen=True)
class ModelSource(TextSide):
    """A model before its weights are loaded.

    name                 to show: the hub id, the folder's or the file's name.
    path                 the folder, the .gguf file, or (random) the config file; None for a built-in shape.
    kind                 "folder", "gguf" or "random".
    config               in the words of a Hugging Face config.json.
    generation_defaults  generation_config.json, or {}.
    quantization         the quantization_config, taken out of config: load() presents dense tensors to the model.
    """

    name: str = ""
    path: Path | None = None
    kind: str = "folder"
    config: dict[str, Any] = field(default_factory=dict)
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] | None = None


def locate(
    model: str | None,
    *,
    load_format: str = "auto",
    tokenizer: str | None = None,
    named_config: Callable[[str], dict[str, Any] | None] | None = None,
    on_progress: pulling.Progress | None = None,
) -> ModelSource:
    """Find a model and read everything but its weights; fetch it first if it is not on this machine.

    model         None (the embedded model), a folder, a .gguf file, a hub id, owner/name/file.gguf on the hub; with
                  load_format "random" also a config.json or the name of a built-in shape.
    tokenizer     a folder, tokenizer.json or .gguf file to use instead of the model's own.
    named_config  gives the config of a built-in shape, or None.
    Raises WeightsError for what is broken or missing, DownloadError for what could not be fetched.
    """
    if load_format not in LOAD_FORMATS:
        raise WeightsError(f"load_format is {load_format!r}; it must be one of {', '.join(LOAD_FORMATS)}.")
    random = load_format == "random"
    source = _shape(model, named_config) if random and model is not None else None
    if source is None:
        source = _read(_path(model, weights=not random, on_progress=on_progress), model, random)
    if load_format == "gguf" and source.kind != "gguf":
        raise WeightsError(f"{source.path} is no GGUF file.", hint="use --load-format auto.")
    if load_format == "safetensors" and source.kind != "folder":
        raise WeightsError(f"{source.path} is no folder with safetensors.", hint="use --load-format auto.")
    if tokenizer is not None:
        text = read_text_side(Path(tokenizer).expanduser(), source.config, source.generation_defaults)
        source = dataclasses.replace(source, **vars(text))
    return source


def _shape(model: str, named_config: Callable[[str], dict[str, Any] | None] | None) -> ModelSource | None:
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return ModelSource(name=path.parent.name or path.stem, path=path, kind="random", config=read_json(path))
    config = named_config(model) if named_config and not path.exists() else None
    if config is None:
        return None
    return ModelSource(name=model, kind="random", config=config, eos_ids=_ids(config.get("eos_token_id")))


def _path(model: str | None, *, weights: bool, on_progress: pulling.Progress | None) -> Path:
    if model is None:
        return pulling.pull(None, on_progress=on_progress)
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+){0,1}(/.+\.gguf)?", model):
        raise WeightsError(
            f"there is no file or folder {model}.", hint="give a folder, a .gguf file or a hub id such as owner/name."
        )
    if model.endswith(".gguf") and model.count("/") < 2:
        raise WeightsError(f"there is no file {model}.", hint="on the hub, name it as owner/name/file.gguf.")
    return pulling.pull(model, weights=weights, on_progress=on_progress)


def _read(path: Path, model: str | None, random: bool) -> ModelSource:
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            found = f"{len(files)} .gguf files: {', '.join(f.name for f in files)}" if files else "no .gguf file"
            raise WeightsError(f"{path} has no config.json and {found}.", hint="name the one file to use.")
        path = files[0]
    local = model is None or Path(model).expanduser().exists()
    name = (path.name if path.is_dir() else path.stem) if local else str(model)
    if model is None:
        name = pulling.EMBEDDED_NAME
    if path.is_file():
        gguf = read_gguf(path)
        kind = "random" if random else "gguf"
        return ModelSource(name=name, path=path, kind=kind, config=gguf_config(gguf), **vars(_gguf_text(gguf)))
    config, quantization = _quantization(path, read_json(path / "config.json"))
    defaults = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    text = _folder_text(path, config, defaults)
    kind = "random" if random else "folder"
    return ModelSource(
        name=name,
        path=path,
        kind=kind,
        config=config,
        generation_defaults=defaults,
        quantization=quantization,
        **vars(text),
    )


def _quantization(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The config without its quantisation, and that; older GPTQ folders keep it in a file of its own."""
    inner = config.get("text_config")
    found = config.get("quantization_config") or (inner or {}).get("quantization_config")
    if not found and (folder / "quantize_config.json").is_file():
        found = {"quant_method": "gptq"} | read_json(folder / "quantize_config.json")
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(inner, dict):
        config["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
    return config, found or None


def read_text_side(path: Path, config: dict[str, Any], defaults: dict[str, Any]) -> TextSide:
    """Tokenizer and template from a folder, a tokenizer.json or a .gguf file. Raises WeightsError if there is none."""
    if path.is_file() and path.suffix == ".gguf":
        return _gguf_text(read_gguf(path))
    folder = path.parent if path.is_file() else path
    text = _folder_text(folder, config, defaults)
    if text.tokenizer_json is None:
        raise WeightsError(f"{path} holds no tokenizer.json.", hint="name a folder, a tokenizer.json or a .gguf file.")
    return text


def _gguf_text(gguf: GGUF) -> TextSide:
    metadata = gguf.metadata
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom", "padding")}
    ids["bos"] = bos_id(gguf)
    for key, token_id in ids.items():
        if token_id is not None and not 0 <= token_id < max(len(tokens), 1):
            raise WeightsError(f"{gguf.path}: the {key} token is {token_id}; there are {len(tokens)} tokens.")
    ends = [ids["eos"], ids["eot"], ids["eom"]]
    ends += [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _TURN_ENDS]
    template = metadata.get("tokenizer.chat_template")

    def token(key: str) -> str | None:
        token_id = ids[key]
        return tokens[token_id] if token_id is not None and tokens else None

    return TextSide(
        tokenizer_json=gguf_tokenizer(gguf),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        bos_token=token("bos"),
        eos_token=token("eos"),
        pad_token=token("padding"),
        add_bos=adds_bos(gguf),
        eos_ids=_ids(ends),
        chat_template=template if isinstance(template, str) else None,
    )


def _folder_text(folder: Path, config: dict[str, Any], defaults: dict[str, Any]) -> TextSide:
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    named = {key: _content(settings.get(f"{key}_token")) for key in ("bos", "eos", "pad")}
    tokenizer = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else None
    found: dict[str, int | None] = dict.fromkeys(named)
    if tokenizer is not None:
        known = _token_ids(tokenizer, {content for content in named.values() if content})
        found = {key: known.get(content or "") for key, content in named.items()}
    for key in named:
        first = _ids(defaults.get(f"{key}_token_id", config.get(f"{key}_token_id")))
        if found[key] is None and first:
            found[key] = first[0]
    ends = [found["eos"], *_ids(defaults.get("eos_token_id", config.get("eos_token_id")))]
    return TextSide(
        tokenizer_json=None if tokenizer is None else (folder / "tokenizer.json").read_text(encoding="utf-8"),
        bos_id=found["bos"],
        eos_id=found["eos"],
        pad_id=found["pad"],
        bos_token=named["bos"],
        eos_token=named["eos"],
        pad_token=named["pad"],
        add_bos=tokenizer is not None and _adds(tokenizer, named["bos"]),
        eos_ids=_ids(ends),
        chat_template=_template(folder, settings),
    )


def _content(token: Any) -> str | None:
    """tokenizer_config.json writes a token as text or as an object with its content."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _token_ids(tokenizer: dict[str, Any], wanted: set[str]) -> dict[str, int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # unigram models list [token, score]
        vocabulary = {entry[0]: i for i, entry in enumerate(vocabulary) if entry[0] in wanted}
    ids = {token: vocabulary[token] for token in wanted if token in vocabulary}
    added = tokenizer.get("added_tokens") or []
    return ids | {entry["content"]: entry["id"] for entry in added if entry["content"] in wanted}


def _adds(tokenizer: dict[str, Any], bos: str | None) -> bool:
    processor = tokenizer.get("post_processor")
    return bos is not None and processor is not None and json.dumps(bos) in json.dumps(processor)


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json (of several, the one named default)."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if (folder / "chat_template.json").is_file():
        template = read_json(folder / "chat_template.json").get("chat_template", template)
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids with gaps, or None, as distinct ids in their order."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(v for v in values if isinstance(v, int) and not isinstance(v, bool)))
