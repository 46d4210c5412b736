"""The life of a server: bind, start the engine, serve, drain, leave. It knows signals and exit codes, not routes.

SIGTERM or SIGINT   not ready at once, new requests get 503, what runs may finish for drain_s, then gets an error
a second signal     ends what is left now
the engine dies     answers in flight end with an error, /health says 503 for linger_s, then exit code 1
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import uvicorn

from tandem.config import Settings
from tandem.engine.engine import AsyncEngine
from tandem.errors import SettingError
from tandem.serve.accept import Limits
from tandem.serve.app import create_app
from tandem.serve.failure import HttpError
from tandem.serve.service import QueueLimits, Service

log = logging.getLogger("tandem.serve")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve; the engine's own settings are apart. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    certificate: str | None = None
    private_key: str | None = None
    drain_s: float = 30.0
    linger_s: float = 2.0
    keep_alive_s: float = 10.0
    stall_s: float = 60.0
    limits: Limits = field(default_factory=Limits)
    queue: QueueLimits = field(default_factory=QueueLimits)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: draining comes first here."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def bind(options: ServeOptions) -> socket.socket:
    """The listening socket, taken before anything slow starts. Raises SettingError if the address is not to be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise SettingError(
            f"cannot listen on {options.host} port {options.port}: {error}.", hint="choose another with --port."
        ) from None
    listener.listen(2048)
    listener.set_inheritable(False)
    return listener


async def serve(settings: Settings, options: ServeOptions, on_ready: Callable[[Service, int], None]) -> int:
    """Serve until told to stop. Returns the exit code: 0 after a drain, 1 when the engine died."""
    listener = bind(options)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    engine: AsyncEngine | None = None
    try:
        engine = await _start(settings, signals)
        if engine is None:
            return 0
        service = Service(
            engine, options.names or (engine.card.name,), options.limits, options.queue, options.keep_alive_s,
            options.stall_s,
        )  # fmt: skip
        return await _run(service, options, listener, signals, on_ready)
    finally:
        if engine is not None:
            await engine.close()
        listener.close()


async def _start(settings: Settings, signals: "asyncio.Queue[int]") -> AsyncEngine | None:
    """Start the engine in its process; None if a signal came first."""
    starting = asyncio.ensure_future(AsyncEngine.start(settings))
    told = asyncio.ensure_future(signals.get())
    await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        told.cancel()
        return starting.result()
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    return None


async def _run(
    service: Service, options: ServeOptions, listener: socket.socket, signals: "asyncio.Queue[int]",
    on_ready: Callable[[Service, int], None],
) -> int:  # fmt: skip
    app = create_app(service, keys=options.keys, origins=options.origins)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", server_header=False, timeout_keep_alive=75,
        ssl_certfile=options.certificate, ssl_keyfile=options.private_key, timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    on_ready(service, listener.getsockname()[1])
    told = asyncio.ensure_future(signals.get())
    dead = asyncio.ensure_future(_until_dead(service))
    await asyncio.wait((told, dead, serving), return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if dead.done():
        log.error("the engine died: %s", service.engine.error)
        await asyncio.sleep(options.linger_s)
        code = 1
    else:
        await _drain(service, options.drain_s, signals, dead)
        code = 1 if dead.done() else 0
    for task in (told, dead):
        task.cancel()
    server.should_exit = True
    await serving
    return code


async def _until_dead(service: Service) -> None:
    while service.engine.error is None:
        await asyncio.sleep(0.1)


async def _drain(service: Service, drain_s: float, signals: "asyncio.Queue[int]", dead: "asyncio.Future[None]") -> None:
    service.draining = True
    log.info("draining: %d requests run", service.num_requests)
    second = asyncio.ensure_future(signals.get())
    empty = asyncio.ensure_future(_until_empty(service))
    await asyncio.wait((second, empty, dead), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    if not empty.done():
        service.end_all(HttpError("the server was stopped before this answer was complete.", code="draining"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(empty, 2.0)
    for task in (second, empty):
        task.cancel()


async def _until_empty(service: Service) -> None:
    while service.num_requests:
        await asyncio.sleep(0.02)
