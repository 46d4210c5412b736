"""Figures of requests as their clients see them. It knows arrivals, tokens and ends; it knows no exporter.

Counted per *answer*: a request with n answers, or with several prompts, is as many answers, each accepted, ended and
timed once, so that ``accepted = finished + aborted + failed + live`` holds at any moment. Prompt tokens are counted
once for all answers of a prompt, as usage has them, when its first token comes.

    arrival (the request's head is read) ──── TTFT ────► first token ─ ITL ─► … ─ ITL ─► last token
        └──────────────────────────────────── end to end ─────────────────────────────────┘

A fault in here is logged once and ends the measuring; it never touches a request.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.engine.contract import Update
from tandem.observe.metrics import COUNT_BUCKETS, LATENCY_BUCKETS_S, TOKEN_GAP_BUCKETS_S, Histogram
from tandem.serve.reply import Ask

log = logging.getLogger("tandem.serve")

ARRIVAL_S: ContextVar[float] = ContextVar("tandem_arrival_s")
RECENT = 2048
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")


class Answer:
    """One answer while it lives."""

    __slots__ = ("first_s", "last_s", "num_tokens", "over")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.first_s = self.last_s = 0.0
        self.over = False


class Visit:
    """One request while it is answered. answers are in the order of the reply's indices."""

    __slots__ = ("answers", "arrival_s", "asks", "began", "meter", "number")

    def __init__(self, meter: "Meter", number: int, arrival_s: float, asks: Sequence[Ask]) -> None:
        self.meter, self.number, self.arrival_s, self.asks = meter, number, arrival_s, asks
        self.answers = [Answer() for ask in asks for _ in range(ask.num_choices)]
        self.began = [False] * len(asks)

    def saw(self, ask: Ask, update: Update) -> None:
        """updates.Watcher.saw"""
        meter = self.meter
        if meter.broken:
            return
        try:
            answer = self.answers[ask.first_index + update.index]
            if not answer.over:
                now_s = time.perf_counter()
                if count := len(update.token_ids):
                    meter._tokens(self, ask, answer, update, count, now_s)
                if update.finish is not None:
                    if update.finish in meter.num_finished:
                        meter._count_prompt(self, ask, update)
                    meter._end(self, answer, update.finish, now_s)
        except Exception:
            meter.give_up()

    def close(self, left: str | None) -> None:
        """updates.Watcher.close"""
        self.meter.guarded(self.meter._close, self, left)

    def as_dict(self, now_s: float) -> dict[str, Any]:
        """For people who watch: sizes and times in seconds, never a prompt."""
        firsts = [answer.first_s for answer in self.answers if answer.first_s]
        return {
            "number": self.number,
            "prompt_tokens": sum(len(ask.stream.prompt_token_ids) for ask in self.asks),
            "answers": len(self.answers),
            "tokens": sum(answer.num_tokens for answer in self.answers),
            "age_s": now_s - self.arrival_s,
            "ttft_s": min(firsts) - self.arrival_s if firsts else None,
        }


class Meter:
    """Counts and times what passes. Everything happens on the server's event loop.

    recent_…   pairs (when, value in seconds) of the last ones, for people who watch.
    """

    def __init__(self) -> None:
        self.num_accepted = 0
        self.num_finished = {"stop": 0, "length": 0}
        self.num_aborted = 0
        self.num_failed = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.ttft_s = Histogram(LATENCY_BUCKETS_S)
        self.itl_s = Histogram(TOKEN_GAP_BUCKETS_S)
        self.tpot_s = Histogram(TOKEN_GAP_BUCKETS_S)
        self.e2e_s = Histogram(LATENCY_BUCKETS_S)
        self.prompt_lengths = Histogram(COUNT_BUCKETS)
        self.generated_lengths = Histogram(COUNT_BUCKETS)
        self.most_lengths = Histogram(COUNT_BUCKETS)
        self.responses = dict.fromkeys(STATUS_CLASSES, 0)
        self.recent_ttft_s: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self.recent_itl_s: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self.live: dict[int, Visit] = {}
        self.broken = False
        self._number = 0

    def watch(self, asks: Sequence[Ask]) -> Visit | None:
        """updates.Tap.watch: count and time them."""
        visit: Visit | None = self.guarded(self._open, asks)
        return visit

    def guarded(self, do: Any, *what: Any) -> Any:
        if self.broken:
            return None
        try:
            return do(*what)
        except Exception:
            self.give_up()
            return None

    def give_up(self) -> None:
        """Called while an exception is handled."""
        self.broken = True
        log.exception("measuring requests failed and ends; requests go on")

    def _open(self, asks: Sequence[Ask]) -> Visit:
        self._number += 1
        visit = Visit(self, self._number, ARRIVAL_S.get(0.0) or time.perf_counter(), asks)
        self.num_accepted += len(visit.answers)
        self.live[visit.number] = visit
        return visit

    def _tokens(self, visit: Visit, ask: Ask, answer: Answer, update: Update, count: int, now_s: float) -> None:
        answer.num_tokens += count
        self.num_generated_tokens += count
        if answer.first_s:
            gap_s = (now_s - answer.last_s) / count
            self.itl_s.observe(gap_s, count)
            self.recent_itl_s.append((now_s, gap_s))
        else:
            answer.first_s = now_s
            self.ttft_s.observe(now_s - visit.arrival_s)
            self.recent_ttft_s.append((now_s, now_s - visit.arrival_s))
            if count > 1:
                self.itl_s.observe(0.0, count - 1)
            self._count_prompt(visit, ask, update)
        answer.last_s = now_s

    def _count_prompt(self, visit: Visit, ask: Ask, update: Update) -> None:
        place = next(i for i, other in enumerate(visit.asks) if other is ask)
        if not visit.began[place]:
            visit.began[place] = True
            length = len(ask.stream.prompt_token_ids)
            self.num_prompt_tokens += length
            self.num_cached_tokens += update.cached
            self.prompt_lengths.observe(length)

    def _end(self, visit: Visit, answer: Answer, reason: str, now_s: float) -> None:
        answer.over = True
        if reason == "abort":
            self.num_aborted += 1
        elif reason not in self.num_finished:
            self.num_failed += 1
        else:
            self.num_finished[reason] += 1
            self.e2e_s.observe(now_s - visit.arrival_s)
            self.generated_lengths.observe(answer.num_tokens)
            if answer.num_tokens > 1:
                self.tpot_s.observe((answer.last_s - answer.first_s) / (answer.num_tokens - 1))

    def _close(self, visit: Visit, left: str | None) -> None:
        """However a request ended, its answers that had no end of their own end now."""
        del self.live[visit.number]
        if most := max(answer.num_tokens for answer in visit.answers):
            self.most_lengths.observe(most)
        for answer in visit.answers:
            if not answer.over:
                answer.over = True
                if left == "aborted":
                    self.num_aborted += 1
                else:
                    self.num_failed += 1

    def check(self) -> None:
        """Assert that the figures add up."""
        ended = sum(self.num_finished.values()) + self.num_aborted + self.num_failed
        live = sum(not answer.over for visit in self.live.values() for answer in visit.answers)
        assert self.num_accepted == ended + live, (self.num_accepted, ended, live)


class Doorkeeper:
    """ASGI middleware: notes when a request came, and counts answers by class of status.

    scope["tandem.send"]   the way out that skips those who look at an answer's head alone, for the parts of a stream.
    """

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self.app, self.meter = app, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        ARRIVAL_S.set(time.perf_counter())
        scope["tandem.send"] = send

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.meter.responses[f"{message['status'] // 100}xx"] += 1
            await send(message)

        try:
            await self.app(scope, receive, counting)
        finally:
            del scope[
                "tandem.send"
            ]  # a server's way out may hold its scope, and what is in a ring waits for a collection
