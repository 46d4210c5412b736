"""From logits to token ids without a sort: greedy, temperature, top-k, top-p, min-p, with noise that is a function.

It knows logits and per-row parameters; penalties, biases and grammars were applied before.

The noise of (seed, position, id) is one word of Philox4x32-7 (Salmon et al. 2011), so a draw depends on nothing else:
neither on neighbours nor on how the vocabulary is cut over programs. A sample is the argmax over the kept ids of
logit / temperature - log(-log(uniform)) (the Gumbel-max trick). If the argmax over all ids is among the kept ones, it
is also the argmax over those; if not, every id with a logit no higher than its is dropped and the argmax is taken
again. So the kept set is never built: one looks whether a *candidate* is in it, by the mass and the count above it
(rejection as in FlashInfer's sampler, but with the noise held fixed, so that the result is exact).
"""

import torch
from torch import Tensor

from tandem.kernels.launch import runs_triton

ROUNDS = 7
WINNER = 16  # int64 a winner lies apart from the next: 128 bytes, so that programs seldom queue for one line
NOBODY = -(1 << 63)
LANES = 1024  # ids base + lane + 1024·word share a counter: base // 4096 · 1024 + lane


def uniform_torch(seeds_R: Tensor, positions_R: Tensor, num_ids: int) -> Tensor:
    """Uniform numbers in (0, 1), float32 [R, num_ids]: Philox4x32-7, key seed, counter (id group, position)."""
    ids = torch.arange(num_ids, device=seeds_R.device)
    counters, words = (ids // (4 * LANES)) * LANES + ids % LANES, (ids // LANES) % 4
    low = 0xFFFFFFFF
    state = [
        counters.expand(len(seeds_R), -1), (positions_R.long() & low)[:, None].expand(-1, num_ids),
        torch.zeros(len(seeds_R), num_ids, dtype=torch.int64, device=ids.device),
        torch.zeros(len(seeds_R), num_ids, dtype=torch.int64, device=ids.device),
    ]  # fmt: skip
    key = [(seeds_R.long() & low)[:, None], ((seeds_R.long() >> 32) & low)[:, None]]
    for _ in range(ROUNDS):
        (high_b, low_b), (high_a, low_a) = _multiply(0xCD9E8D57, state[2]), _multiply(0xD2511F53, state[0])
        state = [high_b ^ state[1] ^ key[0], low_b, high_a ^ state[3] ^ key[1], low_a]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    drawn = torch.stack(state).gather(0, words.expand(1, len(seeds_R), -1))[0]
    return ((drawn >> 8).to(torch.float32) + 0.5) * 2.0**-24


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of two 32-bit words, in int64 arithmetic."""
    upper, lower = (word >> 16) * constant, (word & 0xFFFF) * constant
    total = (upper & 0xFFFF) * 65536 + lower
    return ((upper >> 16) + (total >> 32)) & 0xFFFFFFFF, total & 0xFFFFFFFF


def sample_torch(
    logits_RV: Tensor, temperatures_R: Tensor, top_ks_R: Tensor, top_ps_R: Tensor, min_ps_R: Tensor, seeds_R: Tensor,
    positions_R: Tensor,
) -> Tensor:  # fmt: skip
    """One id a row, int64 [R].

    temperatures_R  float32; 0: greedy (the lowest id among equals).
    top_ks_R        int32; keeps ids with logits at least the k-th highest; 0 or less: off.
    top_ps_R        float32; keeps ids while the mass of strictly higher ones, of what top-k kept, is below p; 1: off.
    min_ps_R        float32; keeps ids at least min_p times as likely as the likeliest; 0: off.
    seeds_R, positions_R   int64; together with the id they fix the noise.
    """
    logits = logits_RV.float()
    num_ids = logits.shape[1]
    scaled = logits / torch.where(temperatures_R > 0, temperatures_R, 1.0)[:, None]
    sorted_RV = scaled.sort(dim=-1, descending=True).values
    ks = torch.where(top_ks_R > 0, top_ks_R, num_ids).clamp(max=num_ids).long()
    kth = sorted_RV.gather(1, (ks - 1)[:, None])
    weights = torch.exp(sorted_RV - sorted_RV[:, :1]) * (sorted_RV >= kth)
    above = weights.cumsum(-1) - weights
    inside = (above < top_ps_R[:, None] * weights.sum(-1, keepdim=True)) | (top_ps_R[:, None] >= 1.0)
    last = torch.where(inside & (sorted_RV >= kth), sorted_RV, torch.inf).amin(-1, keepdim=True)
    least = sorted_RV[:, :1] + torch.log(min_ps_R)[:, None]
    noise = -torch.log(-torch.log(uniform_torch(seeds_R, positions_R, num_ids)))
    score = torch.where((scaled >= last) & (scaled >= least), scaled + noise, -torch.inf)
    return torch.where(temperatures_R > 0, score.argmax(-1), logits.argmax(-1))


def sample(
    logits_RV: Tensor, temperatures_R: Tensor, top_ks_R: Tensor, top_ps_R: Tensor, min_ps_R: Tensor, seeds_R: Tensor,
    positions_R: Tensor,
) -> Tensor:  # fmt: skip
    """See sample_torch. On a GPU two kernels and no sort; nothing is read back, so a graph may hold it."""
    if runs_triton(logits_RV):
        from tandem.kernels.sample_triton import sample_triton

        return sample_triton(logits_RV, temperatures_R, top_ks_R, top_ps_R, min_ps_R, seeds_R, positions_R)
    return sample_torch(logits_RV, temperatures_R, top_ks_R, top_ps_R, min_ps_R, seeds_R, positions_R)


def winners_torch(logits_RV: Tensor) -> Tensor:
    """The best (logit, id) of each row as one int64 [R] that is ordered as they are: the lower id wins among equals.

    Upper half: the float32's bits, those of negative ones reversed, so that they order as integers; lower half:
    2³¹ - 1 - id. So products raise a row's winner by an atomic maximum, in any order, and need not write logits.
    NOBODY: no logit is above -inf, NaN among them.
    """
    logits = torch.where(logits_RV == 0, 0.0, logits_RV.float())  # -0.0 equals 0.0
    bits = logits.contiguous().view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys = (order << 32) | (0x7FFFFFFF - torch.arange(logits.shape[1], device=logits.device))
    return torch.where(logits > -torch.inf, keys, NOBODY).amax(-1)


def greedy(logits_RV: Tensor) -> Tensor:
    """The id of the highest logit of each row, int64 [R]; the lowest id among equals."""
    if runs_triton(logits_RV):
        from tandem.kernels.sample_triton import greedy_triton

        return greedy_triton(logits_RV)
    return logits_RV.argmax(-1)
