"""A server on a real socket over the paced null device, in this process: what the front's tests need."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from tandem.engine.engine import AsyncEngine
from tandem.serve.app import create_app
from tandem.serve.options import ServeOptions
from tandem.serve.server import bind, http_server
from tandem.serve.service import Service

MAKE = "front_drive:make_paced_loop"
TEXT = "The quick brown fox jumps over the lazy dog. " * 50


def make_paced_loop(options: dict, mailbox: Any, on_phase: Callable[[str], None] = lambda text: None):
    """As build.make_loop on the null device, whose steps take step_s; every request says ``script``."""
    from tandem.engine.build import make_loop
    from tandem.engine.null_model import byte_tokenizer_json
    from tandem.engine.text import Text

    options = dict(options)
    step_s, script = options.pop("step_s", 0.0), options.pop("script", TEXT)
    loop, card = make_loop({"device": "null", **options}, mailbox, on_phase)
    runner: Any = loop.runner
    runner._step_time = step_s
    runner._script = Text(byte_tokenizer_json()).encode(script) if script else None
    return loop, card


@contextlib.asynccontextmanager
async def serving(
    *, keys: tuple[str, ...] = (), in_process: bool = True, routes: tuple = (), settle: Callable | None = None,
    wrap: Callable = lambda app, service: app,
    **options: Any,
) -> AsyncIterator[tuple[Service, str]]:  # fmt: skip
    """(service, base URL). options: step_s, script, and settings of the engine."""
    async with await AsyncEngine.start(make=MAKE, in_process=in_process, options=options) as engine:
        service = Service(engine, ("served",))
        if settle is not None:
            settle(service)
        app = wrap(create_app(service, keys=keys, routes=routes), service)
        listener = bind(ServeOptions(port=0))
        server = http_server(service, app, ServeOptions(), listener)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = listener.getsockname()[1]
        try:
            yield service, f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await task


def client_of(url: str, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=30, **options)


async def at_rest(service: Service, timeout_s: float = 3.0) -> None:
    for _ in range(int(timeout_s / 0.02)):
        if not service.num_requests and not service.meter.live and service.engine.statistics().get("live") == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it never came to rest: {service.statistics()} {service.meter.live}")
