"""Streams, events, pinned memory and graphs of one GPU, as few words as the runner needs. It knows no plans.

``EagerStreams`` says the same words on a CPU: kernels run at once, copies as late as the events allow, so that a
missing wait or a buffer that is written again too early shows as wrong tokens in a test without a GPU.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.sampling.upload import pinning


class Event(Protocol):
    """A moment on a stream."""

    def synchronize(self) -> None:
        """Block the host until the moment has come."""

    def query(self) -> bool:
        """Whether it has come."""


class Streams(Protocol):
    """Three queues of work: copies in, arithmetic, copies out. Names: "in", "compute", "out"."""

    device: torch.device

    def on(self, stream: str) -> AbstractContextManager[object]:
        """Work started inside goes to this stream."""

    def event(self) -> Event: ...

    def record(self, event: Event, stream: str) -> None: ...

    def wait(self, stream: str, event: Event) -> None:
        """Let the stream wait for the event; the host does not."""

    def copy(self, stream: str, target: Tensor, source: Tensor) -> None:
        """Copy between pinned host memory and the device on this stream; returns at once. Called on("compute")."""

    def drain(self) -> None:
        """Block until the compute stream has nothing left: at start, at the end, and when memory ran out."""

    def settle(self) -> None:
        """Block until all is done that was started before, on whatever stream: where things were made on others."""

    def give_back(self) -> None:
        """Let other programs have the memory that is no longer in use."""

    def reserved_bytes(self) -> int:
        """Device memory that this process holds."""

    def elapsed_s(self, first: Event, second: Event) -> float:
        """Seconds between two events that have come."""

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 host memory that copies and kernels can read or write by themselves.

        Raises torch.OutOfMemoryError, as if it were the device's.
        """

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what run starts on the compute stream, without running it; returns what replays it there."""


class CudaStreams:
    """Three non-default streams of one GPU and one memory pool for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        stream: Any = torch.cuda.Stream
        self._streams = {name: stream(device) for name in ("in", "compute", "out")}
        self._pool = torch.cuda.graph_pool_handle()

    def on(self, stream: str) -> AbstractContextManager[object]:
        return _Current(self._streams[stream])

    def event(self) -> Event:
        event: Any = torch.cuda.Event
        made: Event = event(enable_timing=True)
        return made

    def record(self, event: Event, stream: str) -> None:
        event.record(self._streams[stream])  # type: ignore[attr-defined]

    def wait(self, stream: str, event: Event) -> None:
        self._streams[stream].wait_event(event)

    def copy(self, stream: str, target: Tensor, source: Tensor) -> None:
        torch.cuda.set_stream(self._streams[stream])
        target.copy_(source, non_blocking=True)
        torch.cuda.set_stream(self._streams["compute"])

    def drain(self) -> None:
        self._streams["compute"].synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.device))

    def elapsed_s(self, first: Event, second: Event) -> float:
        return float(first.elapsed_time(second)) / 1000.0  # type: ignore[attr-defined]

    def pinned(self, num_bytes: int) -> Tensor:
        with pinning():
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Without the synchronisation that torch.cuda.graph() adds, so that steps in flight go on meanwhile.

        All graphs share one pool: two of them never run at once, and the largest is captured first.
        """
        graph = torch.cuda.CUDAGraph()
        with self.on("compute"), _no_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the capture is void; what matters is why
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python collects no garbage within: the graphs of a runner that is gone, freed in a capture, would void it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Current:
    """torch.cuda.stream for one device, at a third of its cost: it is entered in every step."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.cuda.current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


class EagerEvent:
    """A moment of the host's clock, and the copies that must be done before it."""

    def __init__(self) -> None:
        self.moment_s = 0.0
        self.pending: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        for job in self.pending:
            job()
        self.pending = []

    def query(self) -> bool:
        return True


class EagerStreams:
    """A GPU acted out on the CPU. Copies are put off until somebody waits for an event recorded behind them.

    device: "meta" where nothing is to be computed, only told (variants.py).
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self.device = device
        self._pending: dict[str, list[Callable[[], object]]] = {"in": [], "compute": [], "out": []}

    def on(self, stream: str) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> EagerEvent:
        return EagerEvent()

    def record(self, event: EagerEvent, stream: str) -> None:
        event.pending += self._pending[stream]
        self._pending[stream] = []
        event.moment_s = time.perf_counter()

    def wait(self, stream: str, event: EagerEvent) -> None:
        if stream == "compute":
            event.synchronize()

    def copy(self, stream: str, target: Tensor, source: Tensor) -> None:
        self._pending[stream].append(lambda: target.copy_(source))

    def drain(self) -> None:
        """Nothing is ever left."""

    def settle(self) -> None:
        """Nor elsewhere."""

    def give_back(self) -> None:
        """Nothing is kept."""

    def reserved_bytes(self) -> int:
        return 0

    def elapsed_s(self, first: EagerEvent, second: EagerEvent) -> float:
        return second.moment_s - first.moment_s

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run
