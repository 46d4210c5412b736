"""The header of a GGUF file: metadata and the index of tensors. It knows the container, not models or tokenizers.

Layout (GGUF 2 and 3, little-endian): magic, version, counts, key/value pairs, tensor infos, padding, tensor data.
Every count and length is checked against the bytes that are left before anything is made of it.
Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import WeightsError
from tandem.weights.mapped import MappedFile

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
# Type number: (name, elements a block, bytes a block). Types beyond these are looked up in the gguf package.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file. Shape is outermost first, as in torch; start is the byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GGUF:
    """A parsed header. `metadata` holds Python values; `tensors` is in file order."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    file: MappedFile

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        """A string that must be there; WeightsError otherwise."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise WeightsError(f"{self.path}: the GGUF metadata has no text under {key!r}.")
        return value


class _Cursor:
    """Reads forward through the mapped file and refuses to step over its end."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.at = file, 0

    @property
    def left(self) -> int:
        return self.file.num_bytes - self.at

    def unpack(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        self.need(size, "a header field")
        values = struct.unpack_from(form, self.file.view, self.at)
        self.at += size
        return values

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        self.need(length, "a string")
        raw = self.file.view[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", errors="replace")

    def _strings(self, count: int) -> list[str]:
        """The same as string() a count of times, without its calls: vocabularies have 100,000s of entries."""
        view, at, end, texts = self.file.view, self.at, self.file.num_bytes, []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(view[at:start], "little")
            if at > end:
                self.at = start
                self.need(at - start, "a string")
            texts.append(view[start:at].decode("utf-8", errors="replace"))
        self.at = at
        return texts

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.left:
            raise WeightsError(
                f"{self.file.path}: {what} at byte {self.at} claims {num_bytes} bytes, and {self.left} are left.",
                hint="the file is truncated or damaged; fetch it again.",
            )

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind in _SCALARS:
            return self.unpack("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or nesting >= _MAX_NESTING:
            raise WeightsError(f"{self.file.path}: metadata value type {kind} at byte {self.at} is not known.")
        inner, count = self.unpack("<IQ")
        if inner in _SCALARS:
            self.need(count * struct.calcsize("<" + _SCALARS[inner]), "an array")
            return list(self.unpack(f"<{count}{_SCALARS[inner]}"))
        self.need(count * (8 if inner == _STRING else 12), "an array")
        if inner == _STRING:
            return self._strings(count)
        return [self.value(inner, nesting + 1) for _ in range(count)]


def read_gguf(path: Path) -> GGUF:
    """Parse the header. Raises WeightsError for anything that is no whole, well-formed GGUF file."""
    cursor = _Cursor(MappedFile(path))
    num_tensors, num_pairs = _read_counts(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        (kind,) = cursor.unpack("<I")
        if key in metadata:
            raise WeightsError(f"{path}: the metadata key {key!r} is there twice.")
        metadata[key] = cursor.value(kind)
    if metadata.get("split.count", 1) > 1:
        raise WeightsError(
            f"{path} is one of {metadata['split.count']} parts.", hint="merge them first (gguf-split --merge)."
        )
    raw = [_read_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment > 1 << 20:
        raise WeightsError(f"{path}: general.alignment is {alignment!r}.")
    data = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, number, offset in raw:
        if name in tensors:
            raise WeightsError(f"{path}: the tensor {name!r} is there twice.")
        tensors[name] = _place(path, cursor.file.num_bytes, name, shape, number, data + offset)
    return GGUF(path, metadata, tensors, cursor.file)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.file.view[:4]
    if magic != b"GGUF":
        raise WeightsError(f"{cursor.file.path} is no GGUF file: it begins with {magic!r}, not b'GGUF'.")
    cursor.at = 4
    (version,) = cursor.unpack("<I")
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        raise WeightsError(
            f"{cursor.file.path}: GGUF version {'big-endian' if big else version}; 2 and 3, little-endian, are read.",
            hint="convert the model again with a current converter.",
        )
    num_tensors, num_pairs = cursor.unpack("<QQ")
    # The shortest tensor info takes 24 bytes, the shortest key/value pair 13.
    if num_tensors * 24 + num_pairs * 13 > cursor.left:
        raise WeightsError(
            f"{cursor.file.path}: the header claims {num_tensors} tensors and {num_pairs} metadata pairs, "
            f"and {cursor.left} bytes are left.",
            hint="the file is truncated or damaged; fetch it again.",
        )
    return num_tensors, num_pairs


def _read_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (num_dims,) = cursor.unpack("<I")
    if num_dims > 4:
        raise WeightsError(f"{cursor.file.path}: the tensor {name!r} claims {num_dims} dimensions; at most 4 exist.")
    dims = cursor.unpack(f"<{num_dims}Q")
    number, offset = cursor.unpack("<IQ")
    return name, tuple(reversed(dims)), number, offset


def _place(path: Path, file_bytes: int, name: str, shape: tuple[int, ...], number: int, start: int) -> TensorInfo:
    kind, block, block_bytes = _type(path, name, number)
    count = math.prod(shape)
    if shape and shape[-1] % block:
        raise WeightsError(f"{path}: rows of {name!r} have {shape[-1]} elements, no multiple of {kind}'s {block}.")
    num_bytes = count // block * block_bytes
    if start + num_bytes > file_bytes:
        raise WeightsError(
            f"{path}: the tensor {name!r} ends at byte {start + num_bytes}, the file at {file_bytes}.",
            hint="the file is truncated; fetch it again.",
        )
    return TensorInfo(name, shape, kind, start, num_bytes)


def _type(path: Path, name: str, number: int) -> tuple[str, int, int]:
    if number in TYPES:
        return TYPES[number]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
        return (kind.name, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        raise WeightsError(
            f"{path}: the tensor {name!r} has type number {number}, which is not known.",
            hint="convert the model to a known type, such as Q8_0 or Q4_K.",
        ) from None
