"""Safetensors files and folders as stored tensors. It knows indexes and headers, not models; torch only when read.

A file is an 8-byte little-endian length, a JSON header with each tensor's type, shape and byte range, then the bytes.
Read through an own map instead of the safetensors package, so that pages can be given back tensor by tensor.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import WeightsError
from tandem.weights.mapped import MappedFile
from tandem.weights.stored import Stored

if TYPE_CHECKING:
    from torch import Tensor

# File's word: (torch's word, bytes an element).
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "I64": ("int64", 8), "I32": ("int32", 4),
    "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors package's own limit


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. WeightsError when it cannot be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise WeightsError(f"{path} is no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds a JSON {type(value).__name__}; an object is needed.")
    return value


def folder_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files that make up the checkpoint, each with the tensors to take from it (None: all of them).

    An index decides, else model.safetensors, else the complete set model-00001-of-N, else a file that is alone.
    Raises WeightsError, naming the file, before anything is loaded: a shard is missing, or there are no weights.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": None}
    files = sorted(folder.glob("*.safetensors"))
    parts = {path: match for path in files if (match := re.fullmatch(r".*-(\d+)-of-(\d+)\.safetensors", path.name))}
    if parts:
        wanted = {int(match[2]) for match in parts.values()}
        if len(wanted) == 1 and len(parts) == wanted.pop():
            return dict.fromkeys(parts)
        names = ", ".join(path.name for path in parts)
        raise WeightsError(f"{folder} has only some shards and no {INDEX}: {names}.", hint="fetch the model again.")
    if len(files) == 1:
        return {files[0]: None}
    if files:
        names = ", ".join(path.name for path in files)
        raise WeightsError(f"{folder} has several safetensors files and no {INDEX}: {names}.")
    pickled = next(folder.glob("*.bin"), None) or next(folder.glob("*.pth"), None)
    raise WeightsError(
        f"{folder} has no safetensors weights" + (f", only {pickled.name}." if pickled else "."),
        hint="pickled checkpoints are not read, as they can run code; save the model as safetensors."
        if pickled
        else "fetch the model again, or use --load-format random for random weights.",
    )


def _indexed(folder: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{folder / INDEX} has no weight_map.")
    files: dict[Path, set[str] | None] = {}
    taken: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise WeightsError(f"{folder / INDEX} puts {name!r} into {file_name!r}, which is no file of the folder.")
        taken.setdefault(file_name, set()).add(name)
    for file_name, names in taken.items():
        if not (folder / file_name).is_file():
            raise WeightsError(
                f"the shard {file_name} that {INDEX} names is not in {folder}; {len(names)} tensors are in it.",
                hint="fetch the model again.",
            )
        files[folder / file_name] = names
    return files


def folder_stored(folder: Path) -> list[Stored]:
    """Every tensor of the checkpoint in the folder, headers checked, nothing loaded."""
    found: dict[str, Path] = {}
    stored = []
    for path, wanted in folder_files(folder).items():
        here = {tensor.name: tensor for tensor in file_stored(path)}
        if wanted is not None and (absent := sorted(wanted - here.keys())):
            raise WeightsError(f"{path} lacks {absent[0]!r}, which {INDEX} puts there ({len(absent)} absent).")
        for name, tensor in here.items():
            if wanted is not None and name not in wanted:
                continue
            if name in found:
                raise WeightsError(f"the tensor {name!r} is in {found[name].name} and in {path.name}.")
            found[name] = path
            stored.append(tensor)
    return stored


def file_stored(path: Path) -> list[Stored]:
    """Every tensor of one safetensors file, in file order. Raises WeightsError for a damaged or truncated file."""
    file = MappedFile(path)
    length = int.from_bytes(file.view[:8], "little")
    if file.num_bytes < 8 or length > min(file.num_bytes - 8, _MAX_HEADER_BYTES):
        raise WeightsError(
            f"{path}: the header claims {length} bytes; the file has {file.num_bytes}.",
            hint="the file is truncated or no safetensors file (a git-lfs pointer?); fetch it again.",
        )
    try:
        header = json.loads(file.view[8 : 8 + length].decode())
        entries = [(name, *_entry(value)) for name, value in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(f"{path}: the header is damaged ({error}).", hint="fetch the file again.") from error
    entries.sort(key=lambda entry: entry[3])
    return [_stored(file, 8 + length, *entry) for entry in entries]


def _entry(value: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    start, stop = value["data_offsets"]
    return str(value["dtype"]), tuple(int(size) for size in value["shape"]), int(start), int(stop)


def _stored(
    file: MappedFile, data: int, name: str, dtype: str, shape: tuple[int, ...], start: int, stop: int
) -> Stored:
    if dtype not in DTYPES:
        raise WeightsError(f"{file.path}: the tensor {name!r} has the type {dtype}, which is not known.")
    word, size = DTYPES[dtype]
    if min((0, start, *shape)) < 0 or stop - start != math.prod(shape) * size:
        raise WeightsError(f"{file.path}: the tensor {name!r} claims {stop - start} bytes for {dtype} {list(shape)}.")
    if data + stop > file.num_bytes:
        raise WeightsError(
            f"{file.path}: the tensor {name!r} ends at byte {data + stop}, the file at {file.num_bytes}.",
            hint="the file is truncated; fetch it again.",
        )
    first, count = data + start, stop - start

    def read() -> "Tensor":
        import torch

        raw = file.tensor(first, count)
        # torch views need alignment to the element's size, which the format does not promise.
        return (raw if first % size == 0 else raw.clone()).view(getattr(torch, word)).view(shape)

    return Stored(name, shape, dtype, count, read, lambda: file.forget(first, count))
