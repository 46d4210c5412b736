"""Grouped products and the weighted sum behind them against float64; a row alone and among others bit by bit."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sm90 import compiled_for

from tandem import kernels
from tandem.kernels import launch
from tandem.kernels.grouped import LIBRARY_ROWS, combine_torch, library_has, takes_library

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
pytestmark = [  # of the interpreter's numpy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is not written is not a number."""
    from tandem.kernels import grouped_triton

    class Poisoning:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *shape, **how):
            return torch.empty(*shape, **how).fill_(float("nan"))

    monkeypatch.setattr(grouped_triton, "torch", Poisoning())


def rand(*shape, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def ends_of(counts):
    return torch.tensor(counts, device=DEVICE).cumsum(0).int()


def wanted(rows, weight, counts):
    parts = rows.double().split(counts)
    return torch.cat([part @ matrix.double().T for part, matrix in zip(parts, weight, strict=True)])


def assert_near(got, want, limit):
    assert got.shape == want.shape and got.isfinite().all()
    error = (got.double() - want).norm() / want.norm()
    assert error < limit, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "counts",
    [[1], [0, 0, 1, 0], [300, 0, 0], [0, 0, 70], [5, 0, 1, 9, 16, 17, 0], [1] * 37, [0] * 130 + [33, 1], [16, 32, 15]],
    ids=lambda counts: f"{sum(counts)}-of-{len(counts)}",
)
def test_products_of_groups(counts, dtype):
    from tandem.kernels.grouped_triton import grouped_triton

    size, outs = (47, 37) if len(counts) % 2 else (64, 48)
    rows, weight = rand(sum(counts), size, dtype=dtype), rand(len(counts), outs, size, dtype=dtype, seed=1)
    assert_near(grouped_triton(rows, weight, ends_of(counts)), wanted(rows, weight, counts), DTYPES[dtype])


@settings(deadline=None, max_examples=6)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 70), st.integers(1, 70), st.data())
def test_products_of_any_size(counts, size, outs, data):
    from tandem.kernels.grouped_triton import grouped_triton

    rows, weight = rand(sum(counts), size), rand(len(counts), outs, size, seed=1)
    got = grouped_triton(rows, weight, ends_of(counts))
    if not sum(counts):
        assert got.shape == (0, outs)
        return
    assert_near(got, wanted(rows, weight, counts), DTYPES[torch.float16] * 4)
    alone = data.draw(st.integers(0, sum(counts) - 1))
    group = int((ends_of(counts) <= alone).sum())
    only = [int(number == group) for number in range(len(counts))]
    among = grouped_triton(rows, weight, ends_of(counts), invariant=True)
    assert (grouped_triton(rows[alone : alone + 1], weight, ends_of(only), invariant=True) == among[alone]).all()


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("inner", "size"), [(32, 64), (25, 51)])
def test_gate_and_up_are_folded_in(activation, inner, size):
    from tandem.kernels.grouped_triton import grouped_triton

    counts = [3, 0, 20, 1]
    rows, weight = rand(24, size), rand(4, 2 * inner, size, seed=1) * 0.2
    gate, up = wanted(rows, weight, counts).chunk(2, dim=1)
    want = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    assert_near(grouped_triton(rows, weight, ends_of(counts), activation), want, 4e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_number_among_any_others(dtype):
    from tandem.kernels.grouped_triton import grouped_triton

    rows, weight = rand(90, 100, dtype=dtype), rand(3, 40, 100, dtype=dtype, seed=1)
    for activation in (None, "silu"):
        among = grouped_triton(rows, weight, ends_of([40, 21, 29]), activation, invariant=True)
        for first, counts in ((0, [1, 0, 0]), (17, [5, 0, 0]), (40, [0, 21, 0]), (53, [0, 8, 13]), (89, [0, 0, 1])):
            one = rows[first : first + sum(counts)]
            got = grouped_triton(one, weight, ends_of(counts), activation, invariant=True)
            assert torch.equal(got, among[first : first + sum(counts)])


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=40), st.sampled_from([16, 64]))
def test_there_are_as_many_tiles_as_any_spread_of_rows_needs(counts, tile):
    from tandem.kernels.grouped_triton import most_tiles

    assert sum(-(-count // tile) for count in counts) <= most_tiles(sum(counts), len(counts), tile)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_are_weighted_and_summed_in_order(dtype):
    from tandem.kernels.grouped_triton import combine_triton

    rows, weights = rand(21, 1100, dtype=dtype), rand(7, 3, dtype=torch.float32).softmax(-1)
    places = torch.randperm(21, generator=torch.Generator().manual_seed(5)).to(DEVICE, torch.int32)
    want = combine_torch(rows.double(), places, weights.double())
    got = combine_triton(rows, places, weights)
    assert_near(got, want, DTYPES[dtype])
    assert torch.equal(combine_triton(rows, places[12:15], weights[4:5])[0], got[4])


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_rows_are_read_where_their_tokens_stand(activation):
    from tandem.kernels.grouped_triton import grouped_triton

    hidden, weight, counts = rand(9, 51), rand(3, 50, 51, seed=1) * 0.2, [7, 0, 20]
    tokens = torch.randint(0, 9, (27,), generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.int32)
    got = grouped_triton(hidden, weight, ends_of(counts), activation, tokens)
    assert torch.equal(got, grouped_triton(hidden[tokens], weight, ends_of(counts), activation))


def test_the_library_is_taken_where_it_reads_nothing_back():
    rows, weight = torch.empty(3, 64, device="meta", dtype=torch.bfloat16), torch.empty(2, 32, 64, device="meta")
    for capability, native in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        with launch.planning(launch.Target(capability, 100)):
            assert library_has(rows, weight) is native
            assert not library_has(rows.half(), weight) and not library_has(rows.float(), weight)
            assert not library_has(rows[:, :60], weight[:, :, :60])
            assert takes_library(2 * LIBRARY_ROWS, rows, weight, False) is native
            assert not takes_library(2 * LIBRARY_ROWS, rows, weight, True), "its sums hang on the neighbours"
            assert not takes_library(2 * LIBRARY_ROWS - 1, rows, weight, False), "ours is the quicker one"
    assert not library_has(torch.empty(3, 64, dtype=torch.bfloat16), weight)


CALLS = """
from tandem.kernels.grouped_triton import combine_triton, grouped_triton
from tandem.kernels.route_triton import route_triton
ends, places = torch.empty(128, dtype=torch.int32), torch.empty(24, dtype=torch.int32)
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    rows, weight = torch.empty(24, 2048, dtype=dtype), torch.empty(128, 64, 2048, dtype=dtype)
    for invariant in (False, True):
        grouped_triton(rows, weight, ends, invariant=invariant)
        grouped_triton(rows, weight, ends, "silu", places, invariant)
        grouped_triton(rows[:, :2047], weight[:, :, :2047].contiguous(), ends, invariant=invariant)
    combine_triton(rows, places, torch.empty(3, 8))
    route_triton(torch.empty(3, 128, dtype=dtype), 8, True)
    route_triton(torch.empty(300, 128, dtype=dtype), 8, True)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_fit_the_devices_they_are_for(capability):
    kernels_made = compiled_for(capability, CALLS)
    assert len(kernels_made) == 3 * (2 * 3 + 1 + 2 * 2)
    for facts in kernels_made:
        assert facts["shared"] <= 99 * 1024, "the least there is, of capability 8.6 and 8.9"
        assert facts["spilled"] == 0 and facts["registers"] <= 255


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("invariant", [False, True])
def test_products_on_a_card_whatever_way_is_chosen(dtype, invariant):
    counts = [0, 5, 300, 1, 0, 64, 65, 130]
    rows, weight = rand(sum(counts), 512, dtype=dtype), rand(8, 256, 512, dtype=dtype, seed=1) * 512**-0.5
    got = kernels.grouped(rows, weight, ends_of(counts), invariant)
    assert_near(got, wanted(rows, weight, counts), DTYPES[dtype] * 2)
    gate, up = wanted(rows, weight, counts).chunk(2, dim=1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    hidden, tokens = rows[order], order.argsort().int()
    got = kernels.gated_grouped(hidden, tokens, weight, ends_of(counts), "silu", invariant)
    assert_near(got, F.silu(gate) * up, DTYPES[dtype] * 2)
