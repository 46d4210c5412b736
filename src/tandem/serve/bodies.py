"""Request bodies: read in time, within a size and within the memory that all of them may take together.

It knows headers and bytes; it does not know fields. A body counts from its first byte until the request is admitted
or answered: what has been read is held as text while the template and the tokenizer are at work on it.

Large bodies, which are all but quick ones (see nesting.py), are decoded and understood on a thread of their own, one
body at a time, so that the event loop has its turn between any two steps of that. What takes long in one step is
refused; see there, too. Clients take turns:

    read ─► in line, each client's by size ─► its turn: decoded, rendered, encoded ─► admitted, or answered
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.errors import RequestError
from tandem.line import LineOfKinds
from tandem.serve.decoded import decode
from tandem.serve.events import ClientGoneError, unless_gone
from tandem.serve.failure import HttpError
from tandem.serve.guard import client_of
from tandem.serve.nesting import is_quick
from tandem.serve.share import over_share

Body = TypeVar("Body")
Given = ParamSpec("Given")
Made = TypeVar("Made")
CLAIM, TURN = "tandem.body_bytes", "tandem.body_turn"


@dataclass(slots=True, eq=False)
class Turn:
    """One large body's.

    client   who asks.
    size     bodies of one client take turns by size, so that a long one delays only its like.
    begun    its turn has come.
    """

    client: str
    size: str
    begun: asyncio.Future[None]


@dataclass(slots=True)
class Bodies:
    """All bodies. Bytes, counts and seconds.

    limit_bytes   memory that all may take at once.      wait_s   time for one to come, and to wait for its turn.
    reserve       the share of memory and line that is kept for clients which hold no more than that share.
    line          large bodies that have come and wait for their turn.      turn   whose it is.
    held          bytes of each client.      waiting   in line, of each client.
    """

    limit_bytes: int = 64 << 20
    wait_s: float = 60.0
    reserve: float = 0.125
    max_waiting: int = 1024
    num_bytes: int = 0
    peak_bytes: int = 0
    num_refused: int = 0
    num_late: int = 0
    line: LineOfKinds[Turn] = field(default_factory=lambda: LineOfKinds(attrgetter("size")))
    turn: Turn | None = None
    held: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tandem-bodies"))

    def claim(self, scope: Scope, num_bytes: int) -> None:
        """Count so many more bytes of one request. Raises as check_room."""
        self.check_room(scope, num_bytes)
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        self.held[client_of(scope)] += num_bytes
        scope[CLAIM] = scope.get(CLAIM, 0) + num_bytes

    def check_room(self, scope: Scope, num_bytes: int) -> None:
        """Raise 503 if so many more bytes were too many, 429 if they were too many for one client. A body that is
        alone always has room."""
        if self.num_bytes > scope.get(CLAIM, 0):
            held = self.held[client_of(scope)]
            self._check_share("bytes of bodies", self.limit_bytes, self.num_bytes, held, num_bytes)

    def _check_share(self, what: str, limit: int, in_all: int, held: int, more: int) -> None:
        if told := over_share(what, limit, self.reserve, in_all, held, more):
            self.num_refused += 1
            code = "overloaded" if in_all + more > limit else "queue_full"
            raise HttpError(told, code=code, hint="try again later.", Retry_After="1")

    async def take_turn(self, request: Request) -> None:
        """Wait until it is this large body's turn, which it has until ``release``.

        Raises 429 or 503 if too many wait already, 503 behind wait_s, ClientDisconnect.
        """
        scope, client = request.scope, client_of(request.scope)
        self._check_share("large bodies", self.max_waiting, len(self.line), self.waiting[client], 1)
        size = str(scope[CLAIM].bit_length())
        turn = scope[TURN] = Turn(client, size, asyncio.get_running_loop().create_future())
        self.line.append(turn)
        self.waiting[client] += 1
        self._next()
        if turn is self.turn:
            return
        try:
            async with asyncio.timeout(self.wait_s):
                await unless_gone(request.receive, turn.begun)
        except ClientGoneError:
            raise ClientDisconnect from None
        except TimeoutError:
            self.num_late += 1
            raise HttpError(
                f"the body had no turn to be read within {self.wait_s:g} s; {len(self.line)} large ones are in line.",
                code="overloaded", hint="try again later.", Retry_After="1",
            ) from None  # fmt: skip

    def release(self, scope: Scope) -> None:
        """Give back what a request has claimed, and its turn or its place in line. Idempotent."""
        num_bytes: int = scope.pop(CLAIM, 0)
        turn: Turn | None = scope.pop(TURN, None)
        self.num_bytes -= num_bytes
        if num_bytes:
            _take(self.held, client_of(scope), num_bytes)
        if turn is None:
            return
        if self.turn is turn:
            self.turn = None
            self.line.put_last(turn)
            self._next()
        else:
            self.line.remove(turn)
            _take(self.waiting, turn.client, 1)

    def _next(self) -> None:
        if self.turn is None and self.line:
            turn = self.turn = self.line.popleft()
            _take(self.waiting, turn.client, 1)
            if not turn.begun.done():  # else it is about to leave, and gives its turn back
                turn.begun.set_result(None)

    def check(self) -> None:
        self.line.check()
        assert self.num_bytes == self.held.total(), "bodies have lost count of their bytes"
        assert Counter(turn.client for turn in self.line) == self.waiting, "bodies have lost count of who waits"
        assert self.turn is not None or not self.line, "it is nobody's turn, and somebody waits"

    def statistics(self) -> dict[str, Any]:
        return {
            "bytes": self.num_bytes,
            "peak_bytes": self.peak_bytes,
            "waiting": len(self.line),
            "refused": self.num_refused,
            "late": self.num_late,
        }


def _take(counts: Counter[str], name: str, num: int) -> None:
    counts[name] -= num
    if not counts[name]:
        del counts[name]


@dataclass(frozen=True, slots=True)
class Apart:
    """How work on one request's body is done: at once, or on the thread for large ones, whose turn it is.

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
    return Apart(bodies.reader if TURN in request.scope else None)


class BodyClaims:
    """ASGI middleware: a request that is answered, or over, holds no body any more."""

    def __init__(self, app: ASGIApp, bodies: Bodies) -> None:
        self.app, self.bodies = app, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start":  # a client that does not read holds up nobody's turn
                self.bodies.release(scope)
            await send(message)

        try:
            await self.app(scope, receive, answering)
        finally:
            self.bodies.release(scope)


async def read_json(request: Request, kind: type[Body], limit_bytes: int) -> Body:
    """Read and decode a body of at most limit_bytes.

    Raises RequestError: 415, 413, 408 if it takes too long, 503 if the bodies of others take all the room, 429 if the
    client's own take its share, or 400 with the path at fault.
    """
    _check_kind(request)
    bodies: Bodies = request.app.state.service.bodies
    length = request.headers.get("content-length", "")
    if length.isdigit():
        if int(length) > limit_bytes:
            raise RequestError(f"the body has {length} bytes; the limit is {limit_bytes}.", code="request_too_large")
        bodies.check_room(request.scope, int(length))
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
    if not is_quick(raw):
        await bodies.take_turn(request)
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
