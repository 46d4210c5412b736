"""Device memory for decode attention that is split over tokens. It knows sizes; not what is written there."""

import torch
from torch import Tensor


class Scratch:
    """Device memory for the splits of one launch at a time.

    Who knows the largest launch reserves it once, before memory is shared out and graphs are captured, and then it
    never grows. Without, it grows to at least twice what it was: what a captured graph may still name is kept, and is
    together no more than what is in use.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.partial = torch.empty(0, dtype=torch.float32, device=device)
        self.marks = torch.empty(0, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(0, dtype=torch.int32, device=device)
        self.retired: list[Tensor] = []

    def reserve(self, num_groups: int, num_splits: int, group_size: int, head_dim: int) -> None:
        """Hold at least groups · splits · group_size · (head_dim + 2) floats and one ticket a group."""
        rows = num_groups * num_splits * group_size
        self.partial = self._at_least(self.partial, rows * head_dim)
        self.marks = self._at_least(self.marks, rows * 2)
        self.tickets = self._at_least(self.tickets, num_groups)

    def _at_least(self, held: Tensor, count: int) -> Tensor:
        if held.numel() >= count:
            return held
        grown = torch.zeros(max(count, 2 * held.numel()), dtype=held.dtype, device=self.device)
        if held.numel():
            self.retired.append(held)
        return grown

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.partial, self.marks, self.tickets, *self.retired))
