"""Linear layers: merged parts land in their rows, every order of multiplication agrees, quantisation stays close."""

import pytest
import torch
import torch.nn.functional as F

from tandem.errors import ModelError, WeightsError
from tandem.layers.linear import HostLinear, Linear, RowLinear, host_linear, linear_scheme
from tandem.layers.packed import PackedLinear, can_pack
from tandem.layers.quantised import Int4Linear, Int8Linear, int4_codes

CPU = torch.device("cpu")
PARTS = (48, 16, 16)


def filled(kind: type[Linear], in_size: int = 64, bias: bool = True) -> tuple[Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    layer = kind(in_size, PARTS, bias, torch.float32, CPU)
    weights = [torch.randn(part, in_size) for part in PARTS]
    biases = [torch.randn(part) for part in PARTS]
    for part in (2, 0, 1):
        layer.target(part).write(weights[part])
        if bias:
            layer.bias_target(part).write(biases[part])
    return layer, torch.cat(weights), torch.cat(biases)


@pytest.mark.parametrize("kind", [RowLinear, HostLinear, PackedLinear])
@pytest.mark.parametrize("rows", [1, 2, 7, 65])
def test_dense_layers_are_linear(kind: type[Linear], rows: int) -> None:
    for bias in (True, False):
        layer, weight, offset = filled(kind, bias=bias)
        x = torch.randn(rows, 64)
        y = layer(x)
        assert y.is_contiguous()
        torch.testing.assert_close(y, F.linear(x, weight, offset if bias else None), atol=1e-5, rtol=1e-5)


def test_one_row_equals_itself_among_others() -> None:
    x, weight = torch.randn(5, 96), torch.randn(40, 96)
    for row in range(5):
        torch.testing.assert_close(host_linear(x[row : row + 1], weight)[0], host_linear(x, weight)[row])


@pytest.mark.parametrize("in_size", [64, 1536])
def test_a_packed_row_does_not_depend_on_the_others(in_size: int) -> None:
    """Exactly: this is what makes tokens on the CPU the same beside any neighbours."""
    layer, _, _ = filled(PackedLinear, in_size=in_size)
    x = torch.randn(65, in_size)
    whole = layer(x)
    for rows in (slice(3, 4), slice(0, 2), slice(7, 38), slice(1, 65)):
        assert torch.equal(layer(x[rows]), whole[rows])


def test_packed_weights_can_be_replaced_part_by_part() -> None:
    layer, weight, offset = filled(PackedLinear)
    fresh = torch.randn(PARTS[1], 64)
    layer.target(1).write(fresh)
    weight[PARTS[0] : PARTS[0] + PARTS[1]] = fresh
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), F.linear(x, weight, offset), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "error"), [(Int8Linear, 0.02), (Int4Linear, 0.12)])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_quantised_layers_stay_close(kind: type[Linear], error: float, rows: int) -> None:
    layer, weight, offset = filled(kind)
    x = torch.randn(rows, 64) * torch.logspace(-2, 2, rows)[:, None]
    expected = F.linear(x, weight)
    relative = (layer(x) - offset - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < relative.max() < error


def test_int8_rows_have_their_own_scales() -> None:
    """A token a thousand times larger must not cost its neighbour precision."""
    layer, _, _ = filled(Int8Linear, bias=False)
    x = torch.randn(2, 64) * torch.tensor([[1000.0], [1.0]])
    alone = layer(x[1:])
    torch.testing.assert_close(layer(x)[1:], alone)


def test_int8_zero_row_is_zero() -> None:
    layer, _, _ = filled(Int8Linear, bias=False)
    assert torch.equal(layer(torch.zeros(2, 64)), torch.zeros(2, sum(PARTS)))


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_keeps_the_codes_of_4_bit_files(symmetric: bool) -> None:
    """Q4_0: d·(q - 8), the extreme at code 0 but perhaps none at 15; Q4_1: d·q + m, both ends taken."""
    codes = torch.randint(0, 15, (6, 64))
    codes[:, ::32] = 0
    scale = torch.rand(6, 2).repeat_interleave(32, 1) * 0.1 + 0.01
    if symmetric:
        weights = scale * (codes - 8) * torch.where(torch.arange(6)[:, None] % 2 == 0, 1.0, -1.0)
    else:
        codes[:, 1::32] = 15
        weights = scale * codes - 0.31
    found, pairs = int4_codes(weights)
    again = (found.unflatten(1, (-1, 32)) - 8) * pairs[..., :1] + pairs[..., 1:]
    torch.testing.assert_close(again.flatten(1), weights, atol=1e-5, rtol=1e-5)
    assert bool((pairs[..., 1] == 0).all()) == symmetric
    torch.testing.assert_close(found, codes.float())


def test_int4_constant_and_zero_groups() -> None:
    weights = torch.cat((torch.zeros(2, 32), torch.full((2, 32), 0.5)), dim=1)
    codes, pairs = int4_codes(weights)
    again = (codes.unflatten(1, (-1, 32)) - 8) * pairs[..., :1] + pairs[..., 1:]
    torch.testing.assert_close(again.flatten(1), weights, atol=1e-6, rtol=0)


def test_wrong_shape_is_an_error() -> None:
    layer, _, _ = filled(HostLinear)
    with pytest.raises(WeightsError, match=r"\[3, 64\].*\[48, 64\]"):
        layer.target(0).write(torch.zeros(3, 64))


def test_scheme_names() -> None:
    assert linear_scheme(None, CPU).name == linear_scheme("dense", CPU).name == "dense"
    assert [linear_scheme(name, CPU).name for name in ("w8a8", "int4")] == ["w8a8", "int4"]
    with pytest.raises(ModelError, match="'w4'"):
        linear_scheme("w4", CPU)
    with pytest.raises(ModelError, match="CPU only"):
        linear_scheme("w8a8", torch.device("cuda"))


def test_int4_leaves_odd_shapes_dense() -> None:
    scheme = linear_scheme("int4", CPU)
    dense = PackedLinear if can_pack(torch.float32, CPU) else HostLinear
    assert isinstance(scheme.create(48, (32,), False, torch.float32, CPU), dense)
    assert isinstance(scheme.create(64, (40,), False, torch.float32, CPU), dense)
    assert isinstance(scheme.create(64, (32,), False, torch.float32, CPU), Int4Linear)
