"""What all endpoints share: the engine, the served names, the limits, and the requests that are being answered.

It knows requests' lives (admitted, answered, ended); it does not know routes or bodies.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.contract import Stream, Update
from tandem.engine.engine import AsyncEngine
from tandem.errors import RequestError, TandemError
from tandem.serve.accept import Limits
from tandem.serve.failure import HttpError
from tandem.serve.reply import Ask


@dataclass(slots=True)
class QueueLimits:
    """When to refuse rather than to queue. requests and tokens: in the server at once; None: no limit."""

    requests: int | None = 1024
    tokens: int | None = None
    wait_s: float | None = None


@dataclass(slots=True)
class Service:
    """One engine under one or more served names."""

    engine: AsyncEngine
    names: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    queue: QueueLimits = field(default_factory=QueueLimits)
    keep_alive_s: float = 10.0
    stall_s: float = 60.0
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    num_requests: int = 0
    num_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    streams: set[Stream] = field(default_factory=set)
    ended_by: TandemError | None = None

    def check_model(self, name: object) -> str:
        """The served name asked for. None means the only model. Raises 404 for any other name, 400 for other types."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise RequestError(
                f"there is no model {name!r} here.",
                param="model",
                code="model_not_found",
                hint=f"the models are: {', '.join(self.names)}.",
            )
        return str(name)

    def check_open(self) -> None:
        """Raise 503 while draining, EngineDeadError if the engine has stopped."""
        if self.engine.error is not None:
            raise self.engine.error
        if self.draining:
            raise HttpError(
                "the server is shutting down and takes no new requests.", code="draining", Connection="close"
            )

    @contextlib.contextmanager
    def admitted(self, num_tokens: int) -> Iterator[None]:
        """Count one request of so many prompt tokens in for as long as it is answered. Raises 429 over a limit."""
        if self.queue.requests is not None and self.num_requests >= self.queue.requests:
            raise HttpError(
                f"{self.num_requests} requests are in the server; the limit is {self.queue.requests}.",
                code="queue_full", hint="try again later.", Retry_After="1",
            )  # fmt: skip
        if self.queue.tokens is not None and self.num_requests and self.num_tokens + num_tokens > self.queue.tokens:
            raise HttpError(
                f"{self.num_tokens} prompt tokens are in the server, and with these {num_tokens} more the limit of "
                f"{self.queue.tokens} would be passed.",
                code="queue_full", hint="try again later.", Retry_After="1",
            )  # fmt: skip
        self.num_requests += 1
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_tokens -= num_tokens

    async def updates(
        self, asks: Sequence[Ask], deadline_s: float | None = None
    ) -> AsyncGenerator[tuple[Ask, Update], None]:
        """All updates of all asks as they come. However it ends, every stream is at its end or aborted then.

        Raises what a stream raises; 504 behind the deadline; 503 if the queue wait is over before a first token.
        """
        merged = self._alone(asks[0]) if len(asks) == 1 else self._merged(asks)
        limit_s = self.limits.deadline_s if deadline_s is None else deadline_s
        end_s = time.monotonic() + limit_s
        first_s = time.monotonic() + self.queue.wait_s if self.queue.wait_s is not None else end_s
        self.streams.update(ask.stream for ask in asks)
        waiting = True
        try:
            while True:
                until = min(end_s, first_s) if waiting else end_s
                try:
                    async with asyncio.timeout(until - time.monotonic()):
                        item = await anext(merged)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise self._too_late(waiting and until < end_s, limit_s) from None
                waiting = False
                if item[1].finish == "abort" and self.ended_by is not None:
                    raise self.ended_by
                yield item
        finally:
            for ask in asks:
                ask.stream.abort()
                self.streams.discard(ask.stream)
            await merged.aclose()

    def _too_late(self, in_queue: bool, limit_s: float) -> HttpError:
        if in_queue:
            return HttpError(f"no token came within {self.queue.wait_s:g} s of waiting.", code="queue_timeout")
        return HttpError(f"the request's time of {limit_s:g} s is over.", code="deadline_exceeded")

    async def _alone(self, ask: Ask) -> AsyncGenerator[tuple[Ask, Update], None]:
        async for update in ask.stream:
            yield ask, update

    async def _merged(self, asks: Sequence[Ask]) -> AsyncGenerator[tuple[Ask, Update], None]:
        queue: asyncio.Queue[tuple[Ask, Update] | BaseException | None] = asyncio.Queue()

        async def drain(ask: Ask) -> None:
            try:
                async for update in ask.stream:
                    queue.put_nowait((ask, update))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(drain(ask)) for ask in asks]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end_all(self, reason: TandemError) -> None:
        """End every answer with an error: streams get an error event, the others an error body."""
        self.ended_by = reason
        for stream in tuple(self.streams):
            stream.abort()

    def statistics(self) -> dict[str, Any]:
        return {"requests": self.num_requests, "prompt_tokens": self.num_tokens, "draining": self.draining}
