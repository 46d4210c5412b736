"""The life of a server: bind, start the engine, serve, drain, leave. It knows signals and exit codes, not routes.

SIGTERM or SIGINT   not ready at once, new requests get 503, what runs may finish for drain_timeout, then gets an error
a second signal     ends what is left now
the engine dies, or its step is overdue (stall_timeout)
                    answers in flight end with an error, /health says 503 for linger, then exit code 1
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.routing import BaseRoute

from tandem.config import Settings
from tandem.engine.engine import AsyncEngine
from tandem.engine.process import EXIT_S
from tandem.errors import EngineDeadError, SettingError
from tandem.serve.app import create_app
from tandem.serve.border import Border
from tandem.serve.door import HttpServer, connection_limit
from tandem.serve.failure import HttpError, is_reported
from tandem.serve.guard import is_local_name
from tandem.serve.options import ServeOptions
from tandem.serve.service import Service
from tandem.serve.trace import tracing

log = logging.getLogger("tandem.serve")

Say = Callable[[str], None]
WATCH_S = 0.05
LAST_WORDS_S = 0.5
DEAD_EXIT_S = 0.2
KEEP_ALIVE_S = 75


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
    listener.set_inheritable(False)
    return listener


async def serve(
    settings: Settings, options: ServeOptions, *, keys: Sequence[str] = (), say: Say = log.info,
    routes: Sequence[BaseRoute] = (), start: Mapping[str, Any] | None = None,
) -> int:  # fmt: skip
    """Serve until told to stop. Returns the exit code: 0 after a drain, 1 when the engine died.

    keys     API keys; none: the server is open.      say   told what people want to know: start-up, banner, drain.
    routes   served beside the server's own.          start  more for AsyncEngine.start.
    Raises SettingError for an address or certificate that cannot be used, and what AsyncEngine.start raises.
    """
    _check_certificate(options)
    listener = bind(options)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    engine: AsyncEngine | None = None
    code = 0
    try:
        engine = await _start(settings, signals, {"on_phase": say, **(start or {})})
        if engine is None:
            say("stopped while starting")
            return 0
        service = Service(
            engine, options.served_model_name or (engine.card.name,), options.limits, options.queue,
            options.keep_alive, options.stall_timeout,
        )  # fmt: skip
        service.bodies = options.bodies
        service.vllm_metric_names = options.vllm_metric_names
        app = create_app(service, keys=keys, origins=options.cors_origin, hosts=_hosts(options, keys), routes=routes)
        with tracing(options.otlp_endpoint, app, service) as traced:
            code = await _run(
                service, traced, options, listener, signals, lambda port: _banner(service, options, keys, port, say)
            )
            return code
    finally:
        if engine is not None:
            await engine.close(exit_s=DEAD_EXIT_S if code else EXIT_S)
        listener.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _check_certificate(options: ServeOptions) -> None:
    if options.tls_certificate is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls_certificate, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(
            f"the certificate {options.tls_certificate} and its key cannot be used: {error}.",
            hint="give PEM files with --tls-certificate and --tls-key.",
        ) from None


def _banner(service: Service, options: ServeOptions, keys: Sequence[str], port: int, say: Say) -> None:
    scheme = "https" if options.tls_certificate else "http"
    host = f"[{options.host}]" if ":" in options.host else options.host
    for line in service.engine.card.lines:
        say(line)
    say(f"models                   {', '.join(service.names)}")
    say(f"API keys                 {len(keys) or 'none: every client is served'}")
    if not keys and not is_local_name(options.host):
        say(f"warning: {options.host} may be reached from elsewhere, and no API key is set (--api-key-file).")
    say(f"ready on {scheme}://{host}:{port}")


def _hosts(options: ServeOptions, keys: Sequence[str]) -> tuple[str, ...] | None:
    """Names that a request's Host may have beside localhost; None: any. See guard.HostGuard."""
    is_private = is_local_name(options.host) and not keys
    return options.allowed_host if is_private or options.allowed_host else None


async def _start(settings: Settings, signals: "asyncio.Queue[int]", options: dict[str, Any]) -> AsyncEngine | None:
    """Start the engine in its process; None if a signal came first."""
    starting = asyncio.ensure_future(AsyncEngine.start(settings, **options))
    told = asyncio.ensure_future(signals.get())
    await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
    if not told.done():
        told.cancel()
        return starting.result()
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await starting).close()  # ready at the very moment
    return None


async def _run(
    service: Service, app: Any, options: ServeOptions, listener: socket.socket, signals: "asyncio.Queue[int]",
    on_ready: Callable[[int], None],
) -> int:  # fmt: skip
    server = http_server(service, app, options, listener)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
        if serving.done():
            serving.result()
            return 1
    gc.collect()
    gc.freeze()  # what start-up made lives as long as we do: no collection may stop all streams to scan it
    # A step of 500 streams makes some thousand objects at once, nearly all gone at its end without any collection; with
    # Python's own thresholds a sixth of the time went into looking at them.
    gc.set_threshold(25_000, 5, 5)
    on_ready(listener.getsockname()[1])
    told = asyncio.ensure_future(signals.get())
    dead = asyncio.ensure_future(_until_dead(service))
    await asyncio.wait((told, dead, serving), return_when=asyncio.FIRST_COMPLETED)
    if not dead.done():
        await _drain(service, options.drain_timeout, signals, dead)
    code = 1 if dead.done() else 0
    if dead.done():
        await _mourn(service, options.linger, signals)
    for task in (told, dead):
        task.cancel()
    server.should_exit = True
    await serving
    return code


def http_server(service: Service, app: Any, options: ServeOptions, listener: socket.socket) -> HttpServer:
    """The server of an application on a bound socket."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", server_header=False, timeout_keep_alive=KEEP_ALIVE_S,
        ws="none", ssl_certfile=options.tls_certificate, ssl_keyfile=options.tls_key,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    limit = connection_limit(options.max_connections)
    if limit < (options.max_connections or 0):
        log.warning("the limit on descriptors allows %d connections, not %d", limit, options.max_connections)
    service.border = Border(header_s=options.header_timeout, max_connections=limit)
    return HttpServer(config, service.border, listener)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether uvicorn's line tells what ours have not."""
    return not (record.exc_info and is_reported(record.exc_info[1]))


async def _until_dead(service: Service) -> None:
    while service.dead is None:
        await asyncio.sleep(WATCH_S)


async def _mourn(service: Service, linger_s: float, signals: "asyncio.Queue[int]") -> None:
    """The engine is gone: end every answer, say so to those who ask for a while. A signal cuts that short."""
    error = service.dead or EngineDeadError("the engine has stopped.")
    log.error("%s", error.what)
    service.end_all(error)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(signals.get(), linger_s)


async def _drain(service: Service, drain_s: float, signals: "asyncio.Queue[int]", dead: "asyncio.Future[None]") -> None:
    service.draining = True
    log.info("draining: %d requests run", service.num_requests)
    second = asyncio.ensure_future(signals.get())
    empty = asyncio.ensure_future(_until_empty(service))
    await asyncio.wait((second, empty, dead), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    if not empty.done() and not dead.done():
        service.end_all(HttpError("the server was stopped before this answer was complete.", code="draining"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(empty, LAST_WORDS_S)
    for task in (second, empty):
        task.cancel()


async def _until_empty(service: Service) -> None:
    while service.num_requests:
        await asyncio.sleep(0.02)
