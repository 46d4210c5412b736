"""The formulas of quantised linear layers: packed integers and scales to a dense matrix. It knows no files or configs.

Letters: O outputs, I inputs, G groups of inputs. Results are [O, I] in float32. Work goes in slices of rows, so that
temporaries stay small beside the result.
"""

import torch
from torch import Tensor

# AWQ interleaves the eight columns of a word for its kernel: nibble n of a word holds column AWQ_ORDER[n].
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_ROWS = 512


def unpack(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words [A, B] as uint8 values, 32 // bits a word along dim, lowest bits first or in the given order."""
    count = 32 // bits
    shape = list(words.shape)
    shape[dim] *= count
    values = torch.empty(shape, dtype=torch.uint8)
    for place in range(count):
        column = order[place] if order else place
        part = ((words >> (place * bits)) & ((1 << bits) - 1)).to(torch.uint8)
        values[(slice(column, None, count), slice(None)) if dim == 0 else (slice(None), slice(column, None, count))] = (
            part
        )
    return values


def group_dense(q_IO: Tensor, zeros_GO: Tensor, scales_GO: Tensor, group_I: Tensor) -> Tensor:
    """(q - zero) · scale, each input with the zero and scale of its group; [O, I] as a view of the transpose.

    Source: Frantar et al. 2022 (GPTQ); the group of an input is given, as act-order shuffles them.
    """
    dense_IO = torch.empty(q_IO.shape)
    zeros_GO, scales_GO = zeros_GO.float(), scales_GO.float()
    for first in range(0, len(group_I), _ROWS):
        part = slice(first, first + _ROWS)
        torch.sub(q_IO[part], zeros_GO[group_I[part]], out=dense_IO[part])
        dense_IO[part] *= scales_GO[group_I[part]]
    return dense_IO.T


def scaled_dense(weight_OI: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """weight · scale, one scale a block of (rows, columns); scale: [ceil(O / rows), ceil(I / columns)]."""
    rows, columns = block
    dense_OI = torch.empty(weight_OI.shape)
    for first in range(0, weight_OI.shape[0], rows):
        line_I = scale[first // rows].float().repeat_interleave(columns)[: weight_OI.shape[1]]
        torch.mul(weight_OI[first : first + rows].float(), line_I, out=dense_OI[first : first + rows])
    return dense_OI
