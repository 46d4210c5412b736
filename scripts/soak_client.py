"""The client of soak.py: connections that ask again and again and compare every byte. It knows no server's insides."""

import asyncio
import json
import time
from typing import Any

GAP_S = 1e-4
TEXT_MARK = b'"text":"'
SCRIPT = " ".join(f"{number:05d}" for number in range(20_000))
"""What the device of made-up tokens says, a letter a token."""


class Tally:
    """What all listeners have heard. gaps: how many of each length, in steps of GAP_S; the last: longer ones."""

    def __init__(self) -> None:
        self.gaps = [0] * 20_001
        self.num_chunks = self.num_tokens = self.num_requests = 0
        self.errors: set[str] = set()


def gap_s(gaps: list[int], share: float) -> float:
    """The gap that so many are within, rounded up to GAP_S."""
    place, wanted = -1, share * sum(gaps)
    while wanted > 0:
        place += 1
        wanted -= gaps[place]
    return (place + 1) * GAP_S


class Listener(asyncio.Protocol):
    """One connection that asks again and again, and compares each byte of text with what the device says.

    It shares its cores with the server, so it parses as little as will do: an event is found by its end, its text by
    the marks around it. Anything that does not look as expected is an error.
    """

    def __init__(self, tally: Tally, tokens: int, end_s: float) -> None:
        body = {"prompt": "count", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        self.question = f"{head}{len(data)}\r\n\r\n".encode() + data
        self.tally, self.end_s, self.expected = tally, end_s, SCRIPT[:tokens].encode()
        self.last_words = (b'"completion_tokens":%d,' % tokens, b"data: [DONE]")
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._question()

    def _question(self) -> None:
        self.rest, self.words, self.place, self.heard_s = b"", b"", 0, 0.0
        self.transport.write(self.question)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._end("the connection was lost")

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        *events, self.rest = (self.rest + data).split(b"\n\n")
        said = b""
        for event in events:
            if text := event.partition(TEXT_MARK)[2].partition(b'"')[0]:
                said += text
            else:
                self.words += event
        if said:
            self._count(said, now_s)
        elif not events and b"HTTP/1.1 200" not in self.rest[:12] and not self.heard_s:
            self._end(self.rest[:300].decode(errors="replace"))
        if self.rest.endswith(b"\r\n0\r\n\r\n"):
            self._answered()

    def _count(self, said: bytes, now_s: float) -> None:
        end, tally = self.place + len(said), self.tally
        if self.expected[self.place : end] != said:
            self._end(f"behind {self.place} tokens came {said[:40]!r}")
            return
        if self.heard_s:
            tally.gaps[min(int((now_s - self.heard_s) / GAP_S), len(tally.gaps) - 1)] += 1
        self.place, self.heard_s = end, now_s
        tally.num_chunks += 1
        tally.num_tokens += len(said)

    def _answered(self) -> None:
        self.tally.num_requests += 1
        if self.place != len(self.expected) or not all(words in self.words for words in self.last_words):
            self._end(f"an answer of {self.place} tokens ended with {self.words[-200:]!r}")
        elif time.perf_counter() >= self.end_s:
            self._end(None)
        else:
            self._question()

    def _end(self, error: str | None) -> None:
        if error is not None:
            self.tally.errors.add(error)
        if not self.done.done():
            self.done.set_result(None)
        self.transport.close()
