"""Answers, streamed or whole, from one source of updates. It does not know HTTP, nor the API's shapes (``shapes``).

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
from tandem.request import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from tandem.serve.logprobs import Offsets, Tokens, num_values_of, prompt_entries
from tandem.serve.parse import AnswerParser, Piece
from tandem.serve.written import STREAM_SLICE, Parts, Turns, with_more, written_lists

MakeParser = Callable[[], AnswerParser]
_MARK = "\N{REPLACEMENT CHARACTER}"
Explain = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(slots=True, eq=False)
class Ask:
    """One prompt's stream and what its answers must show.

    as_written   the prompt was given as text, so that echo_text shows its special tokens.
    silent       the prompt alone is wanted: what was generated is not shown, and nobody counts it.
    """

    stream: AsyncStream
    num_choices: int
    first_index: int = 0
    echo_text: str = ""
    params: SamplingParams | None = None
    as_written: bool = False
    silent: bool = False


class Updates(Protocol):
    """What a reply is made of; see updates.Updates."""

    def __aiter__(self) -> AsyncIterator[tuple[Ask, Update]]: ...

    async def aclose(self) -> None: ...


@dataclass(slots=True)
class Show:
    """What an answer shows beside its text.

    parser   makes a parser for each answer's text, None: it is content.
    ending   the end-of-sequence token's text where special tokens are shown for the parser's sake.
    """

    usage_chunk: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    parser: MakeParser | None = None
    ending: str = ""
    explain: Explain | None = None


@dataclass(slots=True)
class Choice:
    """One answer as it grows.

    plain            what stands before and behind the text in an event that shows nothing else.
    num_characters   of the text that has been taken, before it was parsed.
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
    num_characters: int = 0

    def take(self, update: Update) -> list[Piece]:
        """Pieces of the answer that this update completes."""
        self.token_ids += update.token_ids
        if update.finish == "stop" and self.show.ending:
            update.text = update.text.removesuffix(self.show.ending)
        self.num_characters += len(update.text)
        if self.parser is not None:
            pieces = self.parser.feed(update.text, final=update.finish is not None)
        else:
            pieces = [Piece(content=update.text)] if update.text else []
        self.called = self.called or any(piece.tool is not None for piece in pieces)
        if update.finish is not None:
            calls = self.called and not (self.parser is not None and self.parser.cut_short)
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
        self._ask_of: dict[int, Ask] = {}
        self._written: dict[tuple[int, str], list[Parts]] = {}
        for ask in asks:
            for i in range(ask.first_index, ask.first_index + ask.num_choices):
                self.choices[i] = Choice(i, show, show.parser() if show.parser else None)
                self._ask_of[i] = ask
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

    async def whole(self, updates: Updates) -> Parts:
        """Run to the end and give the complete answer, written. What the answers to a prompt share is written once."""
        async with aclosing(updates):
            async for ask, update in updates:
                choice = self.admit(ask, update)
                choice.pieces += choice.take(update)
                choice.logprobs += update.logprobs or ()
        turns = Turns()
        choices: Parts = []
        for choice in self.choices.values():
            if choices:
                choices.append(b",")
            choices += await self._complete(choice, turns)
        body = self.envelope(self.kind) | {"usage": self.usage()}
        more = {"choices": [b"[", *choices, b"]"]}
        if self.show.token_ids and len(self.asks) == 1:
            more["prompt_token_ids"] = await self._prompt_ids(self.asks[0], turns)
        return with_more(body | await self.explanation(), more)

    async def chunks(self, updates: Updates) -> AsyncGenerator[bytes, None]:
        """One server-sent event a piece; the last of a choice carries its finish reason, then usage, then [DONE]."""
        turns = Turns(STREAM_SLICE)
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
                    last = update if i == len(pieces) - 1 else None
                    num_values = len(last.logprobs or ()) * (1 + MAX_LOGPROBS) if last and self.show.logprobs else 0
                    if num_values:
                        await turns.ready()
                    if num_values > STREAM_SLICE:
                        yield await self._large_event(choice, piece, update, turns)
                    else:
                        yield self._event(choice, piece, last)
                        if num_values:
                            await turns.done(num_values)
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
        if choice.parser or show.logprobs or show.token_ids or show.continuous_usage:
            return None
        # only null and numbers stand behind the text, so the last place is its
        before, _, behind = self._event(choice, Piece(content=_MARK), None).rpartition(orjson.dumps(_MARK))
        return before, behind

    def offsets_of(self, ask: Ask) -> Offsets:
        """Where tokens of an answer to it stand, from its first one on."""
        visible = self.tokens.visible_bytes(ask.params is None or ask.params.skip_special_tokens)
        before = b"".join(visible(token) for token in ask.stream.prompt_token_ids[-4:])
        return Offsets(visible, len(ask.echo_text), before)

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
        return self._ask_of[choice.index]

    def prompt_entries_of(self, choice: Choice) -> list[TokenLogprobs]:
        return self.prompt_logprobs.get(self.ask_of(choice).first_index, [])

    def _event(self, choice: Choice, piece: Piece, update: Update | None) -> bytes:
        """One chunk; update is given with the last piece that it completed."""
        logprobs = self.logprobs(choice, update.logprobs or []) if self.show.logprobs and update is not None else None
        body = self._choice_shown(choice, piece, update, {"logprobs": logprobs})
        return sse(self._around(choice) | {"choices": [body]})

    async def _large_event(self, choice: Choice, piece: Piece, update: Update, turns: Turns) -> bytes:
        """As _event, its log-probabilities written in slices: a client that reads slowly gets many at once."""
        choice.logprobs = update.logprobs or []
        logprobs = await self.written_logprobs(choice, turns)
        choice.logprobs = []
        body = with_more(self._choice_shown(choice, piece, update, {}), {"logprobs": logprobs})
        chunk = with_more(self._around(choice), {"choices": [b"[", *body, b"]"]})
        return b"".join([b"data: ", *chunk, b"\n\n"])

    def _choice_shown(
        self, choice: Choice, piece: Piece, update: Update | None, more: dict[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice.index} | self.delta(choice, piece) | more
        body["finish_reason"] = choice.finish if update is not None and update.finish else None
        if self.show.token_ids and update is not None:
            body["token_ids"] = update.token_ids
        return body

    def _around(self, choice: Choice) -> dict[str, Any]:
        chunk = self.envelope(self.chunk_kind)
        if self.show.token_ids and not choice.started:
            chunk["prompt_token_ids"] = list(self.ask_of(choice).stream.prompt_token_ids)
        if self.show.continuous_usage:
            chunk["usage"] = self.usage()
        return chunk

    async def _complete(self, choice: Choice, turns: Turns) -> Parts:
        body = {"index": choice.index} | self.answer(choice) | {"finish_reason": choice.finish}
        more: dict[str, Parts] = {}
        if self.show.logprobs:
            more["logprobs"] = await self.written_logprobs(choice, turns)
            choice.logprobs = []  # an answer may have many
        else:
            body["logprobs"] = None
        if self.show.prompt_logprobs:
            entries = self.prompt_entries_of(choice)
            inside = (await self.once(choice, "entries", lambda: written_lists(
                lambda some: (prompt_entries(self.tokens, some),), entries, num_values_of(entries[1:]), turns
            )))[0]  # fmt: skip
            more["prompt_logprobs"] = [b"[", *inside, b"]"]
        if self.show.token_ids:
            body["token_ids"] = choice.token_ids
            if len(self.asks) > 1:
                more["prompt_token_ids"] = await self._prompt_ids(self.ask_of(choice), turns)
        await turns.done(64 + len(choice.token_ids))
        return with_more(body, more)

    async def _prompt_ids(self, ask: Ask, turns: Turns) -> Parts:
        ids = ask.stream.prompt_token_ids
        choice = self.choices[ask.first_index]
        inside = await self.once(choice, "ids", lambda: written_lists(lambda some: (list(some),), ids, 1, turns))
        return [b"[", *inside[0], b"]"]

    async def once(self, choice: Choice, what: str, write: Callable[[], Awaitable[list[Parts]]]) -> list[Parts]:
        """What all answers to a choice's prompt share, written for the first of them."""
        key = self.ask_of(choice).first_index, what
        if key not in self._written:
            self._written[key] = await write()
        return self._written[key]

    async def written_logprobs(self, choice: Choice, turns: Turns) -> Parts:
        raise NotImplementedError

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def answer(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError


def sse(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
