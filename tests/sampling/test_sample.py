"""Sampling against a slow reference, against its distribution, and alone against in company."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import distribution, processed

from tandem.errors import RequestError
from tandem.plan import Arrival
from tandem.request import SamplingParams
from tandem.sampling.philox import derived_seed, philox, uniforms
from tandem.sampling.rows import SamplerRows
from tandem.sampling.sample import penalise, sample

V = 1000


def rows_of(*params: SamplingParams, prompt=(1, 2, 3), output=(), num_logits=V, **options) -> SamplerRows:
    rows = SamplerRows(len(params), num_logits, "cpu", **options)
    for row, p in enumerate(params):
        rows.arrive(Arrival(f"r{row}", row, [*prompt, *output], len(prompt), p, eos=(0,)))
    return rows


def logits_of(num_rows: int, num_logits: int = V, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, num_logits, generator=torch.Generator().manual_seed(seed)) * scale


def words(tensor: torch.Tensor) -> list[str]:
    return [f"{word:08x}" for word in tensor.flatten().tolist()]


def test_philox_known_answers():
    """The vectors that the authors publish with Random123."""
    zeros, ones = torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), 0xFFFFFFFF)
    assert words(philox(zeros, zeros[:, :2])) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert words(philox(ones, ones[:, :2])) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    counter = torch.tensor([[0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]])
    key = torch.tensor([[0xA4093822, 0x299F31D0]])
    assert words(philox(counter, key)) == ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"]


def test_uniforms_are_uniform_and_pure():
    positions = torch.arange(20000)
    u = uniforms(torch.full_like(positions, -(2**63)), positions)
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square, 19 degrees of freedom, p = 0.0007
    assert torch.equal(u[5:6], uniforms(torch.tensor([-(2**63)]), torch.tensor([5])))
    assert not torch.equal(u[:10], uniforms(torch.full((10,), -(2**63) + 1), positions[:10]))
    assert derived_seed(0, "a") != derived_seed(0, "b") != derived_seed(1, "b")


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=5),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=2.0, top_p=0.99),
    SamplingParams(top_k=40, top_p=0.7),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=300, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"t{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}")
def test_distribution(params):
    """4,000 draws of one row at different positions: only kept ids, in their proportions (chi-square)."""
    n = 4000
    logits = logits_of(1)
    expected = distribution(logits[0].numpy(), params)
    rows = rows_of(*[params] * n)
    for row in range(n):
        rows.arrive(Arrival("same", row, [1], 1, params))
    ids = sample(logits.expand(n, V), rows, range(n), range(n)).ids_R.numpy()
    assert (expected[ids] > 0).all()
    counts = np.bincount(ids, minlength=V)
    frequent = expected * n >= 5
    observed = np.append(counts[frequent], counts[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum()) * n
    chi = ((observed - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    degrees = max((wanted > 0).sum() - 1, 1)
    assert chi < degrees + 4 * np.sqrt(2 * degrees) + 4


def test_inversion_equals_the_reference():
    """The id drawn is the one whose float64 cumulative interval holds the row's uniform."""
    everybody = [p for p in PARAMS for _ in range(40)]
    logits = logits_of(len(everybody), seed=1)
    rows = rows_of(*everybody)
    ids = sample(logits, rows, range(len(everybody)), [7] * len(everybody)).ids_R.tolist()
    seeds = torch.tensor([derived_seed(0, f"r{row}") for row in range(len(everybody))])
    u = uniforms(seeds, torch.full_like(seeds, 7)).numpy()
    for row, params in enumerate(everybody):
        cumulative = np.cumsum(distribution(logits[row].numpy(), params))
        low = cumulative[ids[row] - 1] if ids[row] else 0.0
        assert low - 1e-5 <= u[row] <= cumulative[ids[row]] + 1e-5


SOME_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 10**9]),
    top_p=st.sampled_from([1e-6, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.sampled_from([(), ((5, 4.0), (V - 1, -100.0))]),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=st.sampled_from([0, 100]),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(SOME_PARAMS, min_size=2, max_size=9), st.integers(0, 10**6), st.booleans())
def test_alone_equals_in_batch(everybody, seed, masked):
    """Whatever the neighbours, the order of the batch, and the number of the row."""
    n = len(everybody)
    logits = logits_of(n, seed=seed)
    mask = np.packbits(np.arange(1024) % 3 == 0, bitorder="little").tobytes()
    rows = rows_of(*everybody, output=(7, 7, 8))
    order = list(range(n))[::-1]
    together = sample(logits[order], rows, order, [6 + row for row in order], [(0, mask)] if masked else []).ids_R
    for row, params in enumerate(everybody):
        alone = SamplerRows(4, V, "cpu")
        alone.arrive(Arrival(f"r{row}", 2, [1, 2, 3, 7, 7, 8], 3, params, eos=(0,)))
        own = [(2, mask)] if masked and row == 0 else []
        token = sample(logits[row : row + 1], alone, [2], [6 + row], own).ids_R
        assert token.item() == together[n - 1 - row].item()
        if masked and row == 0:
            assert token.item() % 3 == 0


def test_slices_and_sort_find_the_same_threshold():
    """A nucleus of thousands beside one of three: the flat row forces the sort, the peaked one must not notice."""
    wide = 9000
    flat, peaked = logits_of(1, wide, 0.01), logits_of(1, wide, 6.0)
    params = SamplingParams(top_p=0.9, seed=3)
    both = rows_of(params, params, num_logits=wide)
    for position in range(30):
        ids = sample(torch.cat((flat, peaked)), both, [0, 1], [position, position]).ids_R
        for row, logits in enumerate((flat, peaked)):
            assert sample(logits, both, [row], [position]).ids_R.item() == ids[row].item()
    assert distribution(flat[0].numpy(), params).astype(bool).sum() > 4096


def test_greedy_draws_nothing_and_input_is_kept(monkeypatch):
    import tandem.sampling.sample as module

    monkeypatch.setattr(module, "draw", lambda *args: pytest.fail("a greedy batch must not draw"))
    logits = logits_of(3)
    before = logits.clone()
    rows = rows_of(*[SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias=((4, 50.0),))] * 3)
    assert sample(logits, rows, [0, 1, 2], [3, 3, 3]).ids_R.tolist() == [4, 4, 4]
    assert torch.equal(logits, before)


def test_c17_tiny_temperature_and_top_p():
    """C17: tiny temperature, tiny top_p, top_k 1, min_p 1 give the greedy token; top_k ≥ V is off."""
    greedy = SamplingParams(temperature=0)
    tiny = [
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1e-45),
        SamplingParams(temperature=1e-4),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        greedy,
    ]
    logits = logits_of(1).expand(len(tiny), V) * 30
    best = logits[0].argmax().item()
    rows = rows_of(*tiny)
    for position in range(20):
        assert sample(logits, rows, range(len(tiny)), [position] * len(tiny)).ids_R.tolist() == [best] * len(tiny)
    off = [SamplingParams(seed=9, top_k=k) for k in (0, -1, V, 10**9)]
    ids = sample(logits_of(1).expand(4, V), rows_of(*off), range(4), [3] * 4).ids_R
    assert len(set(ids.tolist())) == 1
    for wrong in (
        {"temperature": -0.1},
        {"temperature": 1e9},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": -0.1},
    ):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            SamplingParams(**wrong)


def test_c19_penalties_equal_the_reference():
    """C19: presence and frequency look at the output alone, repetition at prompt and output."""
    prompt, output = [5, 5, 5, 5], [9, 9, 4]
    logits = logits_of(1)
    for params in (
        SamplingParams(temperature=0, presence_penalty=2.0),
        SamplingParams(temperature=0, frequency_penalty=2.0),
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0, repetition_penalty=0.5, presence_penalty=-1.0, frequency_penalty=0.7),
    ):
        rows = SamplerRows(1, V, "cpu")
        rows.arrive(Arrival("a", 0, prompt + output, len(prompt), params))
        logits = logits_of(1)
        logits[0, [5, 9, 4]] = torch.tensor([2.0, -2.0, 3.0])
        expected = processed(logits[0].numpy(), params, prompt, output)
        assert np.allclose(penalise(logits, rows, torch.tensor([0]))[0].numpy(), expected, atol=1e-5)
    # At the first position there is no output yet, so the first two do nothing.
    for params in (SamplingParams(presence_penalty=2.0), SamplingParams(frequency_penalty=2.0)):
        rows = SamplerRows(1, V, "cpu")
        rows.arrive(Arrival("a", 0, prompt, len(prompt), params))
        assert torch.equal(penalise(logits, rows, torch.tensor([0])), logits)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_c19_counts_follow_carried_tokens_and_resume(penalty):
    """C19: alone = beside a neighbour = after a preemption; counts come from ids that the host has not seen."""
    params = SamplingParams(temperature=1.0, seed=1, **{penalty: 1.7})
    neighbour = SamplingParams(temperature=0.7, repetition_penalty=1.2)
    steps, prompt = 30, [3] * 4
    logits = [logits_of(2, 40, seed=step) for step in range(steps)]

    def run(beside: bool, resume_at: int | None) -> list[int]:
        rows, tokens = SamplerRows(8, 40, "cpu"), list(prompt)
        rows.arrive(Arrival("a", 1, prompt, 4, params))
        if beside:
            rows.arrive(Arrival("b", 5, list(range(39)), 39, neighbour))
        for step in range(steps):
            if step == resume_at:
                rows.depart(1)
                rows.arrive(Arrival("a", 7, tokens, 4, params, resumed=True))
            row = 1 if resume_at is None or step < resume_at else 7
            taken = ([row, 5], logits[step]) if beside else ([row], logits[step][:1])
            tokens.append(sample(taken[1], rows, taken[0], [4 + step] * len(taken[0])).ids_R[0].item())
            rows.check()
        return tokens[4:]

    alone = run(False, None)
    assert alone == run(True, None) == run(False, 11) == run(True, 17)
    free = SamplerRows(1, 40, "cpu")
    free.arrive(Arrival("a", 0, prompt, 4, SamplingParams(temperature=1.0, seed=1)))
    assert alone != [sample(logits[s][:1], free, [0], [4 + s]).ids_R.item() for s in range(steps)]


def test_c21_padding_ids_are_never_sampled():
    """C21: ids beyond the tokenizer are never drawn, however good; a bias on one does no harm."""
    everybody = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=50.0),
        SamplingParams(logit_bias=((V - 1, 90.0),)),
    ]
    logits = logits_of(3)
    logits[:, 900:] = 60.0
    rows = rows_of(*everybody, num_tokens=900)
    for position in range(50):
        assert sample(logits, rows, [0, 1, 2], [position] * 3).ids_R.max() < 900
    SamplingParams(logit_bias=((V - 1, 5.0),), stop_token_ids=(V - 1,)).check_vocabulary(V)
    for seed in (-(2**63), 2**63 - 1, 0):
        one = rows_of(SamplingParams(seed=seed), num_tokens=900)
        assert 0 <= sample(logits[:1], one, [0], [0]).ids_R.item() < 900
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=((V, 5.0),)).check_vocabulary(V)
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(-7,)).check_vocabulary(V)


def test_c21_bias_touches_its_own_row():
    logits = torch.zeros(3, V)
    rows = rows_of(
        SamplingParams(temperature=0), SamplingParams(temperature=0, logit_bias=((V - 1, 5.0), (3, -5.0))),
        SamplingParams(temperature=0),
    )  # fmt: skip
    assert sample(logits, rows, [0, 1, 2], [3] * 3).ids_R.tolist() == [0, V - 1, 0]


def test_c16_end_tokens_are_banned_before_min_tokens():
    """C16: neither of two end ids, nor a stop id, before min_tokens; all of them from then on."""
    params = SamplingParams(temperature=0, min_tokens=5, stop_token_ids=(9,))
    rows = SamplerRows(1, V, "cpu")
    rows.arrive(Arrival("a", 0, [1, 2, 3], 3, params, eos=(0, 4)))
    logits = torch.zeros(1, V)
    logits[0, [0, 4, 9]] = torch.tensor([9.0, 8.0, 7.0])
    chosen = [sample(logits, rows, [0], [3 + generated]).ids_R.item() for generated in range(7)]
    assert chosen == [1] * 5 + [0] * 2


def test_a_grammar_outranks_min_tokens():
    rows = rows_of(SamplingParams(temperature=1.0, min_tokens=5))
    only_end = bytes([1]) + bytes(124)
    assert sample(logits_of(1), rows, [0], [3], [(0, only_end)]).ids_R.tolist() == [0]


def test_hopeless_rows_still_give_ids():
    """A broken model's NaN, or a mask that allows nothing, must not index outside the vocabulary."""
    logits = torch.stack((torch.full((V,), torch.nan), torch.full((V,), -torch.inf), logits_of(1)[0]))
    rows = rows_of(SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=3))
    ids = sample(logits, rows, [0, 1, 2], [0] * 3, [(2, b"")]).ids_R
    assert ids.min() >= 0 and ids.max() < V


def test_rows_give_count_tables_back():
    rows = SamplerRows(8, V, "cpu")
    params = SamplingParams(presence_penalty=1.0)
    for row in range(5):
        rows.arrive(Arrival(f"{row}", row, [1], 1, params if row % 2 == 0 else SamplingParams()))
        rows.check()
    assert rows.statistics().num_live == 5 and rows.statistics().num_penalised == 3
    for row in range(8):
        rows.depart(row)
        rows.check()
    assert rows.statistics().num_live == 0 and rows.statistics().count_bytes == 0
