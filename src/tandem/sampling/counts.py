"""Which tokens a request has seen, for penalties: tables taken by rows that ask. It knows no parameters and no logits.

Table 0 belongs to nobody: rows without penalties count into it, so that a batch needs no selection on the device.
Memory is V·5 bytes a table; there are none until a request with penalties arrives, and none after the last has left.

Legend: C tables, V rows of the output matrix, R rows of this step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.sampling.upload import to_device


class CountTables:
    """Output counts int32 [C, V] and prompt presence bool [C, V], updated on the device from sampled ids."""

    def __init__(self, num_rows: int, num_logits: int, device: torch.device) -> None:
        self._num_rows, self._num_logits, self._device = num_rows, num_logits, device
        self._table_of: dict[int, int] = {}
        self._free: list[int] = []
        self.output_CV, self.seen_CV = self._allocate(0)

    def take(self, row: int, tokens: Sequence[int], prompt_length: int) -> int:
        """Give the row a table filled from its tokens: a prompt of prompt_length, then output. Returns its number.

        If it raises, as for want of memory, the row has none and the others keep theirs.
        """
        assert row not in self._table_of
        tokens_L = to_device(torch.tensor(list(tokens), dtype=torch.int64), self._device)
        if not self._free:
            self._grow()
        table = self._free[-1]
        self.seen_CV[table].zero_()
        self.seen_CV[table].index_fill_(0, tokens_L[:prompt_length], True)
        self.output_CV[table].zero_()
        output = tokens_L[prompt_length:]
        self.output_CV[table].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._table_of[row] = self._free.pop()
        return table

    def give_back(self, row: int) -> None:
        """The row needs its table no longer; the memory goes with the last one."""
        self._free.append(self._table_of.pop(row))
        if not self._table_of:
            self.output_CV, self.seen_CV = self._allocate(0)
            self._free = []

    def record(self, tables_R: Tensor, ids_R: Tensor) -> None:
        """Each row sampled an id. int64 [R] both; the tables of penalised rows are distinct.

        An id of -1, of a row whose output is not finite and which ends, counts as 0, not in the table before.
        The counts change last, when nothing can fail any more: a step that is repeated counts once.
        """
        flat_R = torch.add(ids_R.clamp(min=0), tables_R, alpha=self._num_logits)
        self.output_CV.view(-1).index_add_(0, flat_R, torch.ones_like(flat_R, dtype=torch.int32))

    @property
    def num_bytes(self) -> int:
        return 5 * self.output_CV.numel()

    def check(self, rows: set[int]) -> None:
        tables = [*self._table_of.values(), *self._free]
        assert set(self._table_of) == rows, f"tables of {sorted(self._table_of)}, penalised rows {sorted(rows)}"
        assert sorted(tables) == list(range(1, len(self.output_CV))), "a table is lost or doubled"

    def _allocate(self, num_tables: int) -> tuple[Tensor, Tensor]:
        shape = (num_tables and num_tables + 1, self._num_logits)
        output_CV = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return output_CV, torch.zeros(shape, dtype=torch.bool, device=self._device)

    def _grow(self) -> None:
        """Twice as many tables as are taken, at least one, at most one a row. Numbers stay, and all if it raises."""
        taken = len(self._table_of)
        num_tables = min(max(1, 2 * taken), self._num_rows)
        output_CV, seen_CV = self._allocate(num_tables)
        output_CV[: len(self.output_CV)] = self.output_CV
        seen_CV[: len(self.seen_CV)] = self.seen_CV
        self.output_CV, self.seen_CV = output_CV, seen_CV
        self._free = list(range(num_tables, taken, -1))
