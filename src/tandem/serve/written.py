"""Large JSON answers in parts: written in slices and sent in pieces, so that the event loop keeps its turn.

It knows JSON and the loop; it does not know what an answer says. A part may stand in several places: it is kept once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Item = TypeVar("Item")
Parts = list[bytes]
# Numbers and strings written between two turns of the loop: some 10 ms of work.
SLICE = 8192
# The same in a stream, whose events are small: some 3 ms.
STREAM_SLICE = 1024
# Behind so many values nobody begins another slice in this turn of the loop.
MAX_IN_TURN = 2048
PIECE_BYTES = 1 << 18


class Turns:
    """Gives the loop its turn whenever a slice of work has been done. size: values in a slice; None: SLICE.

    Slices of all answers together are few enough in a turn of the loop; who has to wait is next in the order of coming.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size or SLICE
        self._num_values = 0
        self._shared: _Shared | None = None

    async def ready(self) -> None:
        """Before something is written: wait until the loop's turn has room for it."""
        if self._shared is None:
            self._shared = _shared.setdefault(asyncio.get_running_loop(), _Shared())
        if self._shared.is_full:
            await self._shared.wait(self.size)

    async def done(self, num_values: int) -> None:
        """So many values have been written."""
        if self._shared is None:
            await self.ready()
        assert self._shared is not None
        self._shared.spend(num_values)
        self._num_values += num_values
        if self._num_values > self.size - num_values:  # as many once more would be too many
            self._num_values = 0
            await self._shared.wait(self.size)


class _Shared:
    """What all answers write in one turn of an event loop. size: values that a slice may have."""

    def __init__(self) -> None:
        self._num_values = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._is_due = False

    @property
    def is_full(self) -> bool:
        return bool(self._waiting) or self._num_values >= MAX_IN_TURN

    def spend(self, num_values: int) -> None:
        self._num_values += num_values
        self._see_to_it()

    async def wait(self, size: int) -> None:
        """Until a later turn, behind those who wait already."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((future, size))
        self._see_to_it()
        await future

    def _see_to_it(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_due, self._num_values = False, 0
        num_expected = 0
        while self._waiting and num_expected < MAX_IN_TURN:
            future, size = self._waiting.popleft()
            if not future.done():  # cancelled
                future.set_result(None)
                num_expected += size
        if num_expected:
            self._see_to_it()


_shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared]" = WeakKeyDictionary()


async def written_lists(
    write: Callable[[Sequence[Item]], Sequence[list[Any]]], items: Sequence[Item], width: int, turns: Turns
) -> list[Parts]:
    """The inside of several JSON arrays that grow together, without their brackets.

    write   makes the next values of each array from the next items; it is called in order, at least once.
    width   values that one item makes.
    """
    step = max(1, turns.size // width)
    arrays: list[Parts] = []
    for start in range(0, max(1, len(items)), step):
        some = items[start : start + step]
        for place, values in enumerate(write(some)):
            if start == 0:
                arrays.append([])
            arrays[place] = joined_lists(arrays[place], [orjson.dumps(values)[1:-1]])
        await turns.done(len(some) * width)
    return arrays


def joined_lists(first: Parts, second: Parts) -> Parts:
    """The inside of an array that holds one's values, then the other's."""
    first, second = ([part for part in parts if part] for parts in (first, second))
    return [*first, b",", *second] if first and second else first + second


def with_more(value: dict[str, Any], more: dict[str, Parts]) -> Parts:
    """An object with further fields, which are written already."""
    parts = [orjson.dumps(value)[:-1]]
    for place, (name, written) in enumerate(more.items()):
        parts += [b"," if value or place else b"", b'"%b":' % name.encode(), *written]
    return [*parts, b"}"]


def response_of_parts(parts: Parts, headers: dict[str, str]) -> ASGIApp:
    """The answer: in one piece if it is small."""
    num_bytes = sum(map(len, parts))
    if num_bytes <= PIECE_BYTES:
        return Response(b"".join(parts), media_type="application/json", headers=headers)
    return LargeResponse(parts, num_bytes, headers)


class Closing:
    """An ASGI application behind which, sent or not, something is given back."""

    def __init__(self, app: ASGIApp, close: Callable[[], None]) -> None:
        self._app, self._close = app, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._close()


class LargeResponse:
    """An ASGI application that sends parts in pieces. A client that reads slowly is waited for between two."""

    def __init__(self, parts: Parts, num_bytes: int, headers: dict[str, str]) -> None:
        self._parts = parts
        self._head = Response(media_type="application/json", headers={**headers, "content-length": str(num_bytes)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._head.raw_headers})
        held: Parts = []
        num_bytes = 0
        for part in self._parts:
            for start in range(0, len(part), PIECE_BYTES):
                piece = part[start : start + PIECE_BYTES]
                held.append(piece)
                num_bytes += len(piece)
                if num_bytes >= PIECE_BYTES:
                    await send({"type": "http.response.body", "body": b"".join(held), "more_body": True})
                    held, num_bytes = [], 0
                    await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"".join(held), "more_body": False})
