"""Quantised checkpoints presented as dense tensors under the plain names. It knows how GPTQ, AWQ, FP8 and
compressed-tensors label their parts, not the formulas (packed.py) or where the result goes.

A module left out of quantisation has a plain weight in the file, whatever the list of exclusions says, and stays as
it is. Nothing is guessed: labels that contradict the bytes, and files that could mean two things, are refused.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tandem.errors import WeightsError
from tandem.weights.packed import AWQ_ORDER, group_dense, scaled_dense, unpack
from tandem.weights.stored import Stored

_FP8 = ("F8_E4M3", "F8_E5M2")
# Scales of activations and of a quantised cache: the dense model has no use for them.
_UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_output_scale", ".kv_scale")
_COMPRESSED = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "dense")


def dense_stored(stored: list[Stored], quantization: dict[str, Any] | None) -> list[Stored]:
    """The checkpoint with each quantised module as one dense `.weight`; unchanged when quantization is None.

    quantization is the quantization_config of config.json. Raises WeightsError before anything but zero points and
    shapes was read.
    """
    if not quantization:
        return stored
    method = str(quantization.get("quant_method", "?")).lower()
    makers: dict[str, Callable[[_Parts, dict[str, Any]], list[Stored]]] = {
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _scaled,
        "compressed-tensors": _compressed,
    }
    if method not in makers:
        raise WeightsError(
            f"the checkpoint is quantised with {method!r}; {', '.join(makers)} are read.",
            hint="use the model's unquantised checkpoint or a GGUF of it.",
        )
    parts = _Parts(stored)
    dense = makers[method](parts, quantization)
    return dense + [tensor for tensor in parts.left.values() if not tensor.name.endswith(_UNUSED)]


class _Parts:
    """The stored tensors that no module has claimed yet."""

    def __init__(self, stored: Iterable[Stored]) -> None:
        self.left = {tensor.name: tensor for tensor in stored}

    def stems(self, suffix: str) -> list[str]:
        return [name.removesuffix(suffix) for name in self.left if name.endswith(suffix)]

    def find(self, name: str) -> Stored | None:
        return self.left.pop(name, None)

    def take(self, name: str) -> Stored:
        found = self.left.pop(name, None)
        if found is None:
            raise WeightsError(f"the quantised module {name.rpartition('.')[0]!r} lacks {name!r}.")
        return found


def _made(name: str, shape: tuple[int, ...], kind: str, parts: list[Stored], read: Callable[[], Tensor]) -> Stored:
    def release() -> None:
        for part in parts:
            part.release()

    return Stored(f"{name}.weight", shape, kind, sum(part.num_bytes for part in parts), read, release)


def _expect(tensor: Stored, shape: tuple[int, ...], why: str) -> None:
    if tensor.shape != shape:
        raise WeightsError(f"{tensor.name} is {list(tensor.shape)}; {why} needs {list(shape)}.")


def _bits(method: str, bits: Any, allowed: tuple[int, ...]) -> int:
    if bits not in allowed:
        raise WeightsError(
            f"the checkpoint is {method} with {bits!r} bits; {' and '.join(map(str, allowed))} are supported."
        )
    return int(bits)


def _groups(size: Any, num_inputs: int) -> int:
    return 1 if size in (-1, None) else math.ceil(num_inputs / int(size))


def _gptq(parts: _Parts, config: dict[str, Any]) -> list[Stored]:
    if not config.get("dynamic"):
        _bits("GPTQ", config.get("bits"), (4, 8))
    return [_gptq_module(parts, stem, config) for stem in parts.stems(".qweight")]


def _gptq_module(parts: _Parts, stem: str, config: dict[str, Any]) -> Stored:
    """qweight [I · bits / 32, O], qzeros [G, O · bits / 32], scales [G, O], g_idx [I] (a group for each input)."""
    qweight, qzeros, scales = (parts.take(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))
    g_idx = parts.find(f"{stem}.g_idx")
    num_outputs, bits = qweight.shape[1], config.get("bits")
    if scales.shape[-1] == 8 * num_outputs:
        raise WeightsError(f"{qweight.name} is packed in AWQ's manner, but the config calls it GPTQ.")
    if config.get("dynamic") and g_idx is not None:
        bits = 32 * qweight.shape[0] // max(1, g_idx.shape[0])
    bits = _bits(f"GPTQ ({stem})", bits, (4, 8))
    num_inputs = qweight.shape[0] * 32 // bits
    num_groups = scales.shape[0]
    if not config.get("dynamic"):
        num_groups = _groups(config.get("group_size", -1), num_inputs)
    _expect(scales, (num_groups, num_outputs), f"a group of {config.get('group_size')}")
    _expect(qzeros, (num_groups, num_outputs * bits // 32), f"{bits}-bit packing")
    group_I = _group_index(stem, g_idx, num_inputs, num_groups, config)
    zeros_GO = unpack(qzeros.read(), bits, dim=1)
    offset = zero_offset(stem, zeros_GO, bits, config)

    def read() -> Tensor:
        # z = 0 is stored as -1 in the old style, that is, with all bits set: the sum wraps.
        shifted_GO = (zeros_GO.int() + offset) & ((1 << bits) - 1)
        return group_dense(unpack(qweight.read(), bits, dim=0), shifted_GO, scales.read(), group_I)

    return _made(stem, (num_outputs, num_inputs), f"GPTQ-{bits}bit", [qweight, qzeros, scales], read)


def zero_offset(stem: str, zeros: Tensor, bits: int, config: dict[str, Any]) -> int:
    """1 where zero points are stored minus one (the old "gptq" style), 0 where as they are ("gptq_v2").

    Symmetric quantisation has its zero point in the middle, so the stored value tells, even against the label: tools
    have written the new style under the old name. Otherwise the label decides; without one the file is ambiguous.
    """
    middle, label = 1 << (bits - 1), config.get("checkpoint_format")
    low, high = int(zeros.min()), int(zeros.max())
    symmetric = config.get("sym")
    if symmetric is not False and low == high and low in (middle - 1, middle) and (symmetric or label is None):
        return middle - low
    if symmetric:
        raise WeightsError(
            f"the GPTQ config says symmetric, but {stem} has stored zero points from {low} to {high}; "
            f"they must all be {middle - 1} (old style) or {middle} (new style)."
        )
    if label in ("gptq", "gptq_v2"):
        return 1 if label == "gptq" else 0
    raise WeightsError(
        f"the GPTQ checkpoint does not say how zero points are stored (checkpoint_format is {label!r}).",
        hint='set "checkpoint_format" in its quantization_config to "gptq" (stored minus one) or "gptq_v2".',
    )


def _group_index(stem: str, g_idx: Stored | None, num_inputs: int, num_groups: int, config: dict[str, Any]) -> Tensor:
    plain_I = torch.arange(num_inputs) // math.ceil(num_inputs / num_groups)
    if g_idx is not None:
        _expect(g_idx, (num_inputs,), "one group an input")
        group_I = g_idx.read().long()
        if int(group_I.min()) < 0 or int(group_I.max()) >= num_groups:
            raise WeightsError(f"{g_idx.name} names groups from {group_I.min()} to {group_I.max()} of {num_groups}.")
        # Some writers leave the index at zero when groups are in order.
        if num_groups == 1 or bool(group_I.any()):
            return group_I
    if config.get("desc_act") and num_groups > 1:
        raise WeightsError(f"the GPTQ config says desc_act, but {stem} does not say which input is in which group.")
    return plain_I


def _awq(parts: _Parts, config: dict[str, Any]) -> list[Stored]:
    bits = _bits("AWQ", config.get("bits", config.get("w_bit")), (4,))
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise WeightsError(f"the AWQ checkpoint is packed for {config['version']!r}; gemm packing is read.")
    size = config.get("group_size", config.get("q_group_size", 128))
    return [_awq_module(parts, stem, bits, size) for stem in parts.stems(".qweight")]


def _awq_module(parts: _Parts, stem: str, bits: int, size: Any) -> Stored:
    """qweight [I, O / 8], qzeros [G, O / 8], scales [G, O]; (q - z) · s (Lin et al. 2023)."""
    qweight, qzeros, scales = (parts.take(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))
    num_inputs, num_outputs = qweight.shape[0], qweight.shape[1] * 8
    num_groups = _groups(size, num_inputs)
    _expect(scales, (num_groups, num_outputs), f"AWQ's packing with a group of {size}")
    _expect(qzeros, (num_groups, num_outputs // 8), "AWQ's packing")
    group_I = torch.arange(num_inputs) // math.ceil(num_inputs / num_groups)

    def read() -> Tensor:
        q_IO, zeros_GO = (unpack(part.read(), bits, 1, AWQ_ORDER) for part in (qweight, qzeros))
        return group_dense(q_IO, zeros_GO, scales.read(), group_I)

    return _made(stem, (num_outputs, num_inputs), "AWQ-4bit", [qweight, qzeros, scales], read)


def _scaled(parts: _Parts, config: dict[str, Any]) -> list[Stored]:
    """FP8 or INT8 weights with a scale for the tensor, for each row or for each block."""
    made = []
    for stem in parts.stems(".weight"):
        weight = parts.left[f"{stem}.weight"]
        if weight.dtype not in (*_FP8, "I8"):
            continue
        # weight_scale_inv is a factor, too: the inverse of what quantisation multiplied by.
        scale = parts.find(f"{stem}.weight_scale_inv") or parts.take(f"{stem}.weight_scale")
        if zero := parts.find(f"{stem}.weight_zero_point"):
            if bool(zero.read().any()):
                raise WeightsError(f"{zero.name} holds zero points, which are not supported for {weight.dtype}.")
            zero.release()
        made.append(_scaled_module(stem, parts.take(weight.name), scale, config.get("weight_block_size")))
    return made


def _scaled_module(stem: str, weight: Stored, scale: Stored, block_size: Any) -> Stored:
    num_outputs, num_inputs = weight.shape
    shape = {0: (1, 1), 1: (*scale.shape, 1)}.get(len(scale.shape), scale.shape)
    if shape == (1, 1):
        block = (num_outputs, num_inputs)
    elif shape == (num_outputs, 1):
        block = (1, num_inputs)
    elif block_size:
        block = (int(block_size[0]), int(block_size[1]))
    else:
        block = (0, 0)
    if 0 in block or shape != (math.ceil(num_outputs / block[0]), math.ceil(num_inputs / block[1])):
        raise WeightsError(
            f"{scale.name} is {list(scale.shape)}; for a weight of {list(weight.shape)} with blocks of {block_size} "
            "it is neither one scale, nor one a row, nor one a block."
        )

    def read() -> Tensor:
        return scaled_dense(weight.read(), scale.read().view(shape), block)

    return _made(stem, weight.shape, f"{weight.dtype} scaled", [weight, scale], read)


def _compressed(parts: _Parts, config: dict[str, Any]) -> list[Stored]:
    layout = config.get("format")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if layout not in _COMPRESSED or sparsity != "dense":
        raise WeightsError(
            f"compressed-tensors in the format {layout!r} (sparsity {sparsity!r}) is not read; "
            f"{', '.join(_COMPRESSED)} are."
        )
    if config.get("transform_config"):
        raise WeightsError("compressed-tensors with a transform_config is not read.")
    packed = [_pack_quantised(parts, stem) for stem in parts.stems(".weight_packed")]
    return packed + _scaled(parts, config)


def _pack_quantised(parts: _Parts, stem: str) -> Stored:
    """weight_packed [O, I · bits / 32], weight_scale [O, G], weight_zero_point [O · bits / 32, G] if asymmetric.

    Packed values and zero points are both raised by half the range, so an absent zero point counts as that half.
    """
    packed, scale, shape = (parts.take(f"{stem}.weight_{part}") for part in ("packed", "scale", "shape"))
    zero, g_idx = parts.find(f"{stem}.weight_zero_point"), parts.find(f"{stem}.weight_g_idx")
    num_outputs, num_inputs = (int(size) for size in shape.read())
    bits = _bits(f"compressed-tensors ({stem})", 32 * packed.shape[1] // max(1, num_inputs), (4, 8))
    num_groups = scale.shape[-1]
    _expect(packed, (num_outputs, math.ceil(num_inputs * bits / 32)), f"{bits}-bit packing")
    _expect(scale, (num_outputs, num_groups), "one scale a row and group")
    if zero is not None:
        _expect(zero, (math.ceil(num_outputs * bits / 32), num_groups), f"{bits}-bit packing")
    group_I = _group_index(stem, g_idx, num_inputs, num_groups, {})

    def read() -> Tensor:
        q_IO = unpack(packed.read(), bits, dim=1)[:, :num_inputs].T
        scales_GO = scale.read().T
        if zero is None:
            zeros_GO = torch.full(scales_GO.shape, 1 << (bits - 1))
        else:
            zeros_GO = unpack(zero.read(), bits, dim=0)[:num_outputs].T
        return group_dense(q_IO, zeros_GO, scales_GO, group_I)

    return _made(
        stem, (num_outputs, num_inputs), f"INT{bits}", [p for p in (packed, scale, zero) if p is not None], read
    )
