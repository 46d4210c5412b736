"""Quantised linear layers for CPUs: w8a8 and int4. They quantise what a target writes; they know no files.

    w8a8   int8 weights, a scale an output channel; int8 activations, a scale a token; int32 sums
    int4   4-bit weights in groups of 32 inputs, each with a scale and an offset; bfloat16 activations

Both are lossy. Embeddings, norms and mixtures of experts stay dense. The head is int8 in either scheme: logits are
what the loss shows in first, and one matrix in 8 bits costs little.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tandem.layers.linear import Linear, host_layer

GROUP = 32
INT4_ROWS = 16
GRID_TOLERANCE = 0.02


class Int8Linear(Linear):
    """Symmetric int8 on both sides (as in LLM.int8(), Dettmers et al. 2022, without its outlier split)."""

    def __init__(self, in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__(in_size, parts, bias, dtype, device)
        self.codes_OI = _constant((self.out_size, in_size), torch.int8, device)
        self.scales_O = _constant((self.out_size,), torch.float32, device)

    def write_rows(self, rows: slice, tensor_OI: Tensor) -> None:
        scales_O1 = tensor_OI.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127.0
        self.codes_OI.data[rows].copy_((tensor_OI.float() / scales_O1).round_())
        self.scales_O.data[rows].copy_(scales_O1[:, 0])

    def forward(self, x_TI: Tensor) -> Tensor:
        # vector_norm(inf) would say the same and takes eight times as long.
        scales_T1 = x_TI.abs().amax(dim=-1, keepdim=True).float().mul_(1.0 / 127.0).clamp_min_(1e-12)
        codes_TI = (x_TI / scales_T1).round_().to(torch.int8)
        y_TO: Tensor = (torch._int_mm(codes_TI, self.codes_OI.t()) * scales_T1).mul_(self.scales_O)
        if self.bias is not None:
            y_TO += self.bias
        return y_TO.to(x_TI.dtype)


class Int4Linear(Linear):
    """Weights (code - 8) · scale + offset, in the packed order of torch's CPU kernel.

    Packing needs the whole matrix, so the codes of merged parts wait in ``pending`` until the last part is written.
    Weights that already lie on a 4-bit grid (Q4_0, Q4_1 files) keep their codes.
    """

    def __init__(self, in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__(in_size, parts, bias, dtype, device)
        self.packed_OI = _constant((self.out_size, in_size // 2), torch.uint8, device)
        self.scales_GO2 = _constant((in_size // GROUP, self.out_size, 2), torch.bfloat16, device)
        self.pending: dict[int, Tensor] = {}

    def write_rows(self, rows: slice, tensor_OI: Tensor) -> None:
        codes_OI, scales_OG2 = int4_codes(tensor_OI.float())
        self.scales_GO2.data[:, rows].copy_(scales_OG2.transpose(0, 1))
        self.pending[rows.start] = codes_OI.to(torch.uint8)
        if sum(len(codes) for codes in self.pending.values()) == self.out_size:
            codes_OI = torch.cat([self.pending[start] for start in sorted(self.pending)]).to(torch.int32)
            self.packed_OI.data.copy_(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_OI, 1))
            self.pending.clear()

    def forward(self, x_TI: Tensor) -> Tensor:
        y_TO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_TI.bfloat16(), self.packed_OI, GROUP, self.scales_GO2
        )
        y_TO = y_TO.to(x_TI.dtype)
        return y_TO if self.bias is None else y_TO + self.bias


def int4_codes(tensor_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0..15 [O, I] and (scale, offset) pairs [O, I/32, 2], so that weight ≈ (code - 8) · scale + offset.

    A group whose values are whole multiples of its extreme / 8 (what Q4_0 stores) is symmetric, with offset 0;
    any other spans its minimum to its maximum (what Q4_1 stores).
    """
    groups_OGI = tensor_OI.reshape(len(tensor_OI), -1, GROUP)
    low_OG1, high_OG1 = groups_OGI.aminmax(dim=-1, keepdim=True)
    extreme_OG1 = torch.where(high_OG1 > -low_OG1, high_OG1, low_OG1)
    step_OG1 = _nonzero(extreme_OG1 / -8.0)
    turns_OGI = groups_OGI / step_OG1
    on_grid_OG1 = ((turns_OGI - turns_OGI.round()).abs().amax(dim=-1, keepdim=True) < GRID_TOLERANCE) & (
        turns_OGI.round().amax(dim=-1, keepdim=True) <= 7
    )
    scale_OG1 = torch.where(on_grid_OG1, step_OG1, _nonzero((high_OG1 - low_OG1) / 15.0))
    offset_OG1 = torch.where(on_grid_OG1, 0.0, low_OG1 + 8.0 * scale_OG1)
    codes_OGI = ((groups_OGI - offset_OG1) / scale_OG1).round_().add_(8.0).clamp_(0.0, 15.0)
    return codes_OGI.flatten(1), torch.cat((scale_OG1, offset_OG1), dim=-1)


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0.0, 1e-12, x)


class W8A8:
    """int8 weights and activations: the fastest prefill and large batch."""

    name = "w8a8"

    def create(
        self, in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        return Int8Linear(in_size, parts, bias, dtype, device)

    def stored_bytes(self, in_size: int, out_size: int) -> int | None:
        """Of a layer, its bias aside; None: it stays dense."""
        return self.head_bytes(in_size, out_size)

    def head_bytes(self, in_size: int, out_size: int) -> int:
        """Codes, and a float32 scale an output."""
        return out_size * (in_size + 4)

    def create_head(self, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device) -> Linear | None:
        return Int8Linear(in_size, (out_size,), False, dtype, device)


class Int4(W8A8):
    """4-bit weights: the fastest single request. Matrices that the kernel's blocks do not fit stay dense."""

    name = "int4"

    def create(
        self, in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        fits = self.stored_bytes(in_size, sum(parts)) is not None
        return (Int4Linear if fits else host_layer)(in_size, parts, bias, dtype, device)

    def stored_bytes(self, in_size: int, out_size: int) -> int | None:
        """Half a byte a weight, and two bfloat16 a group."""
        fits = in_size % GROUP == 0 and out_size % INT4_ROWS == 0
        return in_size * out_size // 2 + in_size // GROUP * out_size * 4 if fits else None


SCHEMES: dict[str, Callable[[], W8A8]] = {"w8a8": W8A8, "int4": Int4}


def _constant(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
