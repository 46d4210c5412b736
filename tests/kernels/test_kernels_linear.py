"""Small-batch products against float64; the batch-invariant form bit by bit; choices of tiles."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sm90 import ptx_of

from tandem.kernels import linear as choice
from tandem.kernels.launch import has_streams

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [  # of the interpreter's numpy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, torch.float16)


def assert_near(got, want, limit=2e-3):
    error = (got.double() - want).norm() / want.norm()
    assert error < limit, f"relative error {error:.2e}"


@pytest.mark.parametrize(("tokens", "rows", "size"), [(1, 64, 128), (5, 80, 96), (17, 100, 111)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_skinny(tokens, rows, size, parts, with_bias):
    from tandem.kernels.linear_triton import skinny

    x, weight, bias = rand(tokens, size), rand(rows, size, seed=1), rand(rows, seed=2) if with_bias else None
    got = skinny(x, weight, bias, tokens=16, rows=64, step=32, num_parts=parts)
    assert got.dim() == (3 if parts > 1 else 2) and got.isfinite().all()
    want = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    assert_near(got.sum(0) if parts > 1 else got, want)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("inner", [32, 50])
def test_gated_product(activation, inner):
    from tandem.kernels.linear_triton import skinny

    x, weight, bias = rand(5, 96), rand(2 * inner, 96, seed=1) * 0.1, rand(2 * inner, seed=2)
    both = x.double() @ weight.double().T + bias.double()
    gate = F.silu(both[:, :inner]) if activation == "silu" else F.gelu(both[:, :inner], approximate="tanh")
    got = skinny(x, weight, bias, tokens=16, rows=64, step=32, activation=activation)
    assert got.shape == (5, inner)
    assert_near(got, gate * both[:, inner:])


def test_invariant_product_of_a_token_does_not_depend_on_its_neighbours():
    from tandem.kernels.linear_triton import invariant_linear

    many, weight, bias = rand(150, 300), rand(48, 300, seed=1), rand(48, seed=2)
    among = invariant_linear(many, weight, bias, 2)
    assert_near(among, many.double() @ weight.double().T + bias.double())
    for tokens in (1, 20):
        assert (invariant_linear(many[:tokens], weight, bias, 2) == among[:tokens]).all()


def test_parts_are_added_in_order():
    from tandem.kernels.linear_triton import sum_parts_triton

    parts = rand(3, 5, 37).float() * 1e3
    want = ((parts[0] + parts[1]) + parts[2]).half()
    assert (sum_parts_triton(parts, None, torch.float16) == want).all()


SHAPES = [(4096, 4096), (6144, 4096), (4096, 14336), (1024, 2048), (1024, 3072), (512, 64), (960, 576)]


@pytest.mark.parametrize("tokens", [1, 16, 33, 64])
def test_tiles_fit_the_card(tokens):
    for rows, size in SHAPES:
        for gated in (False, True):
            tiles = choice.tiles_for(tokens, rows, size, 132, gated)
            shared = tiles["num_stages"] * 2 * tiles["step"] * (tiles["rows"] + tiles["tokens"])
            assert shared <= 227 * 1024
            assert 1 <= tiles.get("num_parts", 1) <= 16
            tiles = choice.stream_tiles_for(tokens, rows, size, 132, gated)
            shared = tiles["num_stages"] * 2 * tiles["step"] * (tiles["rows"] + tiles["tokens"])
            assert 113 * 1024 < shared < 226 * 1024, "one program a multiprocessor, and room for a small kernel's"
            assert tiles["num_stages"] >= 2 and 1 <= tiles["num_parts"] <= 16
    for choose in (choice.tiles_for, choice.stream_tiles_for):
        assert choose(512, 4096, 4096, 132) is None and choose(8, 20000, 4096, 132) is None


@pytest.mark.parametrize("tokens", [65, 97, 128, 129, 200, 256])
def test_wide_tiles_fit_the_card_in_one_go(tokens):
    chosen = 0
    for rows, size in [*SHAPES, (6144, 1024), (28672, 4096)]:
        for gated in (False, True):
            tiles = choice.stream_tiles_for(tokens, rows, size, 132, gated)
            fixed = choice.wide_tiles(tokens, rows, 1 if gated else choice.invariant_parts(rows, size), 132)
            for how in (tiles, fixed) if tiles else (fixed,):
                assert 113 * 1024 < how["num_stages"] * 2 * how["step"] * (how["rows"] + how["tokens"]) < 226 * 1024
                assert how["num_stages"] > how["lag"] + 1, "something is on its way while a slot is at work"
                assert how["tokens"] < 2 * tokens
            if tiles:
                chosen += 1
                programs = -(-rows // tiles["rows"]) * -(-tokens // tiles["tokens"]) * tiles["num_parts"]
                assert programs <= 132 and tiles["num_parts"] <= 2
    assert chosen > 8


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 400), st.sampled_from([64, 128, 256]))
def test_tiles_of_tokens_hold_each_one_and_no_row_past_the_end(num_tokens, tile):
    from tandem.kernels.linear_stream import _token_tiles

    tokens = 8 if num_tokens <= 8 else choice.token_tile(num_tokens) if num_tokens <= 64 else min(tile, 2 * 64)
    if tile == 256 and num_tokens > 128:
        tokens = 256
    x, apart = _token_tiles(torch.empty(num_tokens, 128), tokens, 2)
    _, halves, near, _ = x.shape
    assert x.strides[1] == apart * x.strides[2] and x.block_shape[1] * x.block_shape[2] == tokens
    held = set()
    for number in range(-(-num_tokens // tokens)):
        start = max(min(number * tokens, num_tokens - tokens), 0)
        assert tokens == 8 or start + tokens // 2 <= near, "a row past the end would be slow"
        rows = [start + half * apart + row for half in range(halves) for row in range(min(tokens // 2, near - start))]
        column = [start + j + (apart - tokens // 2 if j >= tokens // 2 else 0) for j in range(tokens)]
        assert [c for c in column if c < num_tokens] == rows, "what is written is what was read"
        held.update(rows)
    assert held == set(range(num_tokens))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 300), st.integers(1, 16), st.integers(1, 64))
def test_parts_of_few_and_of_many_tokens_are_the_same(groups, parts, tokens):
    size = groups * 64
    step = choice.stream_tiles(tokens, 64, size, parts)["step"]
    few, many = (math.ceil(math.ceil(size / unit) / parts) * unit for unit in (step, 128))
    assert few == many, "stream of linear_stream.py cuts as invariant_linear of linear_triton.py does"


GATED = """
from tandem.kernels.linear_stream import stream
x, weight = torch.empty(3, 1024, dtype=torch.bfloat16), torch.empty(256, 1024, dtype=torch.bfloat16)
stream(x, weight, None, tokens=8, rows=64, step=256, num_stages=3, activation="silu")
"""


def test_weights_are_asked_for_before_the_wait_and_tokens_after():
    ptx = ptx_of(GATED)
    before, after = ptx.split("griddepcontrol.wait")
    weights, tokens = "cp.async.bulk.tensor.5d", "cp.async.bulk.tensor.4d"
    assert before.count(weights) == 3 and tokens not in before
    assert after.count(tokens) == 4 and after.count(weights) == 1, "all stages once, then again in the loop"
    assert "ld.local" not in ptx and "wgmma.mma_async" in after


def assert_streamed(tokens, rows, size, tiles):
    """Products by linear_stream.py with these tiles, plain and gated, against float64."""
    from tandem.kernels.linear_stream import stream

    x, weight = rand(tokens, size), rand(rows, size, seed=1) * size**-0.5
    bias = rand(rows, seed=2) if tokens > 8 else None
    want = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    got = stream(x, weight, bias, **tiles)
    assert_near(got.sum(0) if got.dim() == 3 else got, want)
    if rows % 16 == 0:
        for activation, of in (("silu", F.silu), ("gelu", lambda y: F.gelu(y, approximate="tanh"))):
            gate, up = want.chunk(2, dim=1)
            got = stream(x, weight, bias, activation=activation, **{**tiles, "num_parts": 1})
            assert_near(got, of(gate) * up, 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "rows", "size"),
    [(1, 4096, 1024), (3, 64, 64), (8, 1000, 576), (13, 96, 128), (33, 1008, 4032), (64, 64, 64)],
)
def test_streamed_products(tokens, rows, size):
    if not has_streams(torch.device("cuda")):
        pytest.skip("needs Hopper's tensor cores and copy engine")
    tile = max(8, choice.token_tile(tokens)) if tokens > 8 else 8
    for parts, step, stages, lag in [(1, 128, 3, 1), (3, 64, 2, 0), (2, 256, 2, 0)]:
        for of in (64, 128):
            tiles = {"tokens": tile, "rows": of, "step": step, "num_stages": stages, "num_parts": parts, "lag": lag}
            assert_streamed(tokens, rows, size, tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65, 97, 127, 128, 129, 200, 255, 256])
def test_wide_streamed_products(tokens):
    if not has_streams(torch.device("cuda")):
        pytest.skip("needs Hopper's tensor cores and copy engine")
    for rows, size in ((1008, 1088), (1000, 576)):
        for of, tile in (*choice.WIDE_TILES, (128, 256)):
            if tile < 2 * tokens:
                how = {"tokens": tile, "rows": of, "step": 128 if of == 64 else 64, "num_warps": 4 if of == 64 else 8}
                for parts in (1, 2):
                    assert_streamed(tokens, rows, size, {**how, "num_parts": parts, "num_stages": 3, "lag": 1})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "size"), [(1024, 2048), (6144, 1024), (4096, 4096), (960, 576), (320, 960), (65600, 320)]
)
def test_a_tokens_product_is_the_same_number_among_any_others(rows, size):
    many, weight, bias = rand(517, size), rand(rows, size, seed=1) * size**-0.5, rand(rows, seed=2)
    forms = [
        lambda x: choice.linear(x, weight, bias, True),
        lambda x: choice.gated_linear(x, weight, None, "silu", True),
        lambda x: choice.gated_linear(x, weight, bias, "gelu", True),
        lambda x: summed(choice.linear_parts(x, weight, None, True), x.dtype),
        lambda x: summed(choice.linear_parts(x, weight, bias, True), x.dtype),
    ]
    for form in forms:
        among = form(many)
        for tokens in (1, 8, 9, 17, 33, 64, 65, 97, 128, 129, 200, 255, 256, 257):
            assert (form(many[:tokens]) == among[:tokens]).all()


def summed(y, dtype):
    return choice.add_parts(y, dtype) if y.dim() == 3 else y


def test_off_the_gpu_the_library_is_taken():
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    assert torch.equal(choice.linear(x, weight), F.linear(x, weight))
    assert torch.equal(choice.linear_parts(x, weight), F.linear(x, weight))
    assert choice.gated_linear(x, weight).shape == (3, 3)
