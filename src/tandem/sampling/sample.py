"""Logits to ids, for the whole batch at once. It knows rows and numbers; it does not know requests or text.

    raw logits ──► bias ──► penalties ──► bans before min_tokens ──► grammar masks ──► best id           (greedy rows)
        │                                                                         └──► temperature, top-k, top-p,
        └──► logprobs of the model's own distribution                                  min-p, one draw  (random rows)

**Truncation keeps by value.** A row's truncations become one threshold on its probabilities: what lies below it goes,
ties at it stay. The draw then inverts the cumulative distribution in the order of ids, with one uniform number that is
a pure function of the request's seed and the token's position. Every sum runs inside one row. So a row's token depends
neither on its neighbours nor on the path by which the threshold was found.

Shape legend: R rows sampled in this step, V rows of the output matrix, K best entries, W 32-bit words of a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.sampling.logprobs import LogprobRows, logprobs_of
from tandem.sampling.philox import uniforms
from tandem.sampling.rows import SamplerRows
from tandem.sampling.truncate import threshold
from tandem.sampling.upload import to_device

BANNED = -1e30
"""Logit of an id banned before min_tokens. It is finite, so that a grammar that leaves only banned ids has its way."""


@dataclass(slots=True)
class Sampled:
    """ids_R: sampled ids, int64 [R], on the device. The raw logits stay here until logprobs are asked for."""

    ids_R: Tensor
    logits_RV: Tensor

    def logprobs(self, wanted: Sequence[int], num_top: int) -> LogprobRows:
        """Logprobs of the rows of this step that are wanted, with num_top alternatives each."""
        if len(wanted) == len(self.ids_R):
            return logprobs_of(self.logits_RV, self.ids_R, num_top)
        index_W = torch.tensor(list(wanted), dtype=torch.int64, device=self.ids_R.device)
        return logprobs_of(self.logits_RV[index_W], self.ids_R[index_W], num_top)


def sample(
    logits_RV: Tensor,
    rows: SamplerRows,
    row_ids: Sequence[int],
    positions: Sequence[int],
    masks: Sequence[tuple[int, bytes]] = (),
    *,
    rows_R: Tensor | None = None,
    positions_R: Tensor | None = None,
) -> Sampled:
    """Sample one id for each row.

    logits_RV    float32 [R, V]; never written to.
    row_ids      the row of each, distinct; positions: the index in its request (prompt + output) of the new token.
    masks        (row, bitmask of allowed ids as in StepPlan.masks); rows that are not in this step are ignored.
    rows_R, positions_R   the same two on the device, int64, for runners that have them there already.

    Nothing is read back to the host on CUDA. Counts for penalties are brought up to date with the sampled ids.
    """
    facts = [rows.facts[row] for row in row_ids]
    if rows_R is None:
        rows_R = rows.upload(row_ids, torch.int64)
    raw_RV, logits_RV = logits_RV, logits_RV[:, : rows.num_tokens]
    logits_RV = process(logits_RV, rows, row_ids, rows_R, positions, masks)
    random = [index for index, fact in enumerate(facts) if fact.random]
    if not random:
        ids_R = logits_RV.argmax(dim=-1)
    else:
        if positions_R is None:
            positions_R = rows.upload(positions, torch.int64)
        if len(random) == len(facts):
            ids_R = draw(logits_RV, rows, [*row_ids], rows_R, positions_R)
        else:
            index_D = rows.upload(random, torch.int64)
            ids_D = draw(
                logits_RV[index_D], rows, [row_ids[i] for i in random], rows_R[index_D], positions_R[index_D]
            )  # fmt: skip
            ids_R = logits_RV.argmax(dim=-1).index_copy_(0, index_D, ids_D)
    if any(fact.penalised for fact in facts):
        rows.counts.record(rows.gather_penalties(rows_R)[3], ids_R)
    return Sampled(ids_R, raw_RV)


def process(
    logits_RV: Tensor, rows: SamplerRows, row_ids: Sequence[int], rows_R: Tensor, positions: Sequence[int],
    masks: Sequence[tuple[int, bytes]],
) -> Tensor:  # fmt: skip
    """Bias, penalties, bans and masks: the logits themselves when no row asks for any, else a changed copy."""
    facts = [rows.facts[row] for row in row_ids]
    index_of = {row: index for index, row in enumerate(row_ids)}
    masks = [(index_of[row], mask) for row, mask in masks if row in index_of]
    bans = [i for i, fact in enumerate(facts) if fact.banned is not None and positions[i] < fact.free_from]
    biased = [i for i, fact in enumerate(facts) if fact.bias is not None]
    penalised = [i for i, fact in enumerate(facts) if fact.penalised]
    if not (masks or bans or biased or penalised):
        return logits_RV
    logits_RV = logits_RV.clone()
    for index in biased:
        bias = facts[index].bias
        assert bias is not None
        logits_RV[index].index_add_(0, *bias)
    if penalised:
        index_D = rows.upload(penalised, torch.int64)
        logits_RV.index_copy_(0, index_D, penalise(logits_RV[index_D], rows, rows_R[index_D]))
    for index in bans:
        banned = facts[index].banned
        assert banned is not None
        logits_RV[index].index_fill_(0, banned, BANNED)
    if masks:
        index_D = rows.upload([index for index, _ in masks], torch.int64)
        allowed_DV = unpack_masks([mask for _, mask in masks], logits_RV.shape[1], rows)
        logits_RV.index_copy_(0, index_D, logits_RV[index_D].masked_fill_(~allowed_DV, -torch.inf))
    return logits_RV


def penalise(logits_RV: Tensor, rows: SamplerRows, rows_R: Tensor) -> Tensor:
    """Repetition over prompt and output (CTRL, Keskar et al. 2019): positive logits divided, negative multiplied.

    Then, over the output alone, as in the OpenAI API: minus frequency · count, minus presence if there is any.
    """
    repetition_R, presence_R, frequency_R, tables_R = rows.gather_penalties(rows_R)
    num_tokens = logits_RV.shape[1]
    counts_RV = rows.counts.output_CV[tables_R, :num_tokens]
    in_output_RV = counts_RV > 0
    seen_RV = rows.counts.seen_CV[tables_R, :num_tokens] | in_output_RV
    factor_R1 = repetition_R.float()[:, None]
    repeated_RV = torch.where(logits_RV > 0, logits_RV / factor_R1, logits_RV * factor_R1)
    logits_RV = torch.where(seen_RV, repeated_RV, logits_RV)
    return logits_RV - frequency_R.float()[:, None] * counts_RV - presence_R.float()[:, None] * in_output_RV


def unpack_masks(masks: Sequence[bytes], num_ids: int, rows: SamplerRows) -> Tensor:
    """Bitmasks (little-endian words of 32) → bool [len(masks), num_ids]; ids that a mask does not reach are False."""
    num_bytes = (num_ids + 7) // 8
    flat = b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks)
    packed = to_device(torch.frombuffer(bytearray(flat), dtype=torch.uint8), rows.device)
    shifts_8 = torch.arange(8, dtype=torch.uint8, device=rows.device)
    bits = (packed.view(len(masks), num_bytes, 1) >> shifts_8) & 1
    return bits.view(len(masks), -1)[:, :num_ids].bool()


def draw(logits_RV: Tensor, rows: SamplerRows, row_ids: Sequence[int], rows_R: Tensor, positions_R: Tensor) -> Tensor:
    """Temperature, truncation, one draw by inversion of the cumulative distribution. Ids, int64 [R]."""
    numbers = rows.gather(rows_R)
    scaled_RV = logits_RV / numbers.temperature_R.float()[:, None]
    weights_RV = torch.softmax(scaled_RV, dim=-1)
    truncated = [index for index, row in enumerate(row_ids) if rows.facts[row].truncates]
    if truncated:
        facts = [rows.facts[row_ids[index]] for index in truncated]
        if len(truncated) == len(row_ids):
            floor_R1 = threshold(weights_RV, numbers, facts)[:, None]
        else:
            index_D = rows.upload(truncated, torch.int64)
            part = type(numbers)(*(column_R[index_D] for column_R in numbers))
            floor_D = threshold(weights_RV[index_D], part, facts)
            floor_R1 = weights_RV.new_zeros(len(row_ids)).index_copy_(0, index_D, floor_D)[:, None]
        weights_RV = weights_RV.masked_fill_(weights_RV < floor_R1, 0.0)
    return invert(weights_RV, uniforms(numbers.seed_R, positions_R))


def invert(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds uniform · total: ids of zero weight are never drawn.

    The weights are used up: their memory holds the sums.
    """
    cumulative_RV = weights_RV.cumsum_(dim=-1)
    total_R = cumulative_RV[:, -1]
    # Rounding may lift the product to the total itself, which no id exceeds.
    target_R = (uniforms_R * total_R).to(cumulative_RV.dtype)
    target_R = torch.minimum(target_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    ids_R = torch.searchsorted(cumulative_RV, target_R[:, None], right=True)[:, 0]
    return ids_R.clamp_(max=cumulative_RV.shape[1] - 1)
