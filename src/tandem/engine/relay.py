"""News from a host's thread to an event loop, in slices. It knows event loops; it does not know what the news means.

    host's thread ──news──► waiting, at most so many changes ──a slice──► front end     event loop: the slice, then
                   ◄─waits─ when there are more                                         sockets, signals, readers; again

An engine that makes tokens faster than they can be handed on is slowed down by this, so what waits stays short: the
event loop gets to everything else between two slices, and its readers find their updates merged.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tandem.engine.frontend import FrontEnd
from tandem.errors import TandemError
from tandem.request import Change

SLICE_S = 0.005
MAX_WAITING = 4096
PATIENCE_S = 1.0


class Relay:
    """contract.Listener. front: set before the first news comes.

    An event loop that takes nothing for PATIENCE_S is not waited for any more until it does: it stands still, and the
    engine must be able to end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.front: FrontEnd | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[FrontEnd], None], int]] = deque()
        self._num_waiting = 0
        self._is_called = False
        self._stands_still = False

    def news(self, changes: Sequence[Change]) -> None:
        with self._changed:
            while self._num_waiting >= MAX_WAITING and not self._stands_still:
                self._stands_still = not self._changed.wait(PATIENCE_S)
        self._post(lambda front: front.news(changes), len(changes))

    def stopped(self, error: TandemError | None) -> None:
        self._post(lambda front: front.stopped(error), 0)

    def _post(self, tell: Callable[[FrontEnd], None], num_changes: int) -> None:
        with self._changed:
            self._waiting.append((tell, num_changes))
            self._num_waiting += num_changes
            is_called, self._is_called = self._is_called, True
        if not is_called:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        """Hand on what waits until the slice is over; the rest comes behind everybody else's turn."""
        end_s = time.perf_counter() + SLICE_S
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_called = False
                    return
                tell, num_changes = self._waiting.popleft()
                self._num_waiting -= num_changes
                self._stands_still = False
                if self._num_waiting < MAX_WAITING:
                    self._changed.notify()
            try:
                if self.front is not None:
                    tell(self.front)
            except Exception as error:
                self._loop.call_exception_handler({"message": "news could not be handed on", "exception": error})
            if time.perf_counter() >= end_s:
                self._loop.call_soon(self._take)
                return
