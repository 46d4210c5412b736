"""Linear layers behind one interface, so that a block does not know how its weights are stored.

A layer may merge several matrices of the checkpoint into one (queries, keys and values; gate and up): its *parts* are
the output sizes, in order, and each part has a target of its own. What a quantised scheme stores is in quantised.py.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem import kernels
from tandem.errors import ModelError, SettingError
from tandem.kernels.linear import linear as linear
from tandem.kernels.linear import raise_winners as raise_winners
from tandem.layers.target import Target, whole


class Linear(nn.Module):
    """y = x · Wᵀ + b for the merged W of the parts, each [part, in_size] in the checkpoint."""

    def __init__(self, in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.in_size = in_size
        self.parts = tuple(parts)
        self.out_size = sum(parts)
        self.starts = (0, *accumulate(parts))
        self.bias = _parameter((self.out_size,), dtype, device) if bias else None

    def target(self, part: int = 0) -> Target:
        """Where the checkpoint's matrix of one part goes."""
        rows = slice(self.starts[part], self.starts[part + 1])
        return Target((self.parts[part], self.in_size), lambda tensor: self.write_rows(rows, tensor))

    def bias_target(self, part: int = 0) -> Target:
        """Where the checkpoint's bias of one part goes."""
        assert self.bias is not None
        return whole(self.bias.data[self.starts[part] : self.starts[part + 1]])

    def write_rows(self, rows: slice, tensor_OI: Tensor) -> None:
        """Store rows of the merged matrix."""
        raise NotImplementedError

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        raise NotImplementedError

    def forward_parts(self, x_TI: Tensor) -> Tensor:
        """[T, in] → [T, out], or float32 partial sums [parts, T, out] for a kernel that adds them as it reads."""
        return self.forward(x_TI)

    def forward_gated(self, x_TI: Tensor, activation: str) -> Tensor:
        """activation(first half) · second half of the output, [T, in] → [T, out/2]; "silu" or "gelu"."""
        return kernels.gated(self.forward(x_TI), activation)

    def __call__(self, x_TI: Tensor) -> Tensor:
        # Nothing here has hooks, and a decode step calls this often enough for their bookkeeping to show.
        return self.forward(x_TI)


class RowLinear(Linear):
    """Stored as in the checkpoint, [out, in]."""

    def __init__(self, in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__(in_size, parts, bias, dtype, device)
        self.weight_OI = _parameter((self.out_size, in_size), dtype, device)

    def write_rows(self, rows: slice, tensor_OI: Tensor) -> None:
        self.weight_OI.data[rows].copy_(tensor_OI)

    def forward(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias)


class DeviceLinear(RowLinear):
    """Stored as in the checkpoint, multiplied by the kernel that was measured fastest for the shape.

    invariant: a token's result is the same number whatever the other tokens in the step.
    """

    invariant = False

    def forward(self, x_TI: Tensor) -> Tensor:
        return linear(x_TI, self.weight_OI, self.bias, self.invariant)

    def forward_parts(self, x_TI: Tensor) -> Tensor:
        return kernels.linear_parts(x_TI, self.weight_OI, self.bias, self.invariant)

    def forward_gated(self, x_TI: Tensor, activation: str) -> Tensor:
        return kernels.gated_linear(x_TI, self.weight_OI, self.bias, activation, self.invariant)


def whole_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, N] from what forward_parts returned, for a reader that does not add parts itself."""
    return x if x.dim() == 2 else kernels.add_parts(x, dtype)


SMALL_BATCH, SMALL_BATCH_OF_ONE_THREAD = 64, 8


def host_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """F.linear for CPUs. Few rows are multiplied as (W · xᵀ)ᵀ, and one row as two.

    The matrix library splits the rows of its first factor among threads and blocks: with W first it streams the
    weights at memory speed, where F.linear reaches a half to a third of it (measured on two cores of an AMD EPYC).
    The transposed result costs a copy, which a single thread earns back for few rows only.
    """
    num_rows = x_TI.shape[0]
    limit = SMALL_BATCH if torch.get_num_threads() > 1 else SMALL_BATCH_OF_ONE_THREAD
    if num_rows > limit or x_TI.dtype != torch.float32:
        return F.linear(x_TI, weight_OI, bias_O)
    pair_IT = (torch.cat((x_TI, x_TI)) if num_rows == 1 else x_TI).t()
    y_OT = torch.mm(weight_OI, pair_IT) if bias_O is None else torch.addmm(bias_O[:, None], weight_OI, pair_IT)
    return y_OT[:, :num_rows].t().contiguous()


class HostLinear(RowLinear):
    """Stored as in the checkpoint, multiplied in the order that suits CPUs: where weights cannot be packed."""

    def forward(self, x_TI: Tensor) -> Tensor:
        return host_linear(x_TI, self.weight_OI, self.bias)


class LinearScheme(Protocol):
    """Makes the linear layers of a model."""

    name: str

    def create(
        self, in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        """A layer with uninitialised weights."""

    def create_head(self, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device) -> Linear | None:
        """A matrix for the logits, or None: as dense weights, shared with the embedding where the model ties them."""


class Dense:
    """Weights in the model's dtype, [out, in]. invariant: see DeviceLinear."""

    name = "dense"

    def __init__(self, invariant: bool = False) -> None:
        self.invariant = invariant

    def create(
        self, in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        if self.invariant:
            _check_invariant(dtype, device)
        if device.type == "cpu":
            return host_layer(in_size, parts, bias, dtype, device)
        layer = DeviceLinear(in_size, parts, bias, dtype, device)
        layer.invariant = self.invariant
        return layer

    def create_head(self, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device) -> Linear | None:
        if device.type != "cpu":
            return None
        layer = host_layer(in_size, (out_size,), False, dtype, device)
        return None if isinstance(layer, HostLinear) else layer


def _check_invariant(dtype: torch.dtype, device: torch.device) -> None:
    """Raise SettingError where products of this dtype depend on how many tokens are in the step."""
    able = (torch.float32,) if device.type == "cpu" else (torch.bfloat16, torch.float16)
    if dtype not in able:
        raise SettingError(
            f"deterministic does not hold for dtype {str(dtype).removeprefix('torch.')} on {device.type}.",
            hint=f"set dtype to {str(able[0]).removeprefix('torch.')}, or leave deterministic out.",
        )
    from tandem.layers.packed import can_pack

    if device.type == "cpu" and not can_pack(dtype, device):
        raise SettingError(
            "deterministic does not hold here: this PyTorch has no packed matrix products for the CPU (oneDNN).",
            hint="take a PyTorch with oneDNN, or leave deterministic out.",
        )


def host_layer(in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
    """The fastest dense layer for a CPU."""
    from tandem.layers.packed import PackedLinear, can_pack

    return (PackedLinear if can_pack(dtype, device) else HostLinear)(in_size, parts, bias, dtype, device)


def linear_scheme(name: str | None, device: torch.device, invariant: bool = False) -> LinearScheme:
    """The scheme of a name: None or "dense", "w8a8", "int4". Raises ModelError for others and for a wrong device.

    invariant: results do not depend on what else is in the batch: on a GPU in bfloat16 and float16; the CPU's packed
    layout is so anyway. Raises SettingError for quantised schemes, and create() for other dtypes.
    """
    if name in (None, "dense"):
        return Dense(invariant)
    from tandem.layers.quantised import SCHEMES

    if name not in SCHEMES:
        raise ModelError(
            f"there is no quantisation {name!r}.", hint=f"the schemes are: dense, {', '.join(sorted(SCHEMES))}."
        )
    if device.type != "cpu":
        raise ModelError(f"quantisation {name!r} runs on the CPU only; the device is {device.type}.")
    if invariant:
        raise SettingError(
            f"deterministic does not hold with quantize {name}: products depend on the batch.",
            hint="leave out one of the two.",
        )
    return SCHEMES[name]()


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
