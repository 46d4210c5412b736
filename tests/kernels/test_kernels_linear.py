"""Small-batch products against float64; the batch-invariant form bit by bit; choices of tiles."""

import pytest
import torch
import torch.nn.functional as F

from tandem.kernels import linear as choice

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


@pytest.mark.parametrize("tokens", [1, 16, 33, 64, 128])
def test_tiles_fit_the_card(tokens):
    for rows, size in [(4096, 4096), (6144, 4096), (4096, 14336), (1024, 2048), (1024, 3072), (512, 64)]:
        tiles = choice.tiles_for(tokens, rows, size, 132)
        if tiles is not None:
            shared = tiles["num_stages"] * 2 * tiles["step"] * (tiles["rows"] + tiles["tokens"])
            assert shared <= 227 * 1024
            assert 1 <= tiles["num_parts"] <= 16
    assert choice.tiles_for(512, 4096, 4096, 132) is None
    assert choice.invariant_parts(4096, 4096) == 4


def test_off_the_gpu_the_library_is_taken():
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    assert torch.equal(choice.linear(x, weight), F.linear(x, weight))
    assert torch.equal(choice.linear_parts(x, weight), F.linear(x, weight))
    assert choice.gated_linear(x, weight).shape == (3, 3)
