"""One tensor as a file stores it, whatever the format. It knows how to be read once, not where it goes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Stored:
    """A named tensor that has not been read yet.

    shape      of what read() returns.
    dtype      the file's word for it (F32, BF16, Q4_1, GPTQ-4bit, ...).
    num_bytes  it takes in the file; the sum over a checkpoint is the total of the progress callback.
    read       makes the tensor; it may share the file's pages, so it is copied from and never written.
    release    gives the file's pages back after the copy.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    read: Callable[[], "Tensor"]
    release: Callable[[], None] = _nothing
