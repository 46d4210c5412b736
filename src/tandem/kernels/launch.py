"""How kernels are launched: which tensors go to Triton, device facts, programmatic dependent launch.

It knows devices and launch options; it does not know any kernel, and loads Triton only when a tensor asks for it.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

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
    return (tensor.is_cuda or (_planned is not None and tensor.is_meta)) and has_triton() and not interpreted()


class Target(NamedTuple):
    """What kernels depend on of a device."""

    capability: tuple[int, int]
    num_multiprocessors: int


_planned: Target | None = None  # within planning(): the device that tensors without memory stand for


def target_of(device: torch.device) -> Target | None:
    """The facts of a CUDA device, or of the one that is planned for; None: of neither."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return Target((found.major, found.minor), found.multi_processor_count)
    return _planned if device.type == "meta" else None


@cache
def target_or_h200(device: torch.device) -> Target:
    """The facts of a device, or an H200's where there is none, so that choices can be tested."""
    return target_of(device) or Target((9, 0), 132)


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; see target_or_h200."""
    return target_or_h200(device).num_multiprocessors


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """The device starts a kernel while its predecessor drains (programmatic dependent launch, capability 9.0)."""
    target = target_of(device)
    if target is None or interpreted() or os.environ.get("TANDEM_DEPENDENT_LAUNCH") == "0":
        return False
    return target.capability[0] >= 9


@cache
def has_streams(device: torch.device) -> bool:
    """Whether linear_stream.py runs there: Hopper's tensor cores and copy engine, and a Triton that has Gluon's 3.6."""
    target = target_of(device)
    if target is None or target.capability[0] != 9:
        return False
    version = importlib.import_module("triton").__version__.split(".")[:2]
    return tuple(map(int, version)) >= (3, 6) and _imports("triton.experimental.gluon.nvidia.hopper")


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


# How each family of kernels uses programmatic dependent launch: 0 not at all; 1 its successor may start as soon as all
# its own programs have started; 2 only once their main loops are done. 1 pays where the successor has something to do
# before it waits: products that stream their weights. A family is in 2 where programs that start early only take
# shared memory from those at work and end up unevenly spread over multiprocessors (measured: docs/log.md).
#
# Why the order of writes stays that of the stream. Every program of every kernel that is launched so passes gdc_wait
# before it reads or writes anything that its predecessor touches; gdc_wait returns when the predecessor has completed,
# its writes visible. A kernel completes only after all its programs passed their own wait, so when kernel n is past its
# wait, n - 1 has completed, hence n - 2, and so on: reuse of memory two kernels back (a cache slot, the scratch and
# tickets of attention, what the allocator hands out again inside a graph) is as safe as without. Kernels launched in
# the plain way wait for all of their predecessor. Ahead of the wait only this is read:
#   - weights, and tables made when the model was: nothing in a step writes them;
#   - what was written two kernels back or more, by kernels whose predecessor is in mode 2, for that one was past its
#     own wait when it let them start: attention behind rope (lengths, block tables, order of spans), the end of a
#     step behind sample, or behind the product that raises winners (hidden states). So rope, sample and linear, as
#     which that product is launched, stay in 2;
#   - where rope lets attention start early (reads_ahead), what was written before the first norm of the step: that one
#     is in mode 2, and none behind it writes lengths, tables, or keys and values that a span of one token reads, but
#     its own: blocks are shared once an earlier step has computed them (Ledger.learn; fork behind the prompt's step).
# A program must not return ahead of its wait, and a kernel that lets its successor start must wait itself.
DEPENDENT = {
    "norm": 1, "first norm": 2, "activation": 2, "rope": 2, "early rope": 1, "attention": 1, "stream": 1, "linear": 2,
    "sample": 2, "route": 1,
}  # fmt: skip


def reads_ahead(num_tokens: int) -> bool:
    """Whether attention of so many spans reads the cache ahead of its wait, behind an early rope; in the deterministic
    mode, where one of few programs of four warps does (attention_invariant.py).

    Between, its programs take the places of those at work: measured at 8 spans of 500 tokens and more (docs/log.md).
    """
    return num_tokens <= 4 or 16 <= num_tokens <= 32


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


FAST = os.environ.get("TANDEM_FAST_LAUNCH") != "0"
COMPILING = False
_ready: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_current: list[Any] = []  # how Triton asks for the current device and stream
_asked: set[tuple[Any, ...]] = set()  # while kernels are only compiled: those that are on their way


def start(kernel: Any, grid: tuple[int, ...], *args: Any, **fixed: Any) -> None:
    """``kernel[grid](*args, **fixed)`` at a fraction of the host's time, for kernels whose constants come last.

    Triton finds the compiled kernel anew at each launch, by a description of every argument; here a shorter one is
    looked up, which tells apart at least what Triton does: type, alignment by 16, integers that are 1.
    """
    if not FAST or interpreted():
        if COMPILING:  # a model asks for the same kernel in each layer, and Triton would describe its source each time
            asked = (id(kernel), *map(_kind, args), *fixed.items())
            if asked in _asked:
                return
            _asked.add(asked)
        kernel[grid](*args, **fixed)
        return
    if not _current:
        active = importlib.import_module("triton.runtime").driver.active
        _current.extend((active.get_current_device, active.get_current_stream))
    device = _current[0]()
    key = (id(kernel), device, *map(_kind, args), *fixed.items())
    found = _ready.get(key)
    if found is None:
        compiled = kernel[grid](*args, **fixed)
        assert not any(name in fixed for name in kernel.arg_names[: len(args)]), "constants must come last"
        constants = tuple(fixed[name] for name in kernel.arg_names[len(args) :])
        _ready[key] = (compiled.run, compiled.function, compiled.packed_metadata, constants)
        return
    run, function, metadata, constants = found
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, _current[1](device), function, metadata, None, None, None, *args, *constants)


def _kind(value: Any) -> Any:
    """What of an argument a compiled kernel may rely on."""
    if type(value) is int:
        return value if value == 1 else (value % 16 == 0, -0x80000000 <= value < 0x80000000, value < 1 << 63)
    if type(value) is float:
        return float
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return value.base.dtype, tuple(value.block_shape)  # a tensor descriptor


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


@contextmanager
def compile_ahead(executor: Executor | None = None) -> Iterator[None]:
    """Within, launches of Triton kernels only compile, side by side; all are ready at the end. Nothing is launched.

    Run a model's forward within for each shape of batch that will come. What torch itself launches does run, on
    whatever the outputs of the kernels that were not launched hold; within planning() too there is nothing to run.

    executor: compiles; None: threads, which are of little use while kernels are parsed, since that is Python.
    """
    if not has_triton() or interpreted():
        yield
        return
    mode = importlib.import_module("triton").AsyncCompileMode
    function = importlib.import_module("triton.runtime.jit").JITFunction
    launch = function.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    global FAST, COMPILING
    function.run, was_fast, FAST, COMPILING = only_compile, FAST, False, True
    _asked.clear()
    try:
        with ThreadPoolExecutor(16) if executor is None else nullcontext(executor) as workers, mode(workers):
            yield
    finally:
        function.run, FAST, COMPILING = launch, was_fast, False


@contextmanager
def planning(target: Target) -> Iterator[None]:
    """Within, tensors without memory ("meta") stand for those of a device. No driver is asked for anything.

    Kernels may be compiled (compile_ahead), not launched.
    """
    global _planned
    drivers = importlib.import_module("triton.runtime").driver
    was_active = drivers._active  # asking for it would open the device
    _forget()
    _planned = target
    drivers.set_active(_Planned(target))
    try:
        yield
    finally:
        _planned = None
        _forget()
        drivers._active = was_active


class _Planned:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, target: Target) -> None:
        major, minor = target.capability
        self._target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def _forget() -> None:
    for known in (target_or_h200, has_dependent_launch, has_streams):
        known.cache_clear()
