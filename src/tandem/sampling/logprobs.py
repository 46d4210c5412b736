"""Log-probabilities of tokens under the model's own distribution. It does not know how the tokens were chosen.

V-wide floats exist for a fixed number of positions at a time, whatever the length of the prompt (C09).

Legend: R positions, V rows of the output matrix, K alternatives, T tokens of a span, E hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.request import TokenLogprobs

CHUNK = 64
"""Positions whose V-wide rows exist at once."""
LEAST = -9999.0
"""Stands for a probability of zero, as in the OpenAI API: JSON has no infinity."""


@dataclass(slots=True)
class LogprobRows:
    """Results on the device, small: R·(2K + 3) numbers. Copy the tensors home, then ``entries``.

    chosen_R   logprob of the token itself.     ranks_R  how many ids are better, plus one.
    tokens_R   the tokens.                      top_ids_RK, top_RK  the K best, best first.
    """

    tokens_R: Tensor
    chosen_R: Tensor
    ranks_R: Tensor
    top_ids_RK: Tensor
    top_RK: Tensor

    def home(self, *, non_blocking: bool = False) -> "LogprobRows":
        """The same on the host. With non_blocking, valid only once the caller's event has passed."""
        return LogprobRows(*(tensor.to("cpu", non_blocking=non_blocking) for tensor in self._tensors()))

    def entries(self, num_top: int | Sequence[int]) -> list[TokenLogprobs]:
        """One entry a position, with its own number of alternatives. Only for tensors that are home."""
        wanted = [num_top] * len(self.tokens_R) if isinstance(num_top, int) else num_top
        columns = zip(*(tensor.tolist() for tensor in self._tensors()), wanted, strict=True)
        return [
            TokenLogprobs(token, chosen, rank, _alternatives(token, chosen, top_ids[:k], top[:k]))
            for token, chosen, rank, top_ids, top, k in columns
        ]

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.tokens_R, self.chosen_R, self.ranks_R, self.top_ids_RK, self.top_RK


def _alternatives(token: int, chosen: float, ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    """Best first, ties by id; a token that ties with the best comes first, since it is what greedy would choose."""
    pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    if pairs and chosen >= pairs[0][1] and token != pairs[0][0]:
        others = [pair for pair in pairs if pair[0] != token]
        pairs = [(token, chosen), *others][: len(pairs)]
    return tuple(pairs)


def logprobs_of(logits_RV: Tensor, tokens_R: Tensor, num_top: int, chunk: int = CHUNK) -> LogprobRows:
    """Logprobs of one token a row and of the num_top best ids. logits float32 [R, V], tokens int64 [R]."""
    starts = range(0, max(len(tokens_R), 1), chunk)
    return _joined([_chunk(logits_RV[s : s + chunk], tokens_R[s : s + chunk], num_top) for s in starts])


def prompt_logprobs(
    hidden_TE: Tensor, project: Callable[[Tensor], Tensor], tokens_T: Tensor, num_top: int, chunk: int = CHUNK
) -> LogprobRows:
    """Logprobs of prompt tokens, T·V floats never existing at once.

    hidden_TE  final hidden states of positions start .. start+T.
    project    hidden [n, E] → logits [n, V].
    tokens_T   the token that follows each: those of positions start+1 .. start+T+1.
    """
    starts = range(0, max(len(tokens_T), 1), chunk)
    parts = [_chunk(project(hidden_TE[s : s + chunk]).float(), tokens_T[s : s + chunk], num_top) for s in starts]
    return _joined(parts)


def _chunk(logits_RV: Tensor, tokens_R: Tensor, num_top: int) -> LogprobRows:
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    chosen_R1 = logprobs_RV.gather(1, tokens_R[:, None])
    ranks_R = 1 + (logprobs_RV > chosen_R1).sum(dim=-1)
    top_RK, top_ids_RK = logprobs_RV.topk(min(num_top, logits_RV.shape[1]), dim=-1)
    return LogprobRows(tokens_R, chosen_R1[:, 0].clamp(LEAST, 0.0), ranks_R, top_ids_RK, top_RK.clamp(LEAST, 0.0))


def _joined(parts: list[LogprobRows]) -> LogprobRows:
    if len(parts) == 1:
        return parts[0]
    return LogprobRows(*(torch.cat(tensors) for tensors in zip(*(part._tensors() for part in parts), strict=True)))
