"""Compiling kernels in processes of their own while this one loads weights. It knows processes; not which kernels.

    this process      fork ── device, weights, libraries ────────────── join ── load kernels from Triton's cache
    the one that lists  └ asks the driver what device there is, acts steps out on "meta" tensors, forks for each kernel
    one a kernel                                     └── compiles it and its launcher into Triton's cache, ends

Python parses kernels, so threads would take turns. The first fork comes before the device is opened, so that no child
inherits a context. Whatever goes wrong here costs time alone: what is not in the cache is compiled where it is needed.
"""

import contextlib
import ctypes
import gc
import hashlib
import importlib
import logging
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NoReturn

import torch

from tandem.kernels.launch import Target, compile_ahead, has_triton, interpreted, planning

log = logging.getLogger("tandem.kernels")

PR_SET_PDEATHSIG = 1
MAJOR, MINOR, NUM_MULTIPROCESSORS = 75, 76, 16  # CUdevice_attribute
POLL_S = 0.005


class Compiling:
    """Kernels on their way into Triton's cache.

    mark   a file that is there once all of them are.
    """

    def __init__(self, mark: Path | None = None, process: int | None = None) -> None:
        self._mark, self._process = mark, process

    def join(self, most_s: float) -> bool:
        """Wait for at most so many seconds, then end it. Returns whether all kernels are in the cache."""
        end_s = time.perf_counter() + most_s
        while self._process is not None:
            try:
                ended, status = os.waitpid(self._process, os.WNOHANG)
            except ChildProcessError:  # somebody else waits for this process's children, or the kernel does
                ended, status = self._process, 0
            if ended:
                self._process = None
                if status:
                    log.debug("the process that has kernels compiled ended with status %s", status)
            elif time.perf_counter() > end_s:
                self.close()
            else:
                time.sleep(POLL_S)
        return self._mark is not None and self._mark.exists()

    def close(self) -> None:
        """End it, and all that it started. Idempotent."""
        if self._process is not None:
            for kill in (os.kill, os.killpg):  # it may not lead its group yet
                with contextlib.suppress(OSError):
                    kill(self._process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._process, 0)
            self._process = None


def compile_in_processes(list_kernels: Callable[[], None], wanted: str, target: Target | None = None) -> Compiling:
    """Start compiling all kernels that list_kernels launches on "meta" tensors; call it before CUDA is initialised.

    wanted   tells apart what list_kernels depends on: if all of that was compiled before, nothing is started.
    target   the device to compile for; None: the driver's first.
    """
    cuda: Any = torch.cuda
    if not has_triton() or interpreted() or not hasattr(os, "fork") or cuda.is_initialized():
        return Compiling()
    mark = Path(importlib.import_module("triton").knobs.cache.dir) / f"tandem-{_digest(wanted)}"
    if mark.exists():
        return Compiling(mark)
    with contextlib.suppress(ImportError, AttributeError):
        # Triton hashes itself for its cache's keys (0.3 s or more) and remembers; what is forked then knows, too.
        importlib.import_module("triton.runtime.cache").triton_key()

    def list_and_wait() -> None:
        os.setpgid(0, 0)
        torch.set_num_threads(1)
        processes = _Processes(len(os.sched_getaffinity(0)))
        with planning(target or _target_of_driver()), compile_ahead(processes):
            list_kernels()
        if not processes.wait():
            raise RuntimeError("not all kernels could be compiled")
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    return Compiling(mark, _fork(list_and_wait))


class _Processes(Executor):
    """Calls each function in a process of its own, at most so many at once. What it returns is lost."""

    def __init__(self, most: int) -> None:
        self._most, self._running, self._failed = max(most, 1), 0, 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        while self._running >= self._most:
            self._reap()
        _fork(lambda: _build_launcher(function(*args, **kwargs)))
        self._running += 1
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    def wait(self) -> bool:
        """Until all have ended. Returns whether all ended well."""
        while self._running:
            self._reap()
        return not self._failed

    def _reap(self) -> None:
        _, status = os.wait()
        self._running -= 1
        self._failed += status != 0


def _build_launcher(kernel: Any) -> None:
    """Compile the C function that launches the kernel, which Triton would at the first launch."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    with contextlib.suppress(AssertionError, OSError):  # without libcuda there is nothing to link it with
        driver.CudaLauncher(kernel.src, kernel.metadata)


def _target_of_driver() -> Target:
    """Ask the driver about its first device, without a context. Raises OSError if there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, found = ctypes.c_int(), []
    ask = [driver.cuInit(0), driver.cuDeviceGet(ctypes.byref(device), 0)]
    for attribute in (MAJOR, MINOR, NUM_MULTIPROCESSORS):
        value = ctypes.c_int()
        ask.append(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        found.append(value.value)
    if any(ask):
        raise OSError(f"the CUDA driver answered {ask}")
    return Target((found[0], found[1]), found[2])


def _digest(wanted: str) -> str:
    """Of all that decides which kernels there are and what they are compiled to, but for the device's name."""
    sources = [
        (path.name, path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(Path(__file__).parent.parent.glob("*/*.py"))
    ]
    named = sorted(item for item in os.environ.items() if item[0].startswith(("TRITON_", "TANDEM_")))
    cards = [path.read_text() for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    versions = torch.__version__, importlib.import_module("triton").__version__
    return hashlib.sha256(repr((wanted, versions, sources, named, cards)).encode()).hexdigest()[:24]


def _fork(work: Callable[[], None]) -> int:
    """Run work in a child that dies with this process and whose status says whether it came to its end."""
    parent = os.getpid()
    with warnings.catch_warnings():  # of Python 3.12, about threads: the child uses none of what they hold
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _live(parent, work)
    return child


def _live(parent: int, work: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == parent:
            gc.disable()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            if not log.isEnabledFor(logging.DEBUG):
                os.dup2(nowhere, 2)
            work()
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
