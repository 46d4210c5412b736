"""Request bodies: read in time, within a size and within the memory that all of them may take together.

It knows headers and bytes; it does not know fields. A body counts from its first byte until the request is admitted
or answered: what has been read is held as text while the template and the tokenizer are at work on it.

Large bodies are decoded and understood on a thread of their own, one after the other, so that the event loop has its
turn between any two steps of that. What takes long in one step is refused; see nesting.py.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.errors import RequestError
from tandem.serve.failure import HttpError, decode
from tandem.serve.nesting import SMALL_BYTES

Body = TypeVar("Body")
Given = ParamSpec("Given")
Made = TypeVar("Made")
CLAIM = "tandem.body_bytes"


@dataclass(slots=True)
class Bodies:
    """All bodies. limit_bytes: memory that all may take at once; wait_s: time for one, from its head on."""

    limit_bytes: int = 64 << 20
    wait_s: float = 60.0
    num_bytes: int = 0
    peak_bytes: int = 0
    num_refused: int = 0
    num_late: int = 0
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tandem-bodies"))

    def claim(self, scope: Scope, num_bytes: int) -> None:
        """Count so many more bytes of one request. Raises 503 if all together were too many."""
        self.check_room(num_bytes)
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        scope[CLAIM] = scope.get(CLAIM, 0) + num_bytes

    def check_room(self, num_bytes: int) -> None:
        """Raise 503 if so many more bytes were too many. A body that is alone always has room."""
        if self.num_bytes and self.num_bytes + num_bytes > self.limit_bytes:
            self.num_refused += 1
            raise HttpError(
                f"the bodies of other requests take {self.num_bytes} bytes; the limit is {self.limit_bytes}.",
                code="overloaded", hint="try again later.", Retry_After="1",
            )  # fmt: skip

    def release(self, scope: Scope) -> None:
        """Give back what a request has claimed. Idempotent."""
        self.num_bytes -= scope.pop(CLAIM, 0)

    def statistics(self) -> dict[str, Any]:
        return {
            "bytes": self.num_bytes,
            "peak_bytes": self.peak_bytes,
            "refused": self.num_refused,
            "late": self.num_late,
        }


@dataclass(frozen=True, slots=True)
class Apart:
    """How work on one request's body is done: at once, or on the thread for large ones, when it is its turn.

    thread   that thread, if the body is a large one.
    """

    thread: ThreadPoolExecutor | None

    async def __call__(self, work: Callable[Given, Made], *values: Given.args, **named: Given.kwargs) -> Made:
        if self.thread is None:
            return work(*values, **named)
        return await asyncio.get_running_loop().run_in_executor(self.thread, partial(work, *values, **named))


def apart_of(request: Request) -> Apart:
    """For a request whose body has been read."""
    bodies: Bodies = request.app.state.service.bodies
    return Apart(bodies.reader if request.scope.get(CLAIM, 0) > SMALL_BYTES else None)


class BodyClaims:
    """ASGI middleware: a request that is over holds no body any more."""

    def __init__(self, app: ASGIApp, bodies: Bodies) -> None:
        self.app, self.bodies = app, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        finally:
            self.bodies.release(scope)


async def read_json(request: Request, kind: type[Body], limit_bytes: int) -> Body:
    """Read and decode a body of at most limit_bytes.

    Raises RequestError: 415, 413, 408 if it takes too long, 503 if the bodies of others take all the room, or 400 with
    the path at fault.
    """
    _check_kind(request)
    bodies: Bodies = request.app.state.service.bodies
    length = request.headers.get("content-length", "")
    if length.isdigit():
        if int(length) > limit_bytes:
            raise RequestError(f"the body has {length} bytes; the limit is {limit_bytes}.", code="request_too_large")
        bodies.check_room(int(length))
    raw = bytearray()
    try:
        async with asyncio.timeout(bodies.wait_s):
            async for chunk in request.stream():
                if len(raw) + len(chunk) > limit_bytes:
                    raise RequestError(f"the body is over {limit_bytes} bytes.", code="request_too_large")
                bodies.claim(request.scope, len(chunk))
                raw += chunk
    except TimeoutError:
        bodies.num_late += 1
        raise HttpError(f"the body did not come within {bodies.wait_s:g} s.", code="request_timeout") from None
    return await apart_of(request)(decode, bytes(raw), kind)


def _check_kind(request: Request) -> None:
    """Only plain JSON in UTF-8 is read; anything else is 415 and named. A header given twice counts as a list."""
    headers = request.headers
    kinds = headers.getlist("content-type")
    if len(kinds) > 1:
        raise _unsupported(f"there are {len(kinds)} Content-Types: {', '.join(kinds):.200}; there must be one.")
    media_type, *options = (part.strip() for part in "".join(kinds).split(";"))
    if media_type.lower() != "application/json":
        raise _unsupported(f"the Content-Type is {media_type or 'missing'}; it must be application/json.")
    for option in options:
        name, _, value = option.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip("\"'").lower() not in ("utf-8", "utf8"):
            raise _unsupported(f"the charset is {value.strip()}; it must be utf-8.")
    if encoding := _others(headers.getlist("content-encoding"), "identity"):
        raise _unsupported(f"the Content-Encoding is {encoding}; send the body as it is.")
    if transfer := _others(headers.getlist("transfer-encoding"), "chunked"):
        raise _unsupported(f"the Transfer-Encoding is {transfer}; only chunked is known.")


def _others(values: list[str], known: str) -> str:
    """The header as one list, if that is anything but the one value that is known; else nothing."""
    told = ", ".join(values).strip()
    return "" if told.lower() in ("", known) else told


def _unsupported(what: str) -> RequestError:
    return RequestError(what, code="unsupported_media_type")
