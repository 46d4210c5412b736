"""Routing against a plain search: the best experts, their weights, and a place for each copy of a token."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.kernels.route import route, route_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [  # of the interpreter's numpy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is not written is no place."""
    route_triton = pytest.importorskip("tandem.kernels.route_triton")

    class Poisoning:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *shape, **how):
            return torch.empty(*shape, **how).fill_(-77)

    monkeypatch.setattr(route_triton, "torch", Poisoning())


def both(scores_TX, num_chosen, normalise):
    """By the kernels, and the plain way."""
    from tandem.kernels.route_triton import route_triton

    return route_triton(scores_TX, num_chosen, normalise), route_torch(scores_TX, num_chosen, normalise)


def distinct_scores(num_tokens, num_experts, dtype, seed=0):
    """Shuffled numbers 1/8 apart, exact in 16 bits."""
    generator = torch.Generator().manual_seed(seed + num_tokens)
    rows = [torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]
    return (torch.stack(rows).to(torch.float32) / 8 - 3).to(DEVICE, dtype)


def assert_same(got, want):
    assert torch.allclose(got.weights_TC, want.weights_TC, rtol=1e-5, atol=1e-7)
    for name in ("tokens_A", "places_A", "ends_X"):
        assert getattr(got, name).dtype == torch.int32
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"),
    [(1, 8, 2), (7, 60, 4), (33, 128, 8), (5, 3, 3), (9, 1, 1)],
)
def test_copies_of_tokens_stand_by_expert_then_by_token(dtype, normalise, num_tokens, num_experts, num_chosen):
    scores_TX = distinct_scores(num_tokens, num_experts, dtype)
    assert_same(*both(scores_TX, num_chosen, normalise))


def test_more_choices_than_a_program_looks_at_at_once(monkeypatch):
    from tandem.kernels import route_triton

    monkeypatch.setattr(route_triton, "FEW", 16)
    monkeypatch.setattr(route_triton, "MANY", 32)
    for num_tokens in (16, 17, 40):
        assert_same(*both(distinct_scores(num_tokens, 12, torch.float32), 4, True))


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 12), st.integers(1, 12), st.data())
def test_any_scores(num_tokens, num_experts, data):
    """Equal, infinite and undefined ones, too: places are a permutation, and one token's harm no other's."""
    from tandem.kernels.route_triton import route_triton

    num_chosen = data.draw(st.integers(1, num_experts))
    number = st.sampled_from([0.0, 1.0, -2.5, 3.0, float("inf"), float("-inf"), float("nan")])
    row = st.lists(number, min_size=num_experts, max_size=num_experts)
    rows = data.draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    scores_TX = torch.tensor(rows, device=DEVICE).view(num_tokens, num_experts)
    weights_TC, tokens_A, places_A, ends_X = route_triton(scores_TX, num_chosen, True)
    assert sorted(places_A.tolist()) == list(range(num_tokens * num_chosen))
    assert tokens_A[places_A.long()].tolist() == [t for t in range(num_tokens) for _ in range(num_chosen)]
    experts_A = torch.searchsorted(ends_X, places_A, right=True).view(num_tokens, num_chosen)
    assert all(len(set(chosen)) == num_chosen for chosen in experts_A.tolist()), "an expert is visited once"
    assert ends_X[-1] == num_tokens * num_chosen and (experts_A < num_experts).all()
    for token, scores in enumerate(scores_TX):
        if scores.isfinite().all():
            best = scores.sort(descending=True, stable=True)
            assert experts_A[token].tolist() == best.indices[:num_chosen].tolist(), "the lower one among equals"
            want = torch.softmax(best.values[:num_chosen], 0)
            assert torch.allclose(weights_TC[token], want, rtol=1e-5, atol=1e-7)
        elif scores.isnan().any():
            assert weights_TC[token].isnan().all()


def test_the_plain_way_on_the_cpu():
    scores_TX = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    weights_TC, tokens_A, places_A, ends_X = route(scores_TX, 2, True)
    assert (tokens_A.tolist(), places_A.tolist()) == ([1, 0, 1, 2, 0, 2], [4, 1, 0, 2, 3, 5])
    assert ends_X.tolist() == [1, 4, 6] and torch.allclose(weights_TC.sum(1), torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 31, 256, 4096])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(128, 8), (8, 2)])
def test_on_a_card(num_tokens, num_experts, num_chosen):
    assert_same(*both(distinct_scores(num_tokens, num_experts, torch.bfloat16), num_chosen, True))
