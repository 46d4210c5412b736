"""What all endpoints share: the engine, the served names, the limits, and the requests that are being answered.

It knows requests' lives (admitted, answered, ended); it does not know routes or bodies.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.engine import AsyncEngine
from tandem.engine.streams import AsyncStream
from tandem.errors import EngineDeadError, RequestError, TandemError
from tandem.serve.accept import Limits
from tandem.serve.bodies import Bodies
from tandem.serve.border import Border
from tandem.serve.events import ClientGoneError
from tandem.serve.explain import Journeys
from tandem.serve.failure import HttpError, status_of
from tandem.serve.measure import Meter
from tandem.serve.reply import Ask
from tandem.serve.share import over_share
from tandem.serve.updates import Tap, Updates

_OVER = "the request's time of {:g} s is over."
_BEHIND = "the client reads too slowly: more than {} tokens with log-probabilities wait for it."
_WAITED = "no token came within {:g} s of waiting."
END_KINDS = ("done", "gone", "refused", "failed")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """When to refuse rather than to queue. None: no limit.

    requests   in the server at once; one with several answers counts as so many.
    tokens     of their prompts, counted for each answer.
    logprobs   log-probabilities that may be held at once until they are sent.
    reserve    the share of these that is kept for clients which hold no more than that share.
    """

    requests: int | None = 1024
    tokens: int | None = None
    wait_s: float | None = None
    reserve: float = 0.125
    logprobs: int | None = None


@dataclass(slots=True)
class Holding:
    """What one client has in the server: answers that are being made, and tokens of their prompts."""

    answers: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Service:
    """One engine under one or more served names.

    ended   how many answers ended how: done, gone (the client left), refused (4xx), failed (5xx or an error event).
    """

    engine: AsyncEngine
    names: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    queue: QueueLimits = field(default_factory=QueueLimits)
    keep_alive_s: float = 10.0
    stall_s: float = 60.0
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    num_requests: int = 0
    num_answers: int = 0
    num_tokens: int = 0
    num_bundles: int = 0
    logprobs: Counter[str] = field(default_factory=Counter)
    clients: dict[str, Holding] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(END_KINDS, 0)))
    streams: set[AsyncStream] = field(default_factory=set)
    journeys: Journeys = field(default_factory=Journeys)
    ended_by: TandemError | None = None
    meter: Meter = field(default_factory=Meter)
    bodies: Bodies = field(default_factory=Bodies)
    taps: list[Tap] = field(default_factory=list)
    readings: Any = None
    border: Border | None = None
    vllm_metric_names: bool = False

    def check_model(self, name: object) -> str:
        """The served name asked for. None means the only model. Raises 404 for any other name."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise RequestError(
                f"there is no model {name!r:.200} here.",
                param="model",
                code="model_not_found",
                hint=f"the models are: {', '.join(self.names)}.",
            )
        return str(name)

    @property
    def dead(self) -> TandemError | None:
        """Why no more answers will come, or None: the engine has stopped, or its step is overdue."""
        if self.engine.error is not None:
            return self.engine.error
        if isinstance(self.ended_by, EngineDeadError):
            return self.ended_by
        stalled_s = self.engine.stalled_s
        if stalled_s > self.stall_s:
            return EngineDeadError(
                f"the engine's step has not come back for {stalled_s:.1f} s; the limit is {self.stall_s:g} s."
            )
        return None

    def check_open(self) -> None:
        """Raise 503 while draining, EngineDeadError if the engine has stopped."""
        if (error := self.dead) is not None:
            raise error if isinstance(error, EngineDeadError) else EngineDeadError(error.what, hint=error.hint)
        if self.draining:
            raise HttpError(
                "the server is shutting down and takes no new requests.", code="draining", Connection="close"
            )

    @contextlib.contextmanager
    def admitted(self, client: str, num_answers: int, num_tokens: int) -> Iterator[str]:
        """Count one request in for as long as it is answered. Raises 429 over a limit; one that is alone has room.

        client       who asks; see guard.client_of.      num_tokens   prompt tokens, of each answer.
        Gives the name of its bundle; see request.Request.
        """
        held = self.clients.get(client) or Holding()
        if self.num_requests:
            self._check_room("answers", self.queue.requests, self.num_answers, held.answers, num_answers)
            self._check_room("prompt tokens", self.queue.tokens, self.num_tokens, held.tokens, num_tokens)
        self.clients[client] = held
        self._hold(held, 1, num_answers, num_tokens)
        self.num_bundles += 1
        try:
            yield f"{self.num_bundles:x}"
        finally:
            self._hold(held, -1, -num_answers, -num_tokens)
            if not held.answers:
                del self.clients[client]

    @contextlib.contextmanager
    def logprobs_held(self, client: str, num: int) -> Iterator[None]:
        """Count so many log-probabilities for as long as they may be held. Raises 429; what is alone has room."""
        if num and (in_all := self.logprobs.total()):
            self._check_room("log-probabilities", self.queue.logprobs, in_all, self.logprobs[client], num)
        self.logprobs[client] += num
        try:
            yield
        finally:
            self.logprobs[client] -= num
            if not self.logprobs[client]:
                del self.logprobs[client]

    def _hold(self, held: Holding, num_requests: int, num_answers: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_answers += num_answers
        self.num_tokens += num_tokens
        held.answers += num_answers
        held.tokens += num_tokens

    def _check_room(self, what: str, limit: int | None, in_all: int, held: int, more: int) -> None:
        """Raises 429."""
        if limit is not None and (told := over_share(what, limit, self.queue.reserve, in_all, held, more)):
            raise HttpError(told, code="queue_full", hint="try again later.", Retry_After="1")

    def updates(
        self, asks: Sequence[Ask], deadline_s: float | None = None, naming: str | None = None,
        behind: int | None = None,
    ) -> Updates:  # fmt: skip
        """All updates of all asks as they come, past the meter and the taps; see Updates.

        Raises what a stream raises; 504 behind the deadline; 503 if the queue wait is over before a first token.
        """
        limit_s = self.limits.deadline_s if deadline_s is None else deadline_s
        limit = limit_s, HttpError(_OVER.format(limit_s), code="deadline_exceeded")
        wait = None
        if (wait_s := self.queue.wait_s) is not None:
            wait = wait_s, HttpError(_WAITED.format(wait_s), code="queue_timeout")
        slow = None if behind is None else (behind, HttpError(_BEHIND.format(behind), code="reader_too_slow"))
        watchers = self.meter, *self.taps
        return Updates(asks, watchers, limit, wait, self.streams, lambda: self.ended_by, naming, slow)

    def end_all(self, reason: TandemError) -> None:
        """End every answer with an error: streams get an error event, the others an error body.

        The readers are ended here, not by the engine, which may never answer again.
        """
        self.ended_by = reason
        for stream in tuple(self.streams):
            stream.abort()
            stream.end(reason)

    def count(self, error: Exception | None) -> None:
        """Count one answer's end."""
        if error is None:
            self.ended["done"] += 1
        elif isinstance(error, ClientGoneError):
            self.ended["gone"] += 1
        else:
            self.ended["refused" if status_of(error) < 500 else "failed"] += 1

    def statistics(self) -> dict[str, Any]:
        return {
            "requests": self.num_requests,
            "answers": self.num_answers,
            "prompt_tokens": self.num_tokens,
            "logprobs": self.logprobs.total(),
            "clients": len(self.clients),
            "draining": self.draining,
            "ended": dict(self.ended),
            "bodies": self.bodies.statistics(),
            "connections": self.border.statistics() if self.border else {},
        }
