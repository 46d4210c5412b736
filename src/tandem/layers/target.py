"""Where a checkpoint's tensor goes. It knows shapes and places; it does not know files or names."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.errors import WeightsError


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor's place: a slice of a merged parameter, transposed, quantised or whole.

    shape  the tensor's shape in the checkpoint.
    """

    shape: tuple[int, ...]
    store: Callable[[Tensor], None]

    @torch.no_grad()
    def write(self, tensor: Tensor) -> None:
        """Put the tensor (any floating dtype, any device) in its place. Raises WeightsError if its shape differs."""
        if tuple(tensor.shape) != self.shape:
            raise WeightsError(f"a tensor has the shape {list(tensor.shape)}; the model needs {list(self.shape)}.")
        self.store(tensor)


def whole(parameter: Tensor, offset: float = 0.0) -> Target:
    """All of a parameter; offset is added (Gemma's norms store weight - 1)."""
    if offset:
        return Target(tuple(parameter.shape), lambda tensor: _copy(parameter, tensor.float() + offset))
    return Target(tuple(parameter.shape), lambda tensor: _copy(parameter, tensor))


def _copy(parameter: Tensor, tensor: Tensor) -> None:
    parameter.copy_(tensor)
