"""A server-sent event stream as a raw ASGI answer. It knows connections; it does not know what is in the events.

Headers go out with the first event or the first keep-alive, whichever is sooner, so that a request that fails before
then gets a status and an error body. A keep-alive is a comment line; it is sent when nothing else was for a while.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from tandem.serve.failure import body_of, report, response_of

Answer = TypeVar("Answer")
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client closed the connection before it had its answer."""


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, answer: Awaitable[Answer]) -> Answer:
    """Await an answer for as long as the client stays. Raises ClientGoneError, the answer cancelled."""
    task, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


class EventStream:
    """An ASGI application that sends events until they end, fail, or the client leaves; then calls on_end once."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_end: Callable[[Exception | None], Any],
        keep_alive_s: float = 10.0, headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:  # fmt: skip
        self.events, self.on_end, self.keep_alive_s = events, on_end, keep_alive_s
        self.headers = HEADERS + (headers or [])
        self.started = self.sending = False
        self.sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: Exception | None = None
        self.sent_at = asyncio.get_running_loop().time()
        lock = asyncio.Lock()
        beat = asyncio.ensure_future(self._keep_alive(send, lock))
        try:
            await unless_gone(receive, self._pump(send, scope.get("tandem.send", send), lock))
            beat.cancel()
            await send({"type": "http.response.body", "body": b""})
        except ClientGoneError as left:
            error = left
        except Exception as failure:
            error = failure
            beat.cancel()
            await self._tell(failure, scope, receive, send)
        except BaseException:
            error = ClientGoneError()
            raise
        finally:
            beat.cancel()
            self.on_end(error)

    async def _pump(self, send: Send, send_body: Send, lock: asyncio.Lock) -> None:
        """Send events. A client that reads too slowly is waited for in ``send_body``, and nobody waits with it."""
        time_s = asyncio.get_running_loop().time
        async with aclosing(self.events):
            async for event in self.events:
                self.sending = True
                if lock.locked() or not self.started:
                    async with lock:
                        await self._start(send)
                await send_body({"type": "http.response.body", "body": event, "more_body": True})
                self.sent_at = time_s()
                self.sending = False

    async def _keep_alive(self, send: Send, lock: asyncio.Lock) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.01, self.sent_at + self.keep_alive_s - loop.time()))
            if not self.sending and loop.time() >= self.sent_at + self.keep_alive_s:
                async with lock:
                    await self._start(send)
                    await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
                self.sent_at = loop.time()

    async def _start(self, send: Send) -> None:
        if not self.started:
            self.started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})

    async def _tell(self, failure: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """An error body if nothing is out yet, else one error event; never a bare end."""
        report(failure, scope["method"], scope["path"])
        if not self.started:
            answer = response_of(failure)
            answer.raw_headers += [pair for pair in self.headers if pair[0] == b"x-request-id"]
            await answer(scope, receive, send)
            return
        event = b"data: " + orjson.dumps(body_of(failure)) + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": False})
