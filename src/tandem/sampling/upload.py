"""Small tensors on their way to the device, through pinned memory. It does not know what they hold."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, copied without making the host wait.

    The pinned original is fresh memory each time; torch's allocator reuses it only once the copy is done.
    Raises torch.OutOfMemoryError for both kinds of memory.
    """
    if device.type != "cuda":
        return tensor.to(device)
    with pinning():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@contextmanager
def pinning() -> Iterator[None]:
    """Torch tells of pinned memory that is not there by a plain RuntimeError, which no handler of ours expects."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" not in str(error).lower():
            raise
        raise torch.OutOfMemoryError(f"no pinned memory is left: {error}") from error
