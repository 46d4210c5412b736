"""Readers of one job: an async one and a blocking one. Neither knows the other, nor how its news is made.

    front end ──feed──► inbox ◄──get── stream ◄── the user     the front end holds the inbox alone, so that a stream
                                          └─dropped─► abandon  which nobody holds any more ends, and its request too

What a slow reader has not fetched yet is merged into one update an answer, so its backlog never holds more than the
answers themselves, and nobody waits for it.
"""

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from tandem.engine.contract import Update
from tandem.engine.frontend import FrontEnd, Job
from tandem.errors import TandemError


class Backlog:
    """Updates that wait for their reader, one an answer, and how the stream ended."""

    def __init__(self) -> None:
        self._updates: dict[int, Update] = {}
        self._error: TandemError | None = None
        self.ended = False

    def put(self, update: Update) -> None:
        waiting = self._updates.get(update.index)
        if waiting is None:
            self._updates[update.index] = update
        else:
            merge(waiting, update)

    def end(self, error: TandemError | None) -> None:
        self.ended, self._error = True, error

    def clear(self) -> None:
        """Drop what waits, and end."""
        self._updates.clear()
        self.ended, self._error = True, None

    @property
    def has_news(self) -> bool:
        return self.ended or bool(self._updates)

    @property
    def num_logprobs(self) -> int:
        """Tokens with log-probabilities that wait."""
        return sum(len(update.logprobs or ()) for update in self._updates.values())

    def take(self) -> Update | None:
        """The next update; None: there is none yet. Raises the error behind the last update, or StopIteration."""
        if self._updates:
            return self._updates.pop(next(iter(self._updates)))
        if not self.ended:
            return None
        if self._error is not None:
            raise self._error
        raise StopIteration


def merge(into: Update, later: Update) -> None:
    """Append a later update of the same answer."""
    into.text += later.text
    into.token_ids += later.token_ids
    if later.logprobs is not None:
        into.logprobs = (into.logprobs or []) + later.logprobs
    if later.prompt_logprobs is not None:
        into.prompt_logprobs = (into.prompt_logprobs or []) + later.prompt_logprobs
    into.finish, into.stop = later.finish, later.stop
    into.cached = later.cached or into.cached


class AsyncInbox:
    """What the front end feeds: it outlives its reader, and does not keep him alive. One event loop.

    on_news   called when there is something to take, for a reader who does not wait in ``get``. It keeps him alive.
    """

    def __init__(self) -> None:
        self._backlog = Backlog()
        self._waiter: asyncio.Future[None] | None = None
        self.on_news: Callable[[], None] | None = None
        self.take = self._backlog.take

    @property
    def has_news(self) -> bool:
        """Whether ``take`` gives an update, or the end."""
        return self._backlog.has_news

    @property
    def num_logprobs(self) -> int:
        """Tokens with log-probabilities that wait to be taken."""
        return self._backlog.num_logprobs

    def drop(self, error: TandemError) -> None:
        """What has come and was not taken is dropped; the reader gets the error."""
        self._backlog.clear()
        self._backlog.end(error)
        self._wake()

    def feed(self, update: Update) -> None:
        if not self._backlog.ended:
            self._backlog.put(update)
            self._wake()

    def end(self, error: TandemError | None) -> None:
        """Behind the first end nothing comes any more, be it another end."""
        if not self._backlog.ended:
            self._backlog.end(error)
            self._wake()

    def close(self) -> None:
        """The reader wants nothing more, not even what has come."""
        self._backlog.clear()
        self._wake()

    def _wake(self) -> None:
        if self.on_news is not None:
            self.on_news()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Update:
        """The next update. Raises the error behind the last one, or StopAsyncIteration."""
        while True:
            try:
                update = self._backlog.take()
            except StopIteration:
                raise StopAsyncIteration from None
            if update is not None:
                return update
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class AsyncStream:
    """contract.Stream. Everything happens on one event loop; one task reads.

        async with await engine.submit("Hello") as stream:
            async for update in stream: ...

    Whoever stops reading ends the request: leaving the ``async with``, ``aclose``, cancelling the task that waits for
    an update (a timeout does that, too), or dropping the stream, as a ``break`` out of
    ``async for update in await engine.submit(...)`` does. To wait with a limit and go on reading, shield the wait.
    """

    def __init__(self, job: Job, front: FrontEnd) -> None:
        self.id = job.id
        self.prompt = job.prompt
        self.prompt_token_ids: Sequence[int] = job.prompt_token_ids
        self.inbox = AsyncInbox()
        self._job, self._front = job, front
        _abandon_when_dropped(self, job, front)

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        try:
            return await self.inbox.get()
        except asyncio.CancelledError:
            self.abort()
            raise

    def end(self, error: TandemError | None) -> None:
        """End the reader, whatever the engine says later. The request is not ended by this."""
        self.inbox.end(error)

    def abort(self) -> None:
        self._front.abort(self._job)

    async def aclose(self) -> None:
        """End the request and the iterator; what has come and was not read is dropped. Idempotent."""
        self.abort()
        self.inbox.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class BlockingInbox:
    """As AsyncInbox, for threads: one feeds, another reads."""

    def __init__(self) -> None:
        self._backlog = Backlog()
        self._changed = threading.Condition()

    def feed(self, update: Update) -> None:
        with self._changed:
            if not self._backlog.ended:
                self._backlog.put(update)
                self._changed.notify_all()

    def end(self, error: TandemError | None) -> None:
        with self._changed:
            if not self._backlog.ended:
                self._backlog.end(error)
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._backlog.clear()
            self._changed.notify_all()

    def get(self, timeout_s: float | None) -> Update:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (update := self._backlog.take()) is None:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(f"no update within {timeout_s} s.")
                self._changed.wait(left_s)
        return update


class BlockingStream:
    """An iterator of updates for a thread. ``get`` waits at most timeout_s.

    Whoever stops reading ends the request: with ``close``, by leaving a ``with``, or by dropping the stream. A
    ``get`` that was in vain does not: it may be called again.
    """

    def __init__(self, job: Job, front: FrontEnd) -> None:
        self.id = job.id
        self.prompt = job.prompt
        self.prompt_token_ids: Sequence[int] = job.prompt_token_ids
        self.inbox = BlockingInbox()
        self._job, self._front = job, front
        _abandon_when_dropped(self, job, front)

    def get(self, timeout_s: float | None = None) -> Update:
        """The next update. Raises TimeoutError if none came in time, StopIteration behind the last one."""
        return self.inbox.get(timeout_s)

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        return self.get()

    def abort(self) -> None:
        self._front.abort(self._job)

    def close(self) -> None:
        """End the request and the iterator; what has come and was not read is dropped. Idempotent; any thread."""
        self.abort()
        self.inbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _abandon_when_dropped(stream: object, job: Job, front: FrontEnd) -> None:
    """End the job when nobody holds the stream any more. Neither the job nor its inbox may know the stream."""
    weakref.finalize(stream, front.abandon, job).atexit = False
