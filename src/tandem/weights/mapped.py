"""A read-only file in memory, piece by piece. It knows bytes and pages, not what they mean."""

import mmap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor


class MappedFile:
    """A memory-mapped file whose pages can be given back one stretch at a time.

    Reading a checkpoint of the size of the memory works because `forget` drops the pages that were already copied:
    the resident set stays at the parameters plus the tensor in hand.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.num_bytes = path.stat().st_size
            if self.num_bytes == 0:
                raise WeightsError(f"{path} is empty.", hint="fetch it again.")
            with path.open("rb") as file:
                self.view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from error

    def tensor(self, start: int, num_bytes: int) -> "Tensor":
        """A uint8 tensor [num_bytes] that shares the file's pages; it may only be read."""
        import torch

        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.view, dtype=torch.uint8, count=num_bytes, offset=start)

    def forget(self, start: int, num_bytes: int) -> None:
        """Give back the pages that lie wholly inside the stretch; reading them again is right, only slower."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self.view.madvise(mmap.MADV_DONTNEED, first, length)
