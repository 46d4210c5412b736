"""Sampling on a GPU: which rows a kernel alone can serve, their parameters as arrays, and the longer way for the rest.

It knows rows and kernels; it does not know streams or graphs. All random draws go through one kernel whose noise is a
function of seed, position and id, so that a row's token does not depend on the path that its neighbours call for.

    greedy   every row takes its best id                      inside the graph
    plain    temperature, top-k, top-p, min-p                 inside the graph
    general  penalties, bias, bans, masks, log-probabilities  behind the graph, for the rows that ask
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.sample import greedy as greedy_ids
from tandem.kernels.sample import sample as sample_ids
from tandem.plan import Arrival, Span
from tandem.request import SamplingParams
from tandem.runner.batch import Packed
from tandem.runner.outcome import Drawn, draw_prompts
from tandem.sampling.logprobs import logprobs_of
from tandem.sampling.philox import derived_seed
from tandem.sampling.rows import SMALLEST_TEMPERATURE, SamplerRows
from tandem.sampling.sample import process

__all__ = ["GENERAL", "GREEDY", "NUMBERS", "PLAIN", "DeviceSampling"]

GREEDY, PLAIN, GENERAL = "greedy", "plain", "general"
NUMBERS = {
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "top_ps": torch.float32,
    "min_ps": torch.float32,
    "seeds": torch.int64,
}
"""What the kernel needs of each row, in the order of its arguments."""


class DeviceSampling:
    """Parameters of all rows on the host, and of those that need the general way on the device.

    num_tokens  ids that may be sampled; the rows of the output matrix behind them are padding.
    lost        rows whose request found no memory when it arrived: they must not be sampled until they are left.
    """

    def __init__(
        self, num_rows: int, num_logits: int, device: torch.device, seed: int, num_tokens: int | None = None
    ) -> None:
        self.samplers = SamplerRows(num_rows, num_logits, device, seed, num_tokens=num_tokens)
        self.num_tokens = self.samplers.num_tokens
        self._seed = seed
        self._numbers: dict[str, np.ndarray] = {
            "temperatures": np.zeros(num_rows, np.float32),
            "top_ks": np.zeros(num_rows, np.int32),
            "top_ps": np.ones(num_rows, np.float32),
            "min_ps": np.zeros(num_rows, np.float32),
            "seeds": np.zeros(num_rows, np.int64),
        }
        self._general_R = np.zeros(num_rows, dtype=bool)
        self.lost: set[int] = set()

    def depart(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._general_R[row] = False
            self.lost.discard(row)
            self.samplers.depart(row)

    def arrive(self, arrival: Arrival) -> None:
        """Copies to the device only for a row of the general way; without memory the row is lost."""
        row, params, numbers = arrival.row, arrival.params, self._numbers
        greedy = params.greedy or params.temperature < SMALLEST_TEMPERATURE
        numbers["temperatures"][row] = 0.0 if greedy else params.temperature
        numbers["top_ks"][row] = max(params.top_k, 0)
        numbers["top_ps"][row], numbers["min_ps"][row] = params.top_p, params.min_p
        if not greedy:
            seed = params.seed
            numbers["seeds"][row] = derived_seed(self._seed, arrival.request) if seed is None else seed
        self._general_R[row] = False
        if _is_general(params):
            try:
                self.samplers.arrive(arrival)
                self._general_R[row] = True
            except torch.OutOfMemoryError:
                self.lost.add(row)

    def path(self, rows_R: np.ndarray, masked: bool) -> str:
        """What the rows of a step call for. masked: some of them are bound by a grammar."""
        if masked or self._general_R[rows_R].any():
            return GENERAL
        return PLAIN if self._numbers["temperatures"][rows_R].any() else GREEDY

    def arrays(self, rows_R: np.ndarray) -> dict[str, np.ndarray]:
        """The kernel's arguments for these rows, to be sent."""
        return {name: column[rows_R] for name, column in self._numbers.items()}

    def choose(self, logits_RV: Tensor, numbers: Mapping[str, Tensor] | None, positions_R: Tensor | None) -> Tensor:
        """Ids, int64 [R]. numbers: NUMBERS on the device, None: all greedy. Safe to capture."""
        logits_RV = logits_RV[:, : self.num_tokens]
        if numbers is None:
            return greedy_ids(logits_RV)
        assert positions_R is not None
        temperatures_R, top_ks_R, top_ps_R, min_ps_R, seeds_R = (numbers[name] for name in NUMBERS)
        return sample_ids(logits_RV, temperatures_R, top_ks_R, top_ps_R, min_ps_R, seeds_R, positions_R)

    def draw(
        self, packed: Packed, path: str, hidden_RE: Tensor, logits_of: Callable[..., Tensor],
        numbers: Mapping[str, Tensor] | None, positions_R: Tensor | None,
    ) -> Drawn:  # fmt: skip
        """Sample outside of a graph, by any path, and compute the log-probabilities that rows asked for.

        The counts of penalties change last: if memory runs out before that, the step may be repeated.
        """
        drawn, special, spans = Drawn(None), None, [span for span in packed.plan.spans if span.samples]
        if packed.num_samples:
            raw_RV = logits_of(hidden_RE[: packed.num_samples], path != GENERAL)
            logits_RV = raw_RV[:, : self.num_tokens]
            if path == GENERAL:
                special = self._special(packed, spans)
                logits_RV = self._processed(raw_RV, packed, spans, special)
            drawn.tokens_R = self.choose(logits_RV, numbers, positions_R)
            if special is not None:
                self._logprobs(packed, spans, raw_RV, drawn)
        draw_prompts(packed, hidden_RE, logits_of, self.samplers, drawn)
        if special is not None and drawn.tokens_R is not None:
            self._record(spans, special, drawn.tokens_R)
        return drawn

    def _special(self, packed: Packed, spans: Sequence[Span]) -> list[int]:
        """Places of the rows whose logits must be changed or kept."""
        special = [place for place, span in enumerate(spans) if self._general_R[span.row]]
        masked = {row for row, _ in packed.plan.masks}
        assert masked <= {spans[place].row for place in special}, "a mask for a row without a grammar"
        return special

    def _processed(self, raw_RV: Tensor, packed: Packed, spans: Sequence[Span], special: list[int]) -> Tensor:
        """A copy with the special rows changed, its rows as far apart as those of logits that need no change."""
        logits_RV = raw_RV.clone()[:, : self.num_tokens]
        rows = [spans[place].row for place in special]
        positions = [spans[place].start + spans[place].length for place in special]
        index_D, rows_D = (self.samplers.upload(values, torch.int64) for values in (special, rows))
        changed_DV = process(logits_RV[index_D], self.samplers, rows, rows_D, positions, packed.plan.masks)
        return logits_RV.index_copy_(0, index_D, changed_DV)

    def _record(self, spans: Sequence[Span], special: list[int], tokens_R: Tensor) -> None:
        """Count the sampled ids of rows with penalties."""
        penalised = [place for place in special if self.samplers.facts[spans[place].row].penalised]
        if penalised:
            index_D = self.samplers.upload(penalised, torch.int64)
            rows_D = self.samplers.upload([spans[place].row for place in penalised], torch.int64)
            self.samplers.counts.record(self.samplers.gather_penalties(rows_D)[3], tokens_R[index_D])

    def _logprobs(self, packed: Packed, spans: Sequence[Span], raw_RV: Tensor, drawn: Drawn) -> None:
        facts = [self.samplers.facts.get(span.row) for span in spans]
        wanted = [(place, fact.logprobs) for place, fact in enumerate(facts) if fact and fact.logprobs is not None]
        if wanted:
            assert drawn.tokens_R is not None
            sampling = packed.sampling_spans
            drawn.wanted = [(sampling[place], top) for place, top in wanted]
            index_D = self.samplers.upload([place for place, _ in wanted], torch.int64)
            most = max(top for _, top in wanted)
            drawn.logprobs = logprobs_of(raw_RV[index_D], drawn.tokens_R[index_D], most)


def _is_general(params: SamplingParams) -> bool:
    return bool(
        params.uses_penalties
        or params.logit_bias
        or params.min_tokens
        or params.logprobs is not None
        or params.constraint is not None
    )
