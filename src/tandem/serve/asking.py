"""GET routes take turns: a few in each turn of the event loop, so that however many ask, streams and others go on.

It knows methods; it does not know routes. What a route then waits for is its own affair.
"""

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

# Some 2 ms of work.
MAX_IN_TURN = 4
METHODS = ("GET", "HEAD", "OPTIONS")


class LoopTurns:
    """Lets so many pass in a turn of the event loop; the others wait for a later one, in the order of coming."""

    def __init__(self, max_in_turn: int = MAX_IN_TURN) -> None:
        self._max_in_turn = max_in_turn
        self._num_passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def wait(self) -> None:
        """Returns at once while there is room in this turn."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._num_passed < self._max_in_turn and not self._waiting:
            self._num_passed += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._num_passed = 0
        while self._waiting and self._num_passed < self._max_in_turn:
            turn = self._waiting.popleft()
            if not turn.done():  # else it is cancelled
                turn.set_result(None)
                self._num_passed += 1
        self._is_due = self._num_passed > 0
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._next_turn)


class AskingTurns:
    """ASGI middleware: requests that only ask wait for their turn."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self._turns = app, LoopTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in METHODS:
            await self._turns.wait()
        await self.app(scope, receive, send)
