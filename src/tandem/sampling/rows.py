"""What the sampler knows about each row: parameters, seeds, penalties. It does not know logits or how a token is drawn.

A row is taken by ``arrive`` and left by ``depart`` (plan.py). Numbers that the arithmetic needs lie in tables on the
device; what decides *which* arithmetic a batch needs lies on the host, so that nothing is ever read back.

    numbers_XF   float64 [rows, 6]   temperature, top_p, min_p, repetition, presence, frequency
    integers_XI  int64   [rows, 3]   top_k (V: off), seed, table of counts (see counts.py; 0: none)

Legend: X rows of the state, R rows of this step, V rows of the output matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.plan import Arrival
from tandem.request import SamplingParams
from tandem.sampling.counts import CountTables
from tandem.sampling.philox import derived_seed
from tandem.sampling.upload import to_device

SMALLEST_TEMPERATURE = 1e-5
"""Below it a row is greedy: the quotient of float32 logits would say the same or overflow."""


class Numbers(NamedTuple):
    """Parameters of a step's rows, gathered on the device: float64 and int64 tensors [R]."""

    temperature_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    top_k_R: Tensor
    seed_R: Tensor


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What the host knows of a row.

    random     a token is drawn; else it is the best one.     truncates  top-k, top-p or min-p is on.
    sorts      top-k or top-p is on.                          penalised  it has a table of counts.
    top_k      as asked for; V when off.                      logprobs, prompt_logprobs  as asked for.
    bias       (ids, values) on the device, or None.          banned     ids that may not come before free_from.
    free_from  position in the request from which the banned ids may be sampled.
    """

    random: bool
    truncates: bool
    sorts: bool
    penalised: bool
    top_k: int
    logprobs: int | None
    prompt_logprobs: int | None
    bias: tuple[Tensor, Tensor] | None
    banned: Tensor | None
    free_from: int


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """num_live rows are taken; num_penalised of them hold tables of counts, count_bytes in all."""

    num_live: int
    num_penalised: int
    count_bytes: int


class SamplerRows:
    """Parameters of the requests on a runner's rows.

    num_rows     rows of the runner's state.
    num_logits   rows of the output matrix (V).
    device       where logits come from.
    seed         the engine's; requests without a seed get theirs from it and their id.
    num_tokens   ids the tokenizer knows; those at and above it pad the matrix and are never sampled. None: num_logits.
    """

    def __init__(
        self,
        num_rows: int,
        num_logits: int,
        device: torch.device | str,
        seed: int = 0,
        *,
        num_tokens: int | None = None,
    ) -> None:
        self.num_rows, self.num_logits, self.seed = num_rows, num_logits, seed
        self.num_tokens = num_logits if num_tokens is None else min(num_tokens, num_logits)
        self.device = torch.device(device)
        self.counts = CountTables(num_rows, num_logits, self.device)
        self.facts: dict[int, RowFacts] = {}
        self._numbers_XF = torch.zeros(num_rows, 6, dtype=torch.float64, device=self.device)
        self._integers_XI = torch.zeros(num_rows, 3, dtype=torch.int64, device=self.device)

    def arrive(self, arrival: Arrival) -> None:
        """A request takes a row, which it may have had before a preemption: its counts are rebuilt from its tokens.

        If it raises, as for want of memory, the row is nobody's.
        """
        row, params = arrival.row, arrival.params
        if row in self.facts:
            self.depart(row)
        seed = derived_seed(self.seed, arrival.request) if params.seed is None else params.seed
        top_k = params.top_k if 0 < params.top_k < self.num_tokens else self.num_logits
        numbers = (
            params.temperature, params.top_p, params.min_p,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        facts, numbers_F = self._facts_of(params, arrival, top_k), self.upload(numbers, torch.float64)
        table = self.counts.take(row, arrival.tokens, arrival.prompt_length) if params.uses_penalties else 0
        try:
            integers_I = self.upload((top_k, seed, table), torch.int64)
            self._numbers_XF[row].copy_(numbers_F, non_blocking=True)
            self._integers_XI[row].copy_(integers_I, non_blocking=True)
        except BaseException:
            if table:
                self.counts.give_back(row)
            raise
        self.facts[row] = facts

    def depart(self, row: int) -> None:
        """The row's request has left. Unknown rows are ignored: a runner may drop a row that never sampled."""
        facts = self.facts.pop(row, None)
        if facts is not None and facts.penalised:
            self.counts.give_back(row)

    def gather(self, rows_R: Tensor) -> Numbers:
        """Parameters of the rows named on the device, int64 [R]."""
        numbers_RF, integers_RI = self._numbers_XF[rows_R], self._integers_XI[rows_R]
        return Numbers(numbers_RF[:, 0], numbers_RF[:, 1], numbers_RF[:, 2], integers_RI[:, 0], integers_RI[:, 1])

    def gather_penalties(self, rows_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """repetition, presence, frequency (float64 [R]) and the table of counts (int64 [R]) of the rows named."""
        numbers_RF = self._numbers_XF[rows_R]
        return numbers_RF[:, 3], numbers_RF[:, 4], numbers_RF[:, 5], self._integers_XI[rows_R, 2]

    def upload(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
        """A small tensor on the device, copied without making the host wait. May raise torch.OutOfMemoryError."""
        return to_device(torch.tensor(values, dtype=dtype), self.device)

    def statistics(self) -> RowStatistics:
        penalised = sum(facts.penalised for facts in self.facts.values())
        return RowStatistics(len(self.facts), penalised, self.counts.num_bytes)

    def check(self) -> None:
        """Assert that tables of counts belong to live penalised rows, one each."""
        self.counts.check({row for row, facts in self.facts.items() if facts.penalised})

    def _facts_of(self, params: SamplingParams, arrival: Arrival, top_k: int) -> RowFacts:
        # The best token alone is always enough for a top_p below 1/V, and only it survives min_p = 1.
        greedy = (
            params.greedy
            or params.temperature < SMALLEST_TEMPERATURE
            or params.top_p * self.num_logits <= 1.0
            or params.min_p == 1.0
        )
        bias = {token: value for token, value in params.logit_bias if 0 <= token < self.num_tokens}
        banned = {*arrival.eos, *params.stop_token_ids} if params.min_tokens else set()
        banned = {token for token in banned if 0 <= token < self.num_tokens}
        sorts = not greedy and (top_k < self.num_logits or params.top_p < 1.0)
        return RowFacts(
            random=not greedy,
            truncates=sorts or (not greedy and params.min_p > 0.0),
            sorts=sorts,
            penalised=params.uses_penalties,
            top_k=top_k,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            bias=(self.upload(list(bias), torch.int64), self.upload(list(bias.values()), torch.float32))
            if bias
            else None,
            banned=self.upload(sorted(banned), torch.int64) if banned else None,
            free_from=arrival.prompt_length + params.min_tokens,
        )
