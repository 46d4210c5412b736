"""The memory of one step in flight. It knows bytes and moments; it does not know what they mean.

host pages (pinned)  ──in──►  staging (device)      compute reads it       home (device) ──out──► host pages
all of it belongs to one slot, and is written again only after the slot's ticket was collected
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tandem.runner.streams import Event, Streams

ALIGNMENT = 16


@dataclass(slots=True)
class Slot:
    """One step's staging and events.

    staging_bytes   capacity; send() makes it larger when a step brings more than ever before.
    home_R          where the step leaves its tokens, int64 on the device; host_home_R, their pinned copy.
    began …         timed events: copies in done, compute begun, compute done, results home.
    """

    streams: Streams
    staging_bytes: int
    home_R: Tensor
    index: int = 0
    busy: bool = False
    host_home_R: Tensor = field(init=False)
    ready: Event = field(init=False)
    began: Event = field(init=False)
    computed: Event = field(init=False)
    home: Event = field(init=False)
    _pinned: Tensor = field(init=False)
    _pages: np.ndarray = field(init=False)
    _staging: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.host_home_R = self.streams.pinned(8 * self.home_R.numel()).view(torch.int64)
        self.ready, self.began, self.computed, self.home = (self.streams.event() for _ in range(4))
        self._allocate(self.staging_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self.staging_bytes = num_bytes
        self._pinned = self.streams.pinned(num_bytes)
        self._pages = self._pinned.numpy()
        self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self.streams.device)

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Copy arrays to the device in one piece on the in stream, behind which ``ready`` is recorded.

        Returns views of the staging, valid for work behind ``ready`` until the slot's ticket is collected.
        """
        assert self.busy, "memory of a slot that no step owns is written"
        places: dict[str, tuple[int, int, np.ndarray]] = {}
        end = 0
        for name, array in arrays.items():
            places[name] = (end, array.nbytes, array)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if end > self.staging_bytes:
            self._allocate(max(end, 2 * self.staging_bytes))
        for start, num_bytes, array in places.values():
            self._pages[start : start + num_bytes] = array.reshape(-1).view(np.uint8)
        self.streams.copy("in", self._staging[:end], self._pinned[:end])
        self.streams.record(self.ready, "in")
        return {
            name: self._staging[start : start + num_bytes].view(_DTYPES[array.dtype.name]).view(array.shape)
            for name, (start, num_bytes, array) in places.items()
        }

    def fetch(self, count: int) -> None:
        """Start the first count tokens on their way home, behind ``computed``."""
        self.streams.wait("out", self.computed)
        self.streams.copy("out", self.host_home_R[:count], self.home_R[:count])
        self.streams.record(self.home, "out")


_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
