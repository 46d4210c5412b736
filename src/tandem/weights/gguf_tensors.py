"""GGUF tensor data to dense torch tensors under Hugging Face names. It knows block formats, not files' headers.

Formulas of the block formats (32 elements, scale d, minimum m, both float16; quants q):
Q8_0: d·q · Q4_0: d·(q - 8) · Q4_1: d·q + m, where byte j holds element j in its low and j + 16 in its high nibble.
Source: ggml's quantisation reference, https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tandem.errors import WeightsError
from tandem.weights.gguf import GGUF, TensorInfo
from tandem.weights.gguf_config import Rename, renames
from tandem.weights.stored import Stored

# Under torch's grain size (32768 elements), so that no chunk waits for a thread that other work keeps from its core;
# one thread with its temporaries in cache is as fast as two.
_CHUNK_BLOCKS = 1000
_LIBRARY_CHUNK = 1 << 19  # elements: numpy's temporaries take several times their bytes
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _scale(raw: Tensor, at: int) -> Tensor:
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _q8_0(raw: Tensor, out: Tensor) -> None:
    torch.mul(raw[:, 2:].view(torch.int8), _scale(raw, 0), out=out)


def _nibbles(raw: Tensor, out: Tensor) -> None:
    out[:, :16] = raw & 15
    out[:, 16:] = raw >> 4


def _q4_0(raw: Tensor, out: Tensor) -> None:
    _nibbles(raw[:, 2:], out)
    out.sub_(8).mul_(_scale(raw, 0))


def _q4_1(raw: Tensor, out: Tensor) -> None:
    _nibbles(raw[:, 4:], out)
    out.mul_(_scale(raw, 0)).add_(_scale(raw, 2))


_OWN: dict[str, Callable[[Tensor, Tensor], None]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}


def dequantise(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Bytes of one tensor (uint8, flat) as a dense tensor of `shape`: F32/F16/BF16 as they are, others in float32."""
    if kind in _DENSE:
        return raw.view(_DENSE[kind]).view(shape)
    if kind not in _OWN:
        return _library(raw, kind, shape)
    num_blocks = math.prod(shape) // 32
    blocks, out = raw.view(num_blocks, -1), torch.empty(num_blocks, 32)
    for first in range(0, num_blocks, _CHUNK_BLOCKS):
        part = slice(first, first + _CHUNK_BLOCKS)
        _OWN[kind](blocks[part], out[part])
    return out.view(shape)


def _library(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    number = GGMLQuantizationType[kind]
    row_bytes = shape[-1] // GGML_QUANT_SIZES[number][0] * GGML_QUANT_SIZES[number][1]
    rows, out = raw.view(-1, row_bytes), torch.empty(math.prod(shape[:-1]), shape[-1])
    step = max(1, _LIBRARY_CHUNK // shape[-1])
    try:
        for first in range(0, rows.shape[0], step):
            part = slice(first, first + step)
            out[part] = torch.from_numpy(dequantize(rows[part].numpy(), number))
    except NotImplementedError as error:
        raise WeightsError(
            f"tensors of GGUF type {kind} cannot be read.", hint="convert the model to a type such as Q8_0 or Q4_K."
        ) from error
    return out.view(shape)


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of q and k that GGUF uses for the llama architecture.

    A Hugging Face head holds the first halves of all rotary pairs, then the second halves; GGUF holds the pairs side
    by side. weight: [heads · d, in] or [heads · d]; the heads of k are the KV heads.
    """
    d = weight.shape[0] // num_heads
    return weight.view(num_heads, d // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def gguf_stored(gguf: GGUF) -> Iterator[Stored]:
    """Every tensor of the file but the rotary factors, under its Hugging Face name, experts one by one."""
    for info, rename in renames(gguf):
        yield from _split(gguf, info, rename)


def _split(gguf: GGUF, info: TensorInfo, rename: Rename) -> Iterator[Stored]:
    if "{expert}" not in rename.name:
        yield _stored(gguf, info, rename, rename.name, info.shape, info.start, info.num_bytes)
        return
    share = info.num_bytes // info.shape[0]
    for expert in range(info.shape[0]):
        name = rename.name.format(expert=expert)
        yield _stored(gguf, info, rename, name, info.shape[1:], info.start + expert * share, share)


def _stored(
    gguf: GGUF, info: TensorInfo, rename: Rename, name: str, shape: tuple[int, ...], start: int, num_bytes: int
) -> Stored:
    def read() -> Tensor:
        dense = dequantise(gguf.file.tensor(start, num_bytes), info.type, shape)
        if rename.permuted_heads:
            dense = unpermute(dense, rename.permuted_heads)
        # GGUF stores Gemma's norms as the factor 1 + w; the checkpoint's name means w.
        return dense.float() - 1 if rename.minus_one else dense

    return Stored(name, shape, info.type, num_bytes, read, lambda: gguf.file.forget(start, num_bytes))
