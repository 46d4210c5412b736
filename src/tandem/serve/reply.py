"""Answers in the OpenAI API's shapes, streamed or whole, from one source of updates. It does not know HTTP.

Both ways run through the same pieces (``Choice.take``), so stream and non-stream give the same text, tokens,
log-probabilities, usage and finish reason.
"""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from tandem.engine.contract import Stream, Update
from tandem.request import TokenLogprobs
from tandem.serve.parse import AnswerParser, Piece


class Tokens(Protocol):
    """What an answer needs of the tokenizer: a token alone, as text and as bytes."""

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


@dataclass(slots=True)
class Ask:
    """One prompt's stream and what its answers must show."""

    stream: Stream
    num_choices: int
    first_index: int = 0
    echo_text: str = ""


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    index: int
    parser: AnswerParser | None
    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    started: bool = False
    called: bool = False
    text_length: int = 0

    def take(self, update: Update) -> list[Piece]:
        """Pieces of the answer that this update completes."""
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()
        pieces = (
            self.parser.feed(update.text, final=update.finish is not None)
            if self.parser is not None
            else [Piece(content=update.text)] if update.text else []
        )  # fmt: skip
        self.called = self.called or any(piece.tool is not None for piece in pieces)
        if update.finish is not None:
            self.finish = "tool_calls" if self.called and update.finish == "stop" else update.finish
        return pieces


class Reply:
    """What chat and completion answers share: identity, choices, usage."""

    kind = ""
    prefix = ""

    def __init__(
        self, asks: Sequence[Ask], model: str, tokens: Tokens, *, usage_chunk: bool = False,
        continuous_usage: bool = False, show_logprobs: bool = False, show_token_ids: bool = False,
        parser: Callable[[], AnswerParser] | None = None,
    ) -> None:  # fmt: skip
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model, self.tokens, self.asks = model, tokens, asks
        self.usage_chunk, self.continuous_usage = usage_chunk, continuous_usage
        self.show_logprobs, self.show_token_ids = show_logprobs, show_token_ids
        self.choices: dict[int, Choice] = {}
        for ask in asks:
            for i in range(ask.first_index, ask.first_index + ask.num_choices):
                self.choices[i] = Choice(i, parser() if parser else None)
        self.cached = 0
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.extra: dict[str, Any] = {}

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(ask.stream.prompt_token_ids) for ask in self.asks)
        completion = sum(len(choice.token_ids) for choice in self.choices.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    async def whole(self, updates: AsyncIterator[tuple[Ask, Update]]) -> dict[str, Any]:
        """Run to the end and give the complete answer."""
        async for ask, update in updates:
            choice = self.admit(ask, update)
            choice.pieces += choice.take(update)
        body = self.envelope(self.kind) | {
            "choices": [self.complete(choice) for choice in self.choices.values()],
            "usage": self.usage(),
        }
        if self.show_token_ids:
            body["prompt_token_ids"] = list(self.asks[0].stream.prompt_token_ids)
        return body | self.extra

    async def chunks(self, updates: AsyncIterator[tuple[Ask, Update]]) -> AsyncIterator[bytes]:
        """One server-sent event a piece; the last of a choice carries its finish reason, then usage, then [DONE]."""
        async for ask, update in updates:
            choice = self.admit(ask, update)
            pieces = choice.take(update)
            shows_tokens = bool(update.token_ids) and (self.show_token_ids or self.show_logprobs)
            if not pieces and (update.finish or not choice.started or shows_tokens):
                pieces = [Piece()]
            for i, piece in enumerate(pieces):
                last = i == len(pieces) - 1
                yield self.event(choice, piece, update if last else None)
                choice.started = True
        if self.usage_chunk:
            yield sse(self.envelope(self.chunk_kind) | {"choices": [], "usage": self.usage()} | self.extra)
        elif self.extra:
            yield sse(self.envelope(self.chunk_kind) | {"choices": []} | self.extra)
        yield b"data: [DONE]\n\n"

    def admit(self, ask: Ask, update: Update) -> Choice:
        choice = self.choices[ask.first_index + update.index]
        if not choice.token_ids and update.index == 0:
            self.cached += update.cached
        if update.prompt_logprobs:
            self.prompt_logprobs.setdefault(ask.first_index, []).extend(update.prompt_logprobs)
        return choice

    @property
    def chunk_kind(self) -> str:
        return self.kind

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def event(self, choice: Choice, piece: Piece, update: Update | None) -> bytes:
        """One chunk; update is given with the last piece that it completed."""
        body: dict[str, Any] = {"index": choice.index} | self.delta(choice, piece)
        logprobs = update.logprobs if update is not None else None
        body["logprobs"] = self.logprobs(choice, logprobs or []) if self.show_logprobs and update is not None else None
        body["finish_reason"] = choice.finish if update is not None and update.finish else None
        if self.show_token_ids and update is not None:
            body["token_ids"] = update.token_ids
        chunk = self.envelope(self.chunk_kind) | {"choices": [body]}
        if self.continuous_usage:
            chunk["usage"] = self.usage()
        return sse(chunk)

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def complete(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError


class ChatReply(Reply):
    """POST /v1/chat/completions."""

    kind, prefix = "chat.completion", "chatcmpl"

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {} if choice.started else {"role": "assistant"}
        if piece.content or (not choice.started and piece.tool is None and not piece.reasoning):
            delta["content"] = piece.content
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool is not None:
            delta["tool_calls"] = [piece.tool.as_delta()]
        return {"delta": delta}

    def complete(self, choice: Choice) -> dict[str, Any]:
        content = "".join(piece.content for piece in choice.pieces)
        reasoning = "".join(piece.reasoning for piece in choice.pieces)
        calls: dict[int, dict[str, Any]] = {}
        for tool in (piece.tool for piece in choice.pieces):
            if tool is not None:
                tool.add_to(calls)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [calls[i] for i in sorted(calls)]
        body = {"index": choice.index, "message": message, "finish_reason": choice.finish}
        body["logprobs"] = self.logprobs(choice, choice.logprobs) if self.show_logprobs else None
        if self.show_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [chat_logprob(self.tokens, entry) for entry in entries], "refusal": None}


class CompletionReply(Reply):
    """POST /v1/completions. With echo, the prompt comes first: text and, if asked for, its log-probabilities."""

    kind, prefix = "text_completion", "cmpl"

    def __init__(self, *args: Any, echo_logprobs: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.echo_logprobs = echo_logprobs

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        text = piece.content if choice.started else self.echo_of(choice) + piece.content
        return {"text": text}

    def echo_of(self, choice: Choice) -> str:
        return self.ask_of(choice).echo_text

    def ask_of(self, choice: Choice) -> Ask:
        return next(a for a in self.asks if a.first_index <= choice.index < a.first_index + a.num_choices)

    def complete(self, choice: Choice) -> dict[str, Any]:
        entries = list(choice.logprobs)
        if self.echo_logprobs:
            entries = self.prompt_logprobs.get(self.ask_of(choice).first_index, []) + entries
        text = self.echo_of(choice) + "".join(piece.content for piece in choice.pieces)
        body = {"index": choice.index, "text": text, "finish_reason": choice.finish}
        body["logprobs"] = self.logprobs(choice, entries) if self.show_logprobs else None
        if self.show_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = [self.tokens.token_text(entry.token) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(choice.text_length)
            choice.text_length += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self.tokens.token_text(token): logprob for token, logprob in entry.top} if entry.logprob is not None
                else None for entry in entries
            ],
            "text_offset": offsets,
        }  # fmt: skip


def chat_logprob(tokens: Tokens, entry: TokenLogprobs) -> dict[str, Any]:
    """One entry of choices[].logprobs.content."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": tokens.token_text(token), "logprob": logprob, "bytes": list(tokens.token_bytes(token))}

    return one(entry.token, entry.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in entry.top]}


def sse(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
