"""A mixture by its Triton kernels against float64; a token alone and among others; captured in a graph on a card."""

import pytest
import torch
import torch.nn.functional as F

from tandem.kernels import launch
from tandem.layers.mixture import HostMixture, Mixture, mixture

NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
interpreter = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
pytestmark = interpreter


def mixture_of(dtype, device, *, normalise=True, invariant=False, num_experts=6, hidden=64, inner=48):
    """Scores are small whole numbers over 8, the same however they are added."""
    layer = Mixture(hidden, inner, num_experts, 3, normalise, "silu", invariant=invariant, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(1)
    layer.router_XE.data.copy_(torch.randint(-2, 3, (num_experts, hidden), generator=generator) / 8)
    layer.router_XE.data += torch.arange(num_experts, device=device)[:, None].to(dtype) / 64
    for weight in (layer.gate_up_X2FE.data, layer.down_XEF.data):
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    return layer


def hidden_of(num_tokens, dtype, device, hidden=64):
    generator = torch.Generator().manual_seed(2)
    return (torch.randint(-8, 9, (num_tokens, hidden), generator=generator) / 8).to(device, dtype)


def wanted(layer, hidden_TE):
    """Token by token, expert by expert."""
    out, width = [], layer.intermediate_size
    for token in hidden_TE.double():
        chances = torch.softmax(layer.router_XE.double() @ token, 0)
        best, chosen = chances.topk(layer.num_chosen)
        best = best / best.sum() if layer.normalise else best
        both = layer.gate_up_X2FE.double()[chosen] @ token
        inner = F.silu(both[:, :width]) * both[:, width:]
        out.append((best[:, None] * (layer.down_XEF.double()[chosen] @ inner[..., None]).squeeze(-1)).sum(0))
    return torch.stack(out)


def assert_near(got, want, limit):
    error = float((got.double() - want).norm() / want.norm())
    assert got.isfinite().all() and error < limit, f"relative error {error:.2e}"


@pytest.fixture
def by_triton(monkeypatch):
    """The way of a GPU, in the interpreter."""
    pytest.importorskip("triton")
    if not launch.interpreted():
        pytest.skip("kernels are compiled here")
    import importlib

    monkeypatch.setattr(importlib.import_module("tandem.kernels.grouped"), "runs_triton", lambda tensor: True)


@pytest.mark.parametrize("normalise", [False, True])
def test_tokens_on_the_cpu(normalise):
    layer = mixture_of(torch.float32, "cpu", normalise=normalise)
    hidden_TE = hidden_of(13, torch.float32, "cpu")
    assert_near(layer(hidden_TE), wanted(layer, hidden_TE), 1e-5)


def host_mixtures(hidden, inner, num_experts, **how):
    """The same weights, written by targets, in the layer that is asked for, and as they stand."""
    asked, plain = (
        make(hidden, inner, num_experts, 3, True, "silu", dtype=torch.float32, device=torch.device("cpu"), **how)
        for make in (mixture, Mixture)
    )
    generator = torch.Generator().manual_seed(3)
    for one, other in [(asked.router_target(), plain.router_target())] + [
        (asked.targets(expert)[part], plain.targets(expert)[part])
        for expert in range(num_experts) for part in ("gate", "up", "down")
    ]:  # fmt: skip
        weight = torch.randn(one.shape, generator=generator) * one.shape[-1] ** -0.5
        one.write(weight)
        other.write(weight)
    return asked, plain


def test_a_token_is_the_same_number_among_any_others_on_the_cpu():
    """As --deterministic promises; torch's grouped product there adds otherwise for other numbers of rows."""
    layer, plain = host_mixtures(128, 96, 8, invariant=True)
    many_TE = torch.randn(200, 128, generator=torch.Generator().manual_seed(4))
    among = layer(many_TE)
    assert_near(among, wanted(plain, many_TE), 1e-5)
    for num_tokens in (1, 2, 3, 8, 17, 64, 65, 130):
        for first in (0, 31, 200 - num_tokens):
            assert torch.equal(layer(many_TE[first : first + num_tokens]), among[first : first + num_tokens])


def test_odd_sizes_on_the_cpu():
    layer, plain = host_mixtures(50, 33, 5, invariant=False)
    assert isinstance(layer, HostMixture)
    many_TE = torch.randn(11, 50, generator=torch.Generator().manual_seed(4))
    assert_near(layer(many_TE), wanted(plain, many_TE), 1e-5)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("normalise", [False, True])
def test_tokens_by_our_kernels(by_triton, dtype, normalise):
    layer = mixture_of(dtype, "cpu", normalise=normalise)
    hidden_TE = hidden_of(13, dtype, "cpu")
    among = layer(hidden_TE)
    assert_near(among, wanted(layer, hidden_TE), NEAR[dtype])
    for first, end in ((0, 1), (12, 13), (4, 9)):
        assert torch.equal(layer(hidden_TE[first:end]), among[first:end])


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@torch.inference_mode()
def test_a_decode_step_is_captured(dtype, invariant):
    layer = mixture_of(dtype, "cuda", invariant=invariant)
    hidden_TE = hidden_of(8, dtype, "cuda")
    layer(hidden_TE)
    torch.cuda.synchronize()
    graph, given_TE = torch.cuda.CUDAGraph(), torch.zeros_like(hidden_TE)
    with torch.cuda.graph(graph):
        out_TE = layer(given_TE)
    for shift in (0, 3):  # other experts than at the capture, other groups
        given_TE.copy_(hidden_TE.roll(shift, 1))
        graph.replay()
        assert_near(out_TE, wanted(layer, given_TE), NEAR[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_experts", "hidden", "inner"), [(8, 512, 384), (60, 576, 200)])
@torch.inference_mode()
def test_a_token_is_the_same_number_among_any_others(dtype, num_experts, hidden, inner):
    layer = mixture_of(dtype, "cuda", invariant=True, num_experts=num_experts, hidden=hidden, inner=inner)
    many_TE = torch.randn(300, hidden, generator=torch.Generator().manual_seed(4)).to("cuda", dtype)
    among = layer(many_TE)
    for num_tokens in (1, 2, 8, 17, 33, 64, 65, 130, 257):
        assert torch.equal(layer(many_TE[:num_tokens]), among[:num_tokens])
    assert torch.equal(layer(many_TE[299:]), among[299:])
