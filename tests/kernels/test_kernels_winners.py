"""The best id of each token without its logits: order of winners, products that raise them, the step's end."""

import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm90 import ptx_of

from tandem.kernels import linear as choice
from tandem.kernels.launch import has_streams
from tandem.kernels.sample import NOBODY, WINNER, winners_torch
from tandem.kernels.step import finish_torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [  # of the interpreter's numpy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
LOGITS = st.sampled_from([0.0, -0.0, 1.5, -1.5, 3.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40])


def id_of(winner):
    return 0x7FFFFFFF - (winner & 0x7FFFFFFF)


@settings(deadline=None, max_examples=300)
@given(st.lists(LOGITS, min_size=1, max_size=9))
def test_winners_are_ordered_as_logits_are_and_lower_ids_win(logits):
    winner = int(winners_torch(torch.tensor([logits]))[0])
    known = [(logit, -place) for place, logit in enumerate(logits) if logit > -float("inf")]
    assert (id_of(winner) if known else winner) == (-max(known)[1] if known else NOBODY)


@settings(deadline=None, max_examples=200)
@given(*[st.floats(-(2.0**99), 2.0**99, width=32)] * 2)
def test_a_higher_logit_has_the_higher_winner(one, other):
    first, second = winners_torch(torch.tensor([[one], [other]])).tolist()
    assert (first > second, first < second) == (one > other, one < other)


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, torch.float16)


def nobody(num_tokens):
    return torch.full((num_tokens, WINNER), NOBODY, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize(("tokens", "rows", "num_ids", "size"), [(1, 64, 64, 96), (5, 150, 131, 80), (17, 70, 1, 64)])
def test_a_product_raises_winners_by_ids_that_may_be_chosen(tokens, rows, num_ids, size):
    from tandem.kernels.linear_triton import skinny

    x, weight, winners = rand(tokens, size), rand(rows, size, seed=1), nobody(tokens + 1)
    how = {"tokens": 16, "rows": 64, "step": 32}
    assert skinny(x, weight, None, num_ids=num_ids, winners_TW=winners, **how) is winners
    logits = skinny(x, weight, None, **how)[:, :num_ids]
    assert torch.equal(winners[:tokens, 0], winners_torch(logits))
    assert (winners[:, 1:] == NOBODY).all() and winners[tokens, 0] == NOBODY, "nothing beside them is written"
    higher = winners_torch(torch.full((tokens, 1), 1e4))
    winners[:tokens, 0] = higher.to(DEVICE)
    skinny(x, weight, None, num_ids=num_ids, winners_TW=winners, **how)
    assert torch.equal(winners[:tokens, 0].cpu(), higher), "raised, never lowered"


def test_a_token_without_any_number_has_no_winner_and_fails_alone():
    from tandem.kernels.linear_triton import skinny

    x, weight, winners = rand(2, 64), rand(70, 64, seed=1), nobody(2)
    x[1] = float("nan")
    skinny(x, weight, None, tokens=16, rows=64, step=32, num_ids=70, winners_TW=winners)
    best = id_of(int(winners[0, 0]))
    last, home = torch.zeros(3, dtype=torch.int64), torch.zeros((1, 2), dtype=torch.int64)
    turn, finite = torch.zeros(1, dtype=torch.int32), torch.ones(2, 8)
    winners = winners.cpu()
    finish_torch(winners, finite, torch.tensor([0, 1]), last, home, turn)
    assert home.tolist() == [[best, -1]] and last.tolist() == [best, 0, 0]
    assert (winners == NOBODY).all(), "as the next step needs them"


def all_kinds(tokens, rows, num_ids, size, dtype):
    """Activations and weights whose logits are all below zero, but for a token of zeros, one of NaN and equals; those
    of ids that may not be chosen are the highest."""
    x, weight = rand(tokens, size).abs().to(dtype), -rand(rows, size, seed=1).abs().to(dtype)
    weight[num_ids // 2 : num_ids] = weight[: num_ids - num_ids // 2].clone()  # of equals the lower id must win
    weight[num_ids:] *= -100.0
    if tokens > 2:
        x[tokens // 2], x[tokens - 1] = 0.0, float("nan")
    return x, weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_winners_are_those_of_the_logits_that_are_not_written(dtype):
    from tandem.kernels.linear_triton import skinny

    for tokens, rows, num_ids, size in ((5, 150, 131, 96), (1, 64, 63, 32), (17, 200, 200, 64)):
        x, weight, how = *all_kinds(tokens, rows, num_ids, size, dtype), {"tokens": 16, "rows": 64, "step": 32}
        winners = skinny(x, weight, None, num_ids=num_ids, winners_TW=nobody(tokens), **how)
        want = winners_torch(skinny(x, weight, None, **how)[:, :num_ids])
        assert torch.equal(winners[:, 0], want)
        assert (id_of(want[: tokens // 2]) < num_ids).all() and (tokens < 3 or want[-1] == NOBODY)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 8, 13, 16, 30, 32, 47, 64])
def test_winners_on_a_card_are_those_of_the_logits_that_are_not_written(tokens, dtype):
    for rows, num_ids, size in ((65536 + 40, 65536 - 30, 128), (70001, 69901, 576)):
        x, weight = all_kinds(tokens, rows, num_ids, size, dtype)
        for invariant in (False, True):
            winners = nobody(tokens)
            if choice.raise_winners(x, weight, num_ids, winners, invariant):
                want = winners_torch(choice.linear(x, weight, None, invariant)[:, :num_ids])
                assert torch.equal(winners[:, 0], want), "tiles are the same, so logits are, to the bit"
            else:
                assert not has_streams(x.device) and (tokens > 32 or invariant)


WHERE = """
import dataclasses

from tandem.kernels import linear
from tandem.kernels.launch import Target, planning
from tandem.layers.linear import linear_scheme
from tandem.models.named import named_config
from tandem.models.registry import build, spec_from_config
from tandem.runner import variants

asked = []
linear._product = lambda x, weight, bias, tiles, activation=None: asked.append((tiles["num_ids"], tiles["num_parts"]))

def where(capability, vocabulary, rows, dtype=torch.bfloat16, exact=False, num_ids=None, **more):
    spec = spec_from_config(dict(named_config("qwen3-0.6b"), vocab_size=vocabulary))
    spec, place = dataclasses.replace(variants._few_layers(spec), **more), torch.device("meta")
    with planning(Target(capability, 132)), torch.inference_mode():
        model = build(spec, dtype, place, linear=linear_scheme(None, place, exact), max_length=64)
        hidden = torch.empty(rows, 1024, dtype=dtype, device=place)
        winners = torch.empty(rows, 16, dtype=torch.int64, device=place)
        return model.raise_winners(hidden, num_ids or vocabulary, winners)

big, nine, eight = 151936, (9, 0), (8, 0)
assert where(nine, big, 64, num_ids=151669) and where(nine, big, 1, exact=True) and where(eight, big, 32)
assert asked == [(151669, 1), (big, 1), (big, 1)], asked
refused = [
    where(nine, big, 65), where(nine, 32000, 8), where(nine, 4096, 8), where(nine, big, 8, logit_softcap=30.0),
    where(nine, big, 8, torch.float32), where(eight, big, 33), where(eight, big, 8, exact=True),
]
assert not any(refused) and len(asked) == 3, refused
print("all as measured")
"""


def test_logits_are_written_where_they_are_needed_or_winners_were_not_measured():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", f"import torch\n{WHERE}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.strip() == "all as measured", done.stderr


def test_off_the_gpu_nothing_is_raised():
    winners = nobody(3).cpu()
    assert not choice.raise_winners(torch.randn(3, 8), torch.randn(6, 8), 6, winners)
    assert (winners == NOBODY).all()


RAISED = """
from tandem.kernels.linear_stream import stream
x, weight = torch.empty(3, 1024, dtype=torch.bfloat16), torch.empty(640, 1024, dtype=torch.bfloat16)
winners = torch.empty(3, 16, dtype=torch.int64)
stream(x, weight, None, tokens=8, rows=64, step=256, num_stages=3, num_ids=630, winners_TW=winners)
"""


def test_winners_are_raised_without_logits_and_the_end_of_the_step_starts_late():
    ptx = ptx_of(RAISED)
    assert re.findall(r"(?:atom|red)\.\S*max\S*\.s64", ptx) and "st.global" not in ptx
    # The step's end reads hidden states ahead of its own wait: they must be there when this kernel lets it start.
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 32, 40, 64, 65, 100, 128, 129, 200, 256])
def test_winners_of_products_on_a_card(tokens, invariant):
    for rows, num_ids, size in ((65536 + 40, 65536 + 1, 128), (70000, 70000, 1088)):
        x, weight, winners = rand(tokens, size), rand(rows, size, seed=1), nobody(tokens)
        raised = choice.raise_winners(x, weight, num_ids, winners, invariant)
        assert raised == (tokens <= 64) or not has_streams(x.device)
        if not raised:
            assert (winners == NOBODY).all()
            continue
        ids = id_of(winners[:, 0])
        assert (winners[:, 1:] == NOBODY).all() and (ids < num_ids).all()
        exact = x.double() @ weight[:num_ids].double().T
        chosen, best = exact.gather(1, ids[:, None])[:, 0], exact.amax(-1)
        assert (best - chosen <= 2e-3 * best).all(), "the best, up to rounding to 16 bits"
        if invariant:
            logits = choice.linear(x, weight, None, True)[:, :num_ids]
            assert torch.equal(winners[:, 0], winners_torch(logits)), "to the bit, whatever else is in the step"


@pytest.mark.gpu
def test_a_winner_is_the_same_in_each_of_many_runs():
    x, weight = rand(32, 1024), rand(100000, 1024, seed=1)
    weight[50000:] = weight[:50000]  # equals, of which the lower id must win
    seen = set()
    for _ in range(50):
        winners = nobody(32)
        choice.raise_winners(x, weight, 100000, winners)
        seen.add(tuple(winners[:, 0].tolist()))
    assert len(seen) == 1 and (id_of(winners[:, 0]) < 50000).all()
