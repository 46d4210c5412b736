"""All updates of one request, from every stream it has, past those who watch. It knows times, not what updates hold.

inbox ─on_news─► ready ─take─► watchers ─► the reply      one waiting future a request, no task and no generator
                                                          a stream: this is walked once a token and connection
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, Self

from tandem.engine.contract import Update
from tandem.engine.streams import AsyncStream
from tandem.errors import GrammarError, RequestError, TandemError
from tandem.serve.reply import Ask

OF_A_FIELD = ("invalid_value", GrammarError.code)
MAX_AT_ONCE = 64


class Watcher(Protocol):
    """Sees the updates of one request go by. Must not raise."""

    def saw(self, ask: Ask, update: Update) -> None: ...

    def close(self, left: str | None) -> None:
        """Called once. left: "failed", "aborted", or None if all answers came to their end."""


class Tap(Protocol):
    """Watches requests. None: not this one."""

    def watch(self, asks: Sequence[Ask]) -> Watcher | None: ...


class Updates:
    """An async iterator of (ask, update), as they come; one task reads. However it ends, every stream is at its end
    or aborted then.

    taps      are asked for a watcher each when reading begins.
    limit     (seconds, error) from now on until all ends.       wait   the same until the first update.
    open      holds the streams while they are read.
    ended_by  why the server has ended its answers, if it has: raised in place of their "abort".
    naming    the field to which an error of a grammar belongs.
    behind    (tokens, error) with log-probabilities that may wait to be read, of each answer. They take much memory.

    Raises what a stream raises, and the errors of limit, wait and behind.
    """

    def __init__(
        self, asks: Sequence[Ask], taps: Sequence[Tap], limit: tuple[float, TandemError],
        wait: tuple[float, TandemError] | None, open_streams: set[AsyncStream],
        ended_by: Callable[[], TandemError | None], naming: str | None = None,
        behind: tuple[int, TandemError] | None = None,
    ) -> None:  # fmt: skip
        self._asks, self._taps, self._limit, self._wait = asks, taps, limit, wait
        self._open, self._ended_by, self._naming, self._behind = open_streams, ended_by, naming, behind
        self._watchers: list[Watcher] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._ready: dict[int, Ask] = {}
        self._left = len(asks)
        self._waiter: asyncio.Future[None] | None = None
        self._begun = self._closed = False
        self._num_at_once = 0
        self._made_s = asyncio.get_running_loop().time()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[Ask, Update]:
        try:
            if not self._begun:
                self._begin()
            if self._num_at_once == MAX_AT_ONCE:
                self._num_at_once = 0
                await asyncio.sleep(0)  # one request with thousands of answers is not alone
            self._num_at_once += 1
            while True:
                if self._ready and (item := self._take()) is not None:
                    return item
                if not self._left or self._closed:
                    raise StopAsyncIteration
                self._num_at_once = 1
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        except StopAsyncIteration:
            self._close(None)
            raise
        except Exception as error:
            self._close("failed")
            if isinstance(error, RequestError) and error.code in OF_A_FIELD and error.param is None:
                error.param = self._naming
            raise
        except BaseException:
            self._close("aborted")
            raise

    def _take(self) -> tuple[Ask, Update] | None:
        """The next update that has come; None: none has."""
        while self._ready:
            place = next(iter(self._ready))
            ask = self._ready.pop(place)
            inbox = ask.stream.inbox
            try:
                update = inbox.take()
            except StopIteration:
                inbox.on_news = None
                self._left -= 1
                continue
            if update is None:
                continue
            if inbox.has_news:
                self._ready[place] = ask
            if len(self._timers) > 1:
                self._timers.pop().cancel()
            if update.finish == "abort" and (reason := self._ended_by()) is not None:
                raise reason
            if ask.silent:
                update.text, update.token_ids, update.logprobs = "", [], None
                update.finish = "length" if update.finish in ("stop", "length") else update.finish
            for watcher in self._watchers:
                watcher.saw(ask, update)
            return ask, update
        return None

    def _begin(self) -> None:
        self._begun = True
        limit_s, too_late = self._limit
        if asyncio.get_running_loop().time() >= self._made_s + limit_s:
            raise too_late  # a timer could still lose against a quick engine
        # the first of these sees an update last
        self._watchers = [watcher for tap in self._taps if (watcher := tap.watch(self._asks)) is not None]
        # one timer a request, not one a token: at thousands of tokens a second the difference is a sixth of a core
        self._timers = [self._later(*self._limit)]
        if self._wait is not None and self._wait[0] < self._limit[0]:
            self._timers.append(self._later(*self._wait))
        self._open.update(ask.stream for ask in self._asks)
        for ask in self._asks:
            self._ready[ask.first_index] = ask
            ask.stream.inbox.on_news = partial(self._news, ask)

    def _news(self, ask: Ask) -> None:
        self._ready[ask.first_index] = ask
        if self._behind is not None and ask.stream.inbox.num_logprobs > self._behind[0] * ask.num_choices:
            error, self._behind = self._behind[1], None
            for other in self._asks:
                other.stream.abort()
                other.stream.inbox.drop(error)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _later(self, delay_s: float, error: TandemError) -> asyncio.TimerHandle:
        """End the readers of all asks with an error by then."""

        def end() -> None:
            for ask in self._asks:
                ask.stream.end(error)

        return asyncio.get_running_loop().call_at(self._made_s + delay_s, end)

    def _close(self, left: str | None) -> None:
        if self._closed:
            return
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        for ask in self._asks:
            ask.stream.inbox.on_news = None
            ask.stream.abort()
            self._open.discard(ask.stream)
        self._ready.clear()
        for watcher in self._watchers:
            watcher.close(left)

    async def aclose(self) -> None:
        """Read no more. Idempotent."""
        self._close("aborted")
