"""How kernels are launched: which tensors go to Triton, device facts, programmatic dependent launch.

It knows devices and launch options; it does not know any kernel, and loads Triton only when a tensor asks for it.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Triton can be imported (CPU installs of torch come without it)."""
    return importlib.util.find_spec("triton") is not None


@cache
def interpreted() -> bool:
    """Kernels run in Triton's interpreter: on the CPU, slowly, for tests. Set before Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(tensor: Tensor) -> bool:
    """The kernel is taken for this tensor; elsewhere its torch twin."""
    return tensor.is_cuda and has_triton() and not interpreted()


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; an H200's 132 where there is none, so that choices can be tested."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """The device starts a kernel while its predecessor drains (programmatic dependent launch, capability 9.0)."""
    if device.type != "cuda" or interpreted() or os.environ.get("TANDEM_DEPENDENT_LAUNCH") == "0":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


# How each family of kernels uses programmatic dependent launch: 0 not at all; 1 its successor may start as soon as all
# its own programs have started; 2 only once their main loops are done. Measured: 2 is best, since programs that start
# early take shared memory from those at work and end up unevenly spread (docs/log.md).
DEPENDENT = {"norm": 2, "activation": 2, "rope": 2, "attention": 2, "linear": 2, "sample": 2}


def options(tensor: Tensor, family: str, num_warps: int, num_stages: int = 2) -> dict[str, Any]:
    """Launch options common to all kernels. Every kernel takes PDL and waits for its predecessor if it is set.

    The order of writes stays that of the stream: with PDL a kernel may start early, but it waits for the whole of
    its predecessor (``gdc_wait``) before it reads or writes anything but weights.
    """
    mode = DEPENDENT[family] if has_dependent_launch(tensor.device) else 0
    chosen: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "PDL": mode}
    if mode:
        chosen["launch_pdl"] = True
    return chosen


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


@contextmanager
def compile_ahead(num_threads: int = 16) -> Iterator[None]:
    """Within, launches of Triton kernels only compile, side by side; all are ready at the end. Nothing is launched.

    Run a model's forward within for each shape of batch that will come: kernels that would compile one after the
    other, at their first launches, compile in as many threads instead. What torch itself launches does run, on
    whatever the outputs of the kernels that were not launched hold.
    """
    if not has_triton() or interpreted():
        yield
        return
    triton = importlib.import_module("triton")
    function = importlib.import_module("triton.runtime.jit").JITFunction
    launch = function.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    function.run = only_compile
    try:
        with ThreadPoolExecutor(num_threads) as threads, triton.AsyncCompileMode(threads):
            yield
    finally:
        function.run = launch
