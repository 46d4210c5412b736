"""Logprobs: values, ranks, order, and the memory they take."""

import math

import numpy as np
import pytest
import torch

from tandem.errors import RequestError
from tandem.plan import Arrival
from tandem.request import SamplingParams
from tandem.sampling.logprobs import LEAST, logprobs_of, prompt_logprobs
from tandem.sampling.rows import SamplerRows
from tandem.sampling.sample import sample

V = 500


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("temperature", [0.0, 0.01, 5.0])
@pytest.mark.parametrize("top_k", [0, 1])
def test_c18_values_are_the_models_own(temperature, top_k):
    """C18: the same distribution whatever temperature, top-k, bias and penalties say; finite, at most 0."""
    logits = logits_of(4)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, logprobs=5, repetition_penalty=1.5, logit_bias=((3, 20.0),)
    )
    rows = SamplerRows(4, V, "cpu")
    for row in range(4):
        rows.arrive(Arrival(str(row), row, [1, 2], 2, params))
    sampled = sample(logits, rows, range(4), [2] * 4)
    for wanted in ([0, 1, 2, 3], [2, 0]):
        entries = sampled.logprobs(wanted, 5).home().entries(5)
        for row, entry in zip(wanted, entries, strict=True):
            x = logits[row].double().numpy()
            own = x - x.max() - np.log(np.exp(x - x.max()).sum())
            order = np.argsort(-own, kind="stable")
            assert entry.token == sampled.ids_R[row].item()
            assert entry.logprob == pytest.approx(own[entry.token], abs=1e-4) and entry.logprob <= 0
            assert entry.rank == 1 + np.count_nonzero(own > own[entry.token])
            assert [token for token, _ in entry.top] == order[:5].tolist()
            assert [value for _, value in entry.top] == pytest.approx(own[order[:5]], abs=1e-4)


def test_c18_greedy_token_is_the_best_entry_even_in_a_tie():
    logits = torch.zeros(1, V)
    entry = logprobs_of(logits, logits.argmax(-1), 3).entries(3)[0]
    assert (entry.rank, entry.top[0], len(entry.top)) == (1, (0, entry.logprob), 3)
    high = torch.tensor([V - 1])
    assert logprobs_of(logits, high, 1).entries(1)[0].top == ((V - 1, pytest.approx(-math.log(V), abs=1e-4)),)


def test_each_row_its_own_number_of_alternatives():
    entries = logprobs_of(logits_of(3), torch.tensor([1, 2, 3]), 20).entries([0, 20, 3])
    assert [len(entry.top) for entry in entries] == [0, 20, 3]


def test_impossible_tokens_stay_finite():
    logits = logits_of(1)
    logits[0, 7] = -torch.inf
    assert logprobs_of(logits, torch.tensor([7]), 1).entries(1)[0].logprob == LEAST
    certain = torch.full((1, V), -1e9)
    certain[0, 7] = 1e9
    assert logprobs_of(certain, torch.tensor([7]), 1).entries(1)[0].logprob == 0.0


@pytest.mark.parametrize("length", [0, 1, 64, 200])
def test_c09_prompt_logprobs_in_bounded_memory(length):
    """C09: V-wide floats for a fixed number of positions at a time, and the same values as all at once."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(length, 8, generator=generator)
    head = torch.randn(V, 8, generator=generator)
    tokens = torch.randint(0, V, (length,), generator=generator)
    widths = []

    def project(part: torch.Tensor) -> torch.Tensor:
        widths.append(len(part))
        return part @ head.T

    entries = prompt_logprobs(hidden, project, tokens, 5, chunk=32).home().entries(5)
    assert max(widths) <= 32 and sum(widths) == length
    whole = logprobs_of(hidden @ head.T, tokens, 5, chunk=length + 1).entries(5)
    assert len(entries) == length
    for one, other in zip(entries, whole, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert (one.token, one.rank, [t for t, _ in one.top]) == (other.token, other.rank, [t for t, _ in other.top])


@pytest.mark.parametrize("wrong", [V, -1, 1000, 21])
def test_c09_requests_over_the_cap_are_refused(wrong):
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: wrong})
