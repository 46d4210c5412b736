"""One streamed request as its client sees it: which chunks bring tokens, when, and how many. It knows no statistics.

A chunk counts if it brings text (content, reasoning, a tool call) or token ids. The role chunk, the finish chunk, the
usage chunk, keep-alives and [DONE] bring none, so they are no first token and no gap. Tokens are counted by the
server's usage; without it a chunk is taken for a token, and the outcome says that this is an estimate.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from tandem.bench.load_http import ConnectionLostError, HttpClient


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds of time.perf_counter.

    chunks_s   when each chunk with tokens came.      counts   tokens in each, if the server tells (token_ids).
    error      why it failed, in few words; None: it is complete.
    """

    sent_s: float = 0.0
    due_s: float = 0.0
    end_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    text: list[str] = field(default_factory=list)

    @property
    def estimated(self) -> bool:
        """The server gave neither usage nor token ids, so a chunk counts as a token."""
        return self.usage_tokens is None and not self.counts

    @property
    def num_tokens(self) -> int:
        if self.usage_tokens is not None:
            return self.usage_tokens
        return sum(self.counts) if self.counts else len(self.chunks_s)

    @property
    def tokens_per_chunk(self) -> float:
        return self.num_tokens / len(self.chunks_s) if self.chunks_s else 0.0

    @property
    def ttft_s(self) -> float | None:
        return self.chunks_s[0] - self.sent_s if self.chunks_s else None

    @property
    def e2e_s(self) -> float | None:
        return self.chunks_s[-1] - self.sent_s if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time a token after the first; none for a single token."""
        count = self.num_tokens
        return (self.chunks_s[-1] - self.chunks_s[0]) / (count - 1) if count > 1 and len(self.chunks_s) > 1 else None

    @property
    def chunk_gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False)]

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between tokens. Where chunks hold several tokens, a chunk's gap is shared out evenly among them:

        by the server's token ids if it gives them, else by the answer's mean, rounded: a little above one says no more
        than that an end token or half a character had no text of its own.
        """
        if self.counts:
            pairs = zip(self.chunk_gaps_s, self.counts[1:], strict=True)
            return [gap / count for gap, count in pairs for _ in range(count)]
        each = max(1, round(self.tokens_per_chunk))
        return [gap / each for gap in self.chunk_gaps_s for _ in range(each)]


class _Reader:
    """Cuts a stream into events and notes what they bring."""

    def __init__(self, outcome: Outcome, keep_text: bool) -> None:
        self.outcome, self.keep_text = outcome, keep_text
        self.rest = b""
        self.done = False

    def feed(self, data: bytes, now_s: float) -> None:
        self.rest += data
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.outcome.error = "not JSON"
            return
        if "error" in event:
            self.outcome.error = f"stream error: {_code(event)}"
            return
        if usage := event.get("usage"):
            self.outcome.usage_tokens = usage.get("completion_tokens")
            self.outcome.prompt_tokens = usage.get("prompt_tokens")
        text, count, choices = "", 0, event.get("choices") or ()
        for choice in choices:
            text += _text(choice)
            count += len(choice.get("token_ids") or ())
            self.outcome.finish = choice.get("finish_reason") or self.outcome.finish
        if text or count:
            self.outcome.chunks_s.append(now_s)
            if count:
                self.outcome.counts.append(count)
            if self.keep_text:
                self.outcome.text.append(text)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    found = (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        found += (function.get("name") or "") + (function.get("arguments") or "")
    return found


def _code(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or error.get("message") or "unknown")[:60]
    return str(error or "unknown")[:60]


async def stream(
    client: HttpClient, path: str, body: dict[str, Any], timeout_s: float, *, keep_text: bool = False
) -> Outcome:
    """Send one request (body gets stream and include_usage) and read its stream. Never raises but for cancelling."""
    payload = orjson.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    outcome = Outcome()
    reader = _Reader(outcome, keep_text)
    raw: list[bytes] = []

    def on_body(data: bytes, now_s: float) -> None:
        raw.append(data if len(raw) < 8 else b"")
        reader.feed(data, now_s)

    outcome.sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            status = await client.request("POST", path, payload, on_body)
        if status != 200:
            outcome.error = f"HTTP {status}: {_refusal(b''.join(raw))}"
        elif outcome.error is None and not reader.done and outcome.finish is None:
            outcome.error = "the stream ended without a finish"
        elif outcome.error is None and not outcome.chunks_s and outcome.num_tokens:
            outcome.error = "no text came"
    except TimeoutError:
        outcome.error = "timeout"
    except ConnectionLostError:
        outcome.error = "connection lost"
    except OSError as error:
        outcome.error = f"no connection: {error.strerror or type(error).__name__}"
    outcome.end_s = time.perf_counter()
    if len(outcome.counts) != len(outcome.chunks_s):
        outcome.counts = []
    return outcome


def _refusal(raw: bytes) -> str:
    try:
        return _code(orjson.loads(raw))
    except orjson.JSONDecodeError:
        return "no error body"
