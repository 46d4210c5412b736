"""The runner's stable rows: what the host knows of each, and what the device keeps. It does not know who plans.

    host (HostRows, moved by submit)             device (DeviceRows, moved in step order on one stream or thread)
    known tokens, fill of the block table        block table, the token sampled last

A row is described once, when its request arrives, and from then on changes by differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.step import grow
from tandem.plan import Arrival, Span, grown
from tandem.request import SamplingParams


@dataclass(slots=True)
class HostRow:
    """What the host knows of one row. tokens: prompt (and output, if resumed), int64.

    turn: the arrival's place, or, if the planner tells of none, its number: the largest one is the newest request's.
    """

    request: str
    tokens: np.ndarray
    prompt_length: int
    params: SamplingParams
    turn: int
    num_blocks: int = 0


class HostRows:
    """Rows as the host last planned them. Changed when a plan is submitted, ahead of the device."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.num_rows, self.max_blocks = num_rows, max_blocks
        self.rows: list[HostRow | None] = [None] * num_rows
        self.num_known_R = np.zeros(num_rows, dtype=np.int64)
        self.wants_prompt_R = np.zeros(num_rows, dtype=bool)
        self._num_arrived = 0

    def depart(self, rows: Sequence[int]) -> None:
        for row in rows:
            assert self.rows[row] is not None, f"row {row} departs but is empty"
            self.rows[row] = None

    def arrive(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            assert self.rows[arrival.row] is None, f"row {arrival.row} is taken"
            tokens = np.asarray(arrival.tokens, dtype=np.int64)
            self._num_arrived += 1
            self.rows[arrival.row] = HostRow(
                arrival.request, tokens, arrival.prompt_length, arrival.params, arrival.place or self._num_arrived
            )
            self.num_known_R[arrival.row] = len(tokens)
            self.wants_prompt_R[arrival.row] = arrival.params.prompt_logprobs is not None

    def grow(self, spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        """Take the blocks that spans add. Returns flat indices into the block tables [R, B] and the block ids."""
        places: list[int] = []
        blocks: list[int] = []
        for index, added in grown(spans):
            row = self[index]
            first = index * self.max_blocks + row.num_blocks
            row.num_blocks += len(added)
            assert row.num_blocks <= self.max_blocks, f"row {index} has more than {self.max_blocks} blocks"
            places.extend(range(first, first + len(added)))
            blocks.extend(added)
        return places, blocks

    def __getitem__(self, row: int) -> HostRow:
        found = self.rows[row]
        assert found is not None, f"row {row} is empty"
        return found

    @property
    def num_taken(self) -> int:
        return sum(row is not None for row in self.rows)


@dataclass(slots=True)
class DeviceRows:
    """Rows as the device has them, and one more behind them, so that -1, the row of padding, is a row too.

    tables_RB  block tables, int32.      last_R  token each row sampled last, int64.
    """

    tables_RB: Tensor
    last_R: Tensor

    @classmethod
    def allocate(cls, num_rows: int, max_blocks: int, device: torch.device) -> "DeviceRows":
        return cls(
            torch.zeros((num_rows + 1, max_blocks), dtype=torch.int32, device=device),
            torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
        )

    def grow(self, pairs_2C: Tensor) -> None:
        """Write block ids, pairs_2C[1], at flat places of the tables, pairs_2C[0]; int32, on the device or pinned."""
        grow(pairs_2C, self.tables_RB)
