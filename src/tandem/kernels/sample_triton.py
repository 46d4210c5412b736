"""Sampling in Triton, two kernels: candidates of each stretch of the vocabulary, then the row's decision.

It knows what sample.py defines. The second kernel holds a row in cache and looks at it again only as often as the
candidate falls outside of the kept set: with top-p 0.95, one look in 95 of 100 draws.
"""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.launch import interpreted, num_multiprocessors, options, start
from tandem.kernels.sample import LANES, NOBODY, ROUNDS, WINNER

NOTHING = tl.constexpr(float("-inf"))
NO_WINNER, WINNER_SIZE = tl.constexpr(NOBODY), tl.constexpr(WINNER)


@triton.jit
def challenge(logits, rows, tokens, winners_ptr, num_tokens, num_ids):
    """Raise each token's winner (winners_torch) by these logits, float32 [rows, tokens]; rows are ids."""
    logits = tl.where(logits == 0.0, 0.0, logits)
    bits = logits.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - rows)[:, None].to(tl.int64)
    best = tl.max(tl.where((logits > NOTHING) & (rows < num_ids)[:, None], keys, NO_WINNER), axis=0)
    targets, is_there = winners_ptr + tokens.to(tl.int64) * WINNER_SIZE, tokens < num_tokens
    # Few programs find something better; those that do not must not queue for the line. What is read may be old.
    wins = is_there & (best > tl.load(targets, is_there, other=NO_WINNER, cache_modifier=".cg"))
    tl.atomic_max(targets, best, wins, sem="relaxed")


@triton.jit
def _log(x, FAST: tl.constexpr):
    """Natural logarithm; FAST: the hardware's, good to 2**-22 absolutely."""
    if FAST:
        log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        return log2 * 0.6931471805599453
    return tl.log(x)


@triton.jit
def _noise(word, FAST: tl.constexpr):
    """Gumbel noise of a random word. Draws are won near uniform = 1, where the logarithm is taken as a series."""
    number = (word >> 8).to(tl.float32)
    below = (16777215.5 - number) * 5.9604644775390625e-08  # 1 - uniform, exactly
    series = below * (1.0 + below * (0.5 + below * (0.33333334 + below * 0.25)))
    exponential = tl.where(below < 0.03125, series, -_log((number + 0.5) * 5.9604644775390625e-08, FAST))
    return -_log(exponential, FAST)


@triton.jit
def _better(score, index, other_score, other_index):
    """The higher score; among equals the lower index."""
    wins = (other_score > score) | ((other_score == score) & (other_index < index))
    return tl.where(wins, other_score, score), tl.where(wins, other_index, index)


@triton.jit
def _logits(row_ptr, ids, V, readable):
    """Of these ids, float32; NOTHING for those from V on. readable: V, rounded up to a whole read where the row is so
    long, since a mask that ends within 16 bytes costs a request for each id."""
    logits = tl.load(row_ptr + ids, ids < readable, other=NOTHING).to(tl.float32)
    return tl.where(ids < V, logits, NOTHING)


@triton.jit
def _draw(
    row_ptr, low, high, V, readable, inverse, anchor, seed, position, floor, at_least,
    LANES: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The best (score, id) among ids low .. high whose scaled logit is above floor and not below at_least, and the mass
    (relative to exp(anchor)) of all ids low .. high."""
    lanes = tl.arange(0, LANES)
    best = tl.full([LANES], NOTHING, tl.float32)
    best_id = tl.full([LANES], 0x7FFFFFFF, tl.int32)
    mass = tl.zeros([LANES], tl.float32)
    for base in range(low, high, 4 * LANES):
        counter = (base // 4 + lanes).to(tl.uint32)
        zero = tl.zeros([LANES], tl.uint32)
        words = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero, n_rounds=ROUNDS)
        for number in tl.static_range(4):
            ids = base + number * LANES + lanes
            scaled = _logits(row_ptr, ids, V, readable) * inverse
            mass += tl.exp(scaled - anchor)
            kept = (scaled > floor) & (scaled >= at_least)
            score = tl.where(kept, scaled + _noise(words[number], FAST), NOTHING)
            best, best_id = _better(best, best_id, score, ids)
    score, drawn = _reduce(best, best_id)
    return score, drawn, tl.sum(mass, axis=0)


@triton.jit
def _reduce(best, best_id):
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), axis=0)


@triton.jit
def _stretch_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, floats_ptr, ids_ptr, V, readable, row_stride, stretch,
    GREEDY: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # floats: [R, stretches, 3] highest logit, its mass in this stretch, best noisy score; ids: [R, stretches, 2].
    part, row = tl.program_id(0), tl.program_id(1)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    low, high = part * stretch, tl.minimum(part * stretch + stretch, V)
    lanes = tl.arange(0, LANES)
    best = tl.full([LANES], NOTHING, tl.float32)
    best_id = tl.full([LANES], 0x7FFFFFFF, tl.int32)
    for base in range(low, high, 4 * LANES):
        for number in tl.static_range(4):
            ids = base + number * LANES + lanes
            logit = _logits(row_ptr, ids, high, tl.minimum(part * stretch + stretch, readable))
            best, best_id = _better(best, best_id, logit, ids)
    top, top_id = _reduce(best, best_id)
    if PDL == 2:
        gdc_launch_dependents()
    place = row * tl.num_programs(0) + part
    tl.store(floats_ptr + place * 3, top)
    tl.store(ids_ptr + place * 2, top_id)
    if not GREEDY:
        temperature = tl.load(temperatures_ptr + row)
        if temperature > 0.0:
            inverse = 1.0 / temperature
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            anchor = tl.maximum(top * inverse, -3.0e38)
            score, drawn, mass = _draw(
                row_ptr, low, high, V, readable, inverse, anchor, seed, position, NOTHING, NOTHING, LANES, ROUNDS, FAST
            )
            tl.store(floats_ptr + place * 3 + 1, mass)
            tl.store(floats_ptr + place * 3 + 2, score)
            tl.store(ids_ptr + place * 2 + 1, drawn)


@triton.jit
def _above(row_ptr, V, readable, inverse, anchor, bound, BLOCK: tl.constexpr):
    """Mass (relative to exp(anchor)) and number of the ids whose scaled logit is above bound."""
    lanes = tl.arange(0, BLOCK)
    mass, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for base in range(0, V, BLOCK):
        ids = base + lanes
        scaled = _logits(row_ptr, ids, V, readable) * inverse
        higher = scaled > bound
        mass += tl.where(higher, tl.exp(scaled - anchor), 0.0)
        count += higher.to(tl.int32)
    return tl.sum(mass, axis=0), tl.sum(count, axis=0)


@triton.jit
def _count(row_ptr, V, readable, inverse, bounds, BLOCK: tl.constexpr):
    """For each of the eight bounds: how many ids have a scaled logit above it. Vocabularies up to 255 · BLOCK ids."""
    lanes = tl.arange(0, BLOCK)
    some, others = tl.zeros([BLOCK], tl.uint32), tl.zeros([BLOCK], tl.uint32)  # four counts of a byte in each lane
    for base in range(0, V, BLOCK):
        ids = base + lanes
        scaled = _logits(row_ptr, ids, V, readable) * inverse
        for number in tl.static_range(4):
            some += tl.where(scaled > bounds[number], 1 << (8 * number), 0).to(tl.uint32)
            others += tl.where(scaled > bounds[4 + number], 1 << (8 * number), 0).to(tl.uint32)
    return (
        tl.sum((some & 255).to(tl.int32)), tl.sum(((some >> 8) & 255).to(tl.int32)),
        tl.sum(((some >> 16) & 255).to(tl.int32)), tl.sum((some >> 24).to(tl.int32)),
        tl.sum((others & 255).to(tl.int32)), tl.sum(((others >> 8) & 255).to(tl.int32)),
        tl.sum(((others >> 16) & 255).to(tl.int32)), tl.sum((others >> 24).to(tl.int32)),
    )  # fmt: skip


@triton.jit
def _highest_upto(row_ptr, V, readable, inverse, bound, BLOCK: tl.constexpr):
    """The highest scaled logit that is not above bound."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], NOTHING, tl.float32)
    for base in range(0, V, BLOCK):
        ids = base + lanes
        scaled = _logits(row_ptr, ids, V, readable) * inverse
        best = tl.maximum(best, tl.where(scaled <= bound, scaled, NOTHING))
    return tl.max(best, axis=0)


@triton.jit
def _kth(row_ptr, V, readable, inverse, anchor, top_k, BLOCK: tl.constexpr, LOOKS: tl.constexpr):
    """(low, mass above low): the ids above low are the top_k highest, ties with the k-th included.

    At least k ids are above low and fewer than k above high; eight bounds a look. The first look spaces its bounds in
    powers of two, the others evenly. If that does not single out k ids in a few looks (logits that came from bfloat16
    have many ties), the values under high are taken one by one.
    """
    low, high = anchor - 128.0, anchor
    bounds = (
        anchor - 0.5, anchor - 1.0, anchor - 2.0, anchor - 4.0, anchor - 8.0, anchor - 16.0, anchor - 32.0, low
    )  # fmt: skip
    count, looks = V, 0
    while (looks < LOOKS) & (count != top_k):
        counts = _count(row_ptr, V, readable, inverse, bounds, BLOCK)
        enough = False
        for number in tl.static_range(8):  # from the highest bound down: the first with k above it
            if not enough:
                if counts[number] >= top_k:
                    low, count = bounds[number], counts[number]
                    enough = True
                else:
                    high = bounds[number]
        if not enough:  # only before the first k were found: further down
            low = tl.maximum(anchor + 16.0 * (low - anchor), -3.4e38)
        width = (high - low) * 0.125
        bounds = (
            high - width, high - 2.0 * width, high - 3.0 * width, high - 4.0 * width, high - 5.0 * width,
            high - 6.0 * width, high - 7.0 * width, low,
        )  # fmt: skip
        looks += 1
    mass, count = _above(row_ptr, V, readable, inverse, anchor, low, BLOCK)
    searching = count != top_k
    while searching:
        value = _highest_upto(row_ptr, V, readable, inverse, high, BLOCK)
        high = value - tl.abs(value) * 5.9604644775390625e-08 - 2.0e-38  # just below value
        low = high
        mass, count = _above(row_ptr, V, readable, inverse, anchor, low, BLOCK)
        searching = (count < top_k) & (value > NOTHING)
    return low, mass


# The number of stretches follows the rows: one variant must do for all.
@triton.jit(do_not_specialize=["num_stretches"])
def _decide_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, seeds_ptr, positions_ptr, floats_ptr, ids_ptr,
    out_ptr, V, readable, row_stride, num_stretches,
    GREEDY: tl.constexpr, STRETCHES: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    parts = tl.arange(0, STRETCHES)
    if PDL == 2:
        gdc_launch_dependents()
    within = parts < num_stretches
    places = row * num_stretches + parts
    tops = tl.load(floats_ptr + places * 3, within, other=NOTHING)
    top, chosen = _reduce(tops, tl.load(ids_ptr + places * 2, within, other=0x7FFFFFFF))
    temperature = 0.0
    if not GREEDY:
        temperature = tl.load(temperatures_ptr + row)
        if temperature > 0.0:
            inverse = 1.0 / temperature
            row_ptr = logits_ptr + row.to(tl.int64) * row_stride
            anchor = top * inverse
            masses = tl.load(floats_ptr + places * 3 + 1, within, other=0.0)
            mass = tl.sum(tl.where(within, masses * tl.exp(tl.maximum(tops * inverse, -3.0e38) - anchor), 0.0), axis=0)
            _score, chosen = _reduce(
                tl.load(floats_ptr + places * 3 + 2, within, other=NOTHING),
                tl.load(ids_ptr + places * 2 + 1, within, other=0x7FFFFFFF),
            )
            top_k, top_p = tl.load(top_ks_ptr + row), tl.load(top_ps_ptr + row)
            least = anchor + tl.log(tl.load(min_ps_ptr + row))
            limits_k, limits_p = (top_k > 0) & (top_k < V), top_p < 1.0
            floor = tl.full((), NOTHING, tl.float32)
            if limits_k & limits_p:  # top-p counts what top-k kept, so its mass must be known
                floor, mass = _kth(row_ptr, V, readable, inverse, anchor, top_k, BLOCK, 4)
            undecided = limits_k | limits_p | (least > NOTHING)
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            while undecided:
                value = tl.load(row_ptr + tl.minimum(chosen, V - 1)).to(tl.float32) * inverse
                kept = (value > floor) & (value >= least)
                if kept & (limits_k | limits_p):
                    higher_mass, higher_count = _above(row_ptr, V, readable, inverse, anchor, value, BLOCK)
                    kept = (higher_count < top_k) | (not limits_k)
                    kept = kept & ((higher_mass < top_p * mass) | (not limits_p))
                undecided = (not kept) & (value < anchor)
                if undecided:
                    floor = tl.maximum(floor, tl.where(value >= least, value, floor))
                    _score, chosen, _mass = _draw(
                        row_ptr, 0, V, V, readable, inverse, anchor, seed, position, floor, least,
                        LANES, ROUNDS, FAST,
                    )  # fmt: skip
    tl.store(out_ptr + row, tl.minimum(chosen, V - 1).to(tl.int64))


def _stretches(num_rows: int, num_ids: int, device: torch.device) -> tuple[int, int]:
    """(ids a stretch, stretches): about eight programs a multiprocessor, a whole number of noise groups each."""
    groups = triton.cdiv(num_ids, 4 * LANES)
    wanted = min(groups, max(1, 8 * num_multiprocessors(device) // max(num_rows, 1)), 64)
    size = triton.cdiv(groups, wanted) * 4 * LANES
    return size, triton.cdiv(num_ids, size)


def readable_ids(logits_RV: Tensor) -> int:
    """V, rounded up to a whole read if each row, and the storage behind the last one, is so long. See _logits."""
    (num_rows, num_ids), row_stride = logits_RV.shape, logits_RV.stride(0)
    whole = triton.cdiv(num_ids, 16) * 16
    end = logits_RV.storage_offset() + (num_rows - 1) * row_stride + whole  # in the storage's elements
    held = logits_RV.untyped_storage().nbytes() // logits_RV.element_size()
    return whole if whole <= row_stride and end <= held else num_ids


def _launch(logits_RV: Tensor, rows: tuple[Tensor, ...] | None) -> Tensor:
    num_rows, num_ids = logits_RV.shape
    assert logits_RV.stride(1) == 1
    out_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    if not num_rows:
        return out_R
    size, number = _stretches(num_rows, num_ids, logits_RV.device)
    floats = torch.empty((num_rows, number, 3), dtype=torch.float32, device=logits_RV.device)
    ids = torch.empty((num_rows, number, 2), dtype=torch.int32, device=logits_RV.device)
    readable = readable_ids(logits_RV)
    greedy = rows is None
    temperatures, top_ks, top_ps, min_ps, seeds, positions = rows or (floats, ids, floats, floats, ids, ids)
    fixed = {"GREEDY": greedy, "LANES": LANES, "ROUNDS": ROUNDS, "FAST": not interpreted()}
    start(_stretch_kernel, (number, num_rows),
        logits_RV, temperatures, seeds, positions, floats, ids, num_ids, readable, logits_RV.stride(0), size, **fixed,
        **options(logits_RV, "sample", num_warps=4),
    )  # fmt: skip
    start(_decide_kernel, (num_rows,),
        logits_RV, temperatures, top_ks, top_ps, min_ps, seeds, positions, floats, ids, out_R, num_ids,
        readable, logits_RV.stride(0), number, STRETCHES=64, BLOCK=1024 if greedy else 8192, **fixed,
        **options(logits_RV, "sample", num_warps=1 if greedy else 16),
    )  # fmt: skip
    return out_R


def sample_triton(
    logits_RV: Tensor, temperatures_R: Tensor, top_ks_R: Tensor, top_ps_R: Tensor, min_ps_R: Tensor, seeds_R: Tensor,
    positions_R: Tensor,
) -> Tensor:  # fmt: skip
    """See sample_torch."""
    return _launch(logits_RV, (temperatures_R, top_ks_R, top_ps_R, min_ps_R, seeds_R, positions_R))


def greedy_triton(logits_RV: Tensor) -> Tensor:
    """See greedy."""
    return _launch(logits_RV, None)
