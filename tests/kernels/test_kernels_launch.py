"""Starting kernels: compiled ones are found again, and what is told apart is at least what Triton tells apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kernels import launch

pytest.importorskip("triton")


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.run = lambda *args: kernel.fast.append(args)


class Kernel:
    """Triton's side: compiles at every slow launch, and notes them."""

    arg_names = ("x", "size", "scale", "BLOCK", "PDL")

    def __init__(self):
        self.slow, self.fast = [], []

    def __getitem__(self, grid):
        def launched(*args, **fixed):
            self.slow.append((grid, args, fixed))
            return Compiled(self)

        return launched


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "FAST", True)
    monkeypatch.setattr(launch, "_ready", {})
    monkeypatch.setattr(launch, "_current", [lambda: 0, lambda device: 77])
    return Kernel()


def test_a_second_launch_goes_past_triton_with_the_same_arguments(kernel):
    x = torch.zeros(64)
    launch.start(kernel, (3,), x, 32, 0.5, BLOCK=16, PDL=2, num_warps=4)
    launch.start(kernel, (5, 2), x[4:], 48, 0.7, BLOCK=16, PDL=2, num_warps=4)
    assert len(kernel.slow) == 1
    (args,) = kernel.fast
    assert args[:9] == (5, 2, 1, 77, "function", "metadata", None, None, None)
    assert args[9].data_ptr() == x[4:].data_ptr() and args[10:] == (48, 0.7, 16, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(64)[1:]}, {"x": torch.zeros(64, dtype=torch.float16)}, {"size": 1}, {"size": 33},
        {"size": 1 << 40}, {"BLOCK": 32}, {"num_warps": 8},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_kernel_relies_on_is_told_apart(kernel, change):
    usual = {"x": torch.zeros(64), "size": 32, "scale": 0.5, "BLOCK": 16, "PDL": 0, "num_warps": 4}
    for chosen in (usual, {**usual, **change}):
        x, size, scale, *_ = chosen.values()
        launch.start(kernel, (1,), x, size, scale, **{n: chosen[n] for n in ("BLOCK", "PDL", "num_warps")})
    assert len(kernel.slow) == 2 and not kernel.fast


def test_while_compiling_ahead_nothing_is_kept(kernel):
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    with launch.compile_ahead():
        assert not launch.FAST
        for _ in range(2):  # layer after layer asks for the same one
            launch.start(kernel, (1,), torch.zeros(4), 2, 1.0, BLOCK=1, PDL=0)
        launch.start(kernel, (1,), torch.zeros(4), 3, 1.0, BLOCK=1, PDL=0)
        launch.start(kernel, (1,), torch.zeros(4), 1, 1.0, BLOCK=1, PDL=0)
    assert launch.FAST and not launch.COMPILING and JITFunction.run is before
    assert len(kernel.slow) == 2 and not launch._ready


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(-(1 << 62), (1 << 64) - 1) | st.integers(-40, 40), min_size=2, max_size=2))
def test_integers_of_one_kind_are_one_to_triton(pair):
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    one, other = (native_specialize_impl(BaseBackend, value, False, True, True) for value in pair)
    if launch._kind(pair[0]) == launch._kind(pair[1]):
        assert one == other


def test_who_reads_ahead_of_the_wait_follows_one_that_is_past_its_own():
    """Attention reads lengths and tables, the end of a step hidden states: settled when the one before was at work."""
    assert launch.DEPENDENT["rope"] in (0, 2) and launch.DEPENDENT["sample"] in (0, 2)
