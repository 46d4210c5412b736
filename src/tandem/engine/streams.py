"""Readers of one job: an async one and a blocking one. Neither knows the other, nor who feeds it.

What a slow reader has not fetched yet is merged into one update an answer, so its backlog never holds more than the
answers themselves, and nobody waits for it.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from tandem.engine.contract import Update
from tandem.engine.frontend import Job
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


class AsyncStream:
    """contract.Stream. Everything happens on one event loop; one task reads."""

    def __init__(self, job: Job, abort: Callable[[Job], None]) -> None:
        self.id = job.id
        self.prompt = job.prompt
        self.prompt_token_ids: Sequence[int] = job.prompt_token_ids
        self._job, self._abort = job, abort
        self._backlog = Backlog()
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, update: Update) -> None:
        if not self._backlog.ended:
            self._backlog.put(update)
            self._wake()

    def end(self, error: TandemError | None) -> None:
        """Behind the first end nothing comes any more, be it another end."""
        if not self._backlog.ended:
            self._backlog.end(error)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
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

    def abort(self) -> None:
        self._abort(self._job)


class BlockingStream:
    """An iterator of updates for a thread. ``get`` waits at most timeout_s."""

    def __init__(self, job: Job, abort: Callable[[Job], None]) -> None:
        self.id = job.id
        self.prompt = job.prompt
        self.prompt_token_ids: Sequence[int] = job.prompt_token_ids
        self._job, self._abort = job, abort
        self._backlog = Backlog()
        self._changed = threading.Condition()

    def feed(self, update: Update) -> None:
        with self._changed:
            self._backlog.put(update)
            self._changed.notify_all()

    def end(self, error: TandemError | None) -> None:
        with self._changed:
            self._backlog.end(error)
            self._changed.notify_all()

    def get(self, timeout_s: float | None = None) -> Update:
        """The next update. Raises TimeoutError if none came in time, StopIteration behind the last one."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (update := self._backlog.take()) is None:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(f"no update within {timeout_s} s.")
                self._changed.wait(left_s)
        return update

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        return self.get()

    def abort(self) -> None:
        if not self._backlog.ended:
            self._abort(self._job)
