"""Routing in Triton, two kernels: each token chooses its experts; each expert finds its tokens and gives them places.

It knows what route.py defines. There are no atomics, so places are the same at every run:

    choose   a program a token    best of the row, num_chosen times over
    place    a program an expert  count what goes to experts before it, then go through all choices once more
"""

# mypy: ignore-errors
# (Triton's decorator and builtins carry no types.)

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.launch import next_power_of_2, options, start
from tandem.kernels.route import Routing

FEW, MANY = 256, 2048  # choices that an expert's program looks at at once, where there are few and where there are more
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _choose_kernel(
    scores_ptr, weights_ptr, experts_ptr, X, stride,
    CHOSEN: tl.constexpr, NORMALISE: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes, slots = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    scores = tl.load(scores_ptr + token * stride + lanes, lanes < X, other=NOTHING).to(tl.float32)
    chances = tl.exp(scores - tl.max(scores, axis=0))
    chances /= tl.sum(chances, axis=0)  # all NaN if one score is; the order is of numbers, so that experts exist
    order, left = tl.where(scores == scores, scores, NOTHING), lanes < X
    experts, weights = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.float32)
    for number in tl.static_range(CHOSEN):
        best = tl.max(tl.where(left, order, NOTHING), axis=0)
        expert = tl.min(tl.where(left & (order == best), lanes, EXPERTS), axis=0)
        left = left & (lanes != expert)
        experts = tl.where(slots == number, expert, experts)
        weights = tl.where(slots == number, tl.sum(tl.where(lanes == expert, chances, 0.0), axis=0), weights)
    if NORMALISE:
        weights /= tl.sum(weights, axis=0)
    if PDL == 2:
        gdc_launch_dependents()
    tl.store(experts_ptr + token * CHOSEN + slots, experts, slots < CHOSEN)
    tl.store(weights_ptr + token * CHOSEN + slots, weights, slots < CHOSEN)


@triton.jit(do_not_specialize=["num_choices"])
def _place_kernel(
    experts_ptr, tokens_ptr, places_ptr, ends_ptr, num_choices,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if PDL == 1:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    begin = 0
    for first in range(0, num_choices, BLOCK):
        experts = tl.load(experts_ptr + first + lanes, first + lanes < num_choices, other=0x7FFFFFFF)
        begin += tl.sum((experts < mine).to(tl.int32), axis=0)
    for first in range(0, num_choices, BLOCK):
        choices = first + lanes
        is_mine = tl.load(experts_ptr + choices, choices < num_choices, other=-1) == mine
        ranks = tl.cumsum(is_mine.to(tl.int32), axis=0)
        places = begin + ranks - 1
        tl.store(places_ptr + choices, places, is_mine)
        tl.store(tokens_ptr + places, choices // CHOSEN, is_mine)
        begin += tl.sum(is_mine.to(tl.int32), axis=0)
    if PDL == 2:
        gdc_launch_dependents()
    tl.store(ends_ptr + mine, begin)


def route_triton(scores_TX: Tensor, num_chosen: int, normalise: bool) -> Routing:
    """See route_torch."""
    num_tokens, num_experts = scores_TX.shape
    num_choices, device = num_tokens * num_chosen, scores_TX.device
    assert scores_TX.stride(1) == 1 and num_chosen <= num_experts
    weights_TC = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=device)
    experts_TC = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=device)
    tokens_A, places_A = (torch.empty(num_choices, dtype=torch.int32, device=device) for _ in range(2))
    ends_X = torch.empty(num_experts, dtype=torch.int32, device=device)
    if not num_tokens:
        return Routing(weights_TC, tokens_A, places_A, ends_X.zero_())
    start(_choose_kernel, (num_tokens,),
        scores_TX, weights_TC, experts_TC, num_experts, scores_TX.stride(0),
        CHOSEN=num_chosen, NORMALISE=normalise, EXPERTS=next_power_of_2(num_experts),
        SLOTS=next_power_of_2(num_chosen),
        **options(scores_TX, "route", num_warps=1),
    )  # fmt: skip
    block = FEW if num_choices <= FEW else MANY
    start(_place_kernel, (num_experts,),
        experts_TC, tokens_A, places_A, ends_X, num_choices, CHOSEN=num_chosen, BLOCK=block,
        **options(scores_TX, "route", num_warps=2 if block == FEW else 8),
    )  # fmt: skip
    return Routing(weights_TC, tokens_A, places_A, ends_X)
