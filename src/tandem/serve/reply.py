"""Answers in the OpenAI API's shapes, streamed or whole, from one source of updates. It does not know HTTP.

Both ways run through the same pieces (``Choice.take``), so stream and non-stream give the same text, tokens,
log-probabilities, usage and finish reason.
"""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from tandem.engine.contract import Update
from tandem.engine.streams import AsyncStream
from tandem.request import SamplingParams, TokenLogprobs
from tandem.serve.logprobs import Offsets, Tokens, chat_entries, completion_lists, prompt_entries, prompt_places
from tandem.serve.parse import AnswerParser, Piece

MakeParser = Callable[[], AnswerParser]
_MARK = "\N{REPLACEMENT CHARACTER}"
Explain = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(slots=True, eq=False)
class Ask:
    """One prompt's stream and what its answers must show.

    as_written   the prompt was given as text, so that echo_text shows its special tokens.
    """

    stream: AsyncStream
    num_choices: int
    first_index: int = 0
    echo_text: str = ""
    params: SamplingParams | None = None
    as_written: bool = False


class Updates(Protocol):
    """What a reply is made of; see updates.Updates."""

    def __aiter__(self) -> AsyncIterator[tuple[Ask, Update]]: ...

    async def aclose(self) -> None: ...


@dataclass(slots=True)
class Show:
    """What an answer shows beside its text.

    parser   makes a parser for each answer's text, None: it is content.
    ending   the end-of-sequence token's text where special tokens are shown for the parser's sake.
    silent   the prompt alone is wanted: what was generated is not shown.
    """

    usage_chunk: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    silent: bool = False
    parser: MakeParser | None = None
    ending: str = ""
    explain: Explain | None = None


@dataclass(slots=True)
class Choice:
    """One answer as it grows.

    plain   what stands before and behind the text in an event that shows nothing else.
    """

    index: int
    show: Show
    parser: AnswerParser | None = None
    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    started: bool = False
    called: bool = False
    offsets: Offsets | None = None
    plain: tuple[bytes, bytes] | None = None

    def take(self, update: Update) -> list[Piece]:
        """Pieces of the answer that this update completes."""
        if self.show.silent:
            update.text, update.token_ids, update.logprobs = "", [], None
            update.finish = update.finish and "length"
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()
        if update.finish == "stop" and self.show.ending:
            update.text = update.text.removesuffix(self.show.ending)
        if self.parser is not None:
            pieces = self.parser.feed(update.text, final=update.finish is not None)
        else:
            pieces = [Piece(content=update.text)] if update.text else []
        self.called = self.called or any(piece.tool is not None for piece in pieces)
        if update.finish is not None:
            calls = self.called and not (self.parser is not None and self.parser.in_call)
            self.finish = "tool_calls" if calls and update.finish == "stop" else update.finish
        return pieces


class Reply:
    """What all answers share: identity, choices, usage. Subclasses give them their shape."""

    kind = chunk_kind = prefix = ""

    def __init__(self, asks: Sequence[Ask], model: str, tokens: Tokens, show: Show) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model, self.tokens, self.asks, self.show = model, tokens, asks, show
        self.choices: dict[int, Choice] = {}
        for ask in asks:
            for i in range(ask.first_index, ask.first_index + ask.num_choices):
                self.choices[i] = Choice(i, show, show.parser() if show.parser else None)
        self.cached = 0
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}

    @property
    def num_prompt(self) -> int:
        return sum(len(ask.stream.prompt_token_ids) for ask in self.asks)

    @property
    def num_completion(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    async def whole(self, updates: Updates) -> dict[str, Any]:
        """Run to the end and give the complete answer."""
        async with aclosing(updates):
            async for ask, update in updates:
                choice = self.admit(ask, update)
                choice.pieces += choice.take(update)
        body = self.envelope(self.kind) | {
            "choices": [self._complete(choice) for choice in self.choices.values()],
            "usage": self.usage(),
        }
        if self.show.token_ids and len(self.asks) == 1:
            body["prompt_token_ids"] = list(self.asks[0].stream.prompt_token_ids)
        return body | await self.explanation()

    async def chunks(self, updates: Updates) -> AsyncGenerator[bytes, None]:
        """One server-sent event a piece; the last of a choice carries its finish reason, then usage, then [DONE]."""
        async with aclosing(updates):
            async for ask, update in updates:
                choice = self.choices[ask.first_index + update.index]
                if choice.plain is not None and update.text and update.finish is None:
                    choice.token_ids += update.token_ids
                    yield b"%b%b%b" % (choice.plain[0], orjson.dumps(update.text), choice.plain[1])
                    continue
                choice = self.admit(ask, update)
                pieces = choice.take(update)
                shows_tokens = bool(update.token_ids) and (self.show.token_ids or self.show.logprobs)
                if not pieces and (update.finish or not choice.started or shows_tokens):
                    pieces = [Piece()]
                for i, piece in enumerate(pieces):
                    yield self._event(choice, piece, update if i == len(pieces) - 1 else None)
                    choice.started = True
                if choice.plain is None and choice.started and choice.token_ids:
                    choice.plain = self._plain(choice)
        explanation = await self.explanation()
        if self.show.usage_chunk:
            yield sse(self.envelope(self.chunk_kind) | {"choices": [], "usage": self.usage()} | explanation)
        elif explanation:
            yield sse(self.envelope(self.chunk_kind) | {"choices": []} | explanation)
        yield b"data: [DONE]\n\n"

    def _plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """The bytes around the text of an event that shows nothing else; None if events of this reply may.

        Such an event is by far the most frequent one, and this makes it cheap.
        """
        show = self.show
        if choice.parser or show.logprobs or show.token_ids or show.continuous_usage or show.silent:
            return None
        # only null and numbers stand behind the text, so the last place is its
        before, _, behind = self._event(choice, Piece(content=_MARK), None).rpartition(orjson.dumps(_MARK))
        return before, behind

    def admit(self, ask: Ask, update: Update) -> Choice:
        choice = self.choices[ask.first_index + update.index]
        if not choice.token_ids and update.index == 0:
            self.cached += update.cached
        if update.prompt_logprobs:
            self.prompt_logprobs.setdefault(ask.first_index, []).extend(update.prompt_logprobs)
        return choice

    async def explanation(self) -> dict[str, Any]:
        return {} if self.show.explain is None else {"explain": await self.show.explain()}

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def ask_of(self, choice: Choice) -> Ask:
        return next(a for a in self.asks if a.first_index <= choice.index < a.first_index + a.num_choices)

    def prompt_entries_of(self, choice: Choice) -> list[TokenLogprobs]:
        return self.prompt_logprobs.get(self.ask_of(choice).first_index, [])

    def _event(self, choice: Choice, piece: Piece, update: Update | None) -> bytes:
        """One chunk; update is given with the last piece that it completed."""
        body: dict[str, Any] = {"index": choice.index} | self.delta(choice, piece)
        logprobs = self.logprobs(choice, update.logprobs or []) if self.show.logprobs and update is not None else None
        body["logprobs"] = logprobs
        body["finish_reason"] = choice.finish if update is not None and update.finish else None
        if self.show.token_ids and update is not None:
            body["token_ids"] = update.token_ids
        chunk = self.envelope(self.chunk_kind) | {"choices": [body]}
        if self.show.token_ids and not choice.started:
            chunk["prompt_token_ids"] = list(self.ask_of(choice).stream.prompt_token_ids)
        if self.show.continuous_usage:
            chunk["usage"] = self.usage()
        return sse(chunk)

    def _complete(self, choice: Choice) -> dict[str, Any]:
        body = {"index": choice.index} | self.answer(choice) | {"finish_reason": choice.finish}
        body["logprobs"] = self.logprobs(choice, self.entries_of(choice)) if self.show.logprobs else None
        if self.show.prompt_logprobs:
            body["prompt_logprobs"] = prompt_entries(self.tokens, self.prompt_entries_of(choice))
        if self.show.token_ids:
            body["token_ids"] = choice.token_ids
            if len(self.asks) > 1:
                body["prompt_token_ids"] = list(self.ask_of(choice).stream.prompt_token_ids)
        return body

    def entries_of(self, choice: Choice) -> list[TokenLogprobs]:
        return choice.logprobs

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def answer(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError


class ChatReply(Reply):
    """POST /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {} if choice.started else {"role": "assistant"}
        if piece.content or (not choice.started and piece.tool is None and not piece.reasoning):
            delta["content"] = piece.content
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool is not None:
            delta["tool_calls"] = [piece.tool.as_delta()]
        return {"delta": delta}

    def answer(self, choice: Choice) -> dict[str, Any]:
        content, reasoning, calls = joined(choice.pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_entries(self.tokens, entries), "refusal": None}


class CompletionReply(Reply):
    """POST /v1/completions. With echo, the prompt comes first: text and, if asked for, its log-probabilities."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, asks: Sequence[Ask], model: str, tokens: Tokens, show: Show, *, echo: bool = False) -> None:
        super().__init__(asks, model, tokens, show)
        self.echo = echo

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {"text": piece.content if choice.started else self.ask_of(choice).echo_text + piece.content}

    def answer(self, choice: Choice) -> dict[str, Any]:
        return {"text": self.ask_of(choice).echo_text + joined(choice.pieces)[0]}

    def entries_of(self, choice: Choice) -> list[TokenLogprobs]:
        return self.prompt_entries_of(choice) + choice.logprobs if self.echo else choice.logprobs

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        ask = self.ask_of(choice)
        prompt = ask.stream.prompt_token_ids
        if choice.offsets is None:
            visible = self.tokens.visible_bytes(ask.params is None or ask.params.skip_special_tokens)
            before = b"".join(visible(token) for token in prompt[-4:])
            choice.offsets = Offsets(visible, len(ask.echo_text), before)
        num_echoed = len(self.prompt_entries_of(choice)) if self.echo else 0
        places = prompt_places(self.tokens, prompt, ask.echo_text, as_written=ask.as_written) if num_echoed else []
        places += choice.offsets.of([entry.token for entry in entries[num_echoed:]])
        return completion_lists(self.tokens, entries, places)


def joined(pieces: Sequence[Piece]) -> tuple[str, str, list[dict[str, Any]]]:
    """(content, reasoning, tool calls) of all pieces of an answer."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.tool is not None:
            piece.tool.add_to(calls)
    content = "".join(piece.content for piece in pieces)
    return content, "".join(piece.reasoning for piece in pieces), [calls[i] for i in sorted(calls)]


def sse(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
