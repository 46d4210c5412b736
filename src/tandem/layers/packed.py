"""Dense linear layers for CPUs, kept in the blocked layout that oneDNN multiplies from. It knows no models.

Quicker than F.linear at every number of rows tried, by 1.1 to 1.6 times (docs/benchmarks.md, CPU). A row's result is
the same number whatever the other rows, seen for 2 to 512 rows; one row alone takes another path, so it is multiplied
as two.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.layers.linear import Linear
from tandem.layers.target import Target

ROWS_HINT = 64
"""Rows to choose the layout for. Any from 32 up gave the layout that is fastest for all numbers of rows."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this PyTorch has oneDNN and its operators on packed weights, for this dtype."""
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class PackedLinear(Linear):
    """Parts are gathered row by row until all are there, then packed; the row-wise copy is dropped."""

    def __init__(self, in_size: int, parts: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__(in_size, parts, bias, dtype, device)
        self._dtype = dtype
        self._rows_OI: Tensor | None = None
        self._packed: Tensor | None = None
        self._awaited = set(self.starts[:-1])

    def target(self, part: int = 0) -> Target:
        if len(self.parts) > 1:
            return super().target(part)
        return Target((self.out_size, self.in_size), lambda tensor: self._pack(tensor.to(self._dtype)))

    def write_rows(self, rows: slice, tensor_OI: Tensor) -> None:
        if self._rows_OI is None:
            packed = self._packed
            shape = (self.out_size, self.in_size)
            self._rows_OI = torch.empty(shape, dtype=self._dtype) if packed is None else packed.to_dense()
        self._rows_OI[rows].copy_(tensor_OI)
        self._awaited.discard(rows.start)
        if not self._awaited:
            self._pack(self._rows_OI)
            self._rows_OI = None

    def _pack(self, weight_OI: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), ROWS_HINT)

    def forward(self, x_TI: Tensor) -> Tensor:
        alone = x_TI.shape[0] == 1
        x_TI = torch.cat((x_TI, x_TI)) if alone else x_TI
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, self.bias, "none", [], "")
        return y_TO[:1] if alone else y_TO
