"""Answers in the shapes of the chat and completion endpoints. It does not know where updates come from, or HTTP."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from tandem.request import TokenLogprobs
from tandem.serve.logprobs import LISTS, Tokens, chat_entries, completion_lists, num_values_of, prompt_places
from tandem.serve.parse import Piece
from tandem.serve.reply import Ask, Choice, Reply, Show
from tandem.serve.written import Parts, Turns, joined_lists, with_more, written_lists


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

    async def written_logprobs(self, choice: Choice, turns: Turns) -> Parts:
        entries = choice.logprobs
        (inside,) = await written_lists(
            lambda some: (chat_entries(self.tokens, some),), entries, num_values_of(entries), turns
        )
        return with_more({"refusal": None}, {"content": [b"[", *inside, b"]"]})


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

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return dict(zip(LISTS, self._lists(choice, entries), strict=True))

    def _lists(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> tuple[list[Any], ...]:
        """The lists of the entries of an answer that come next."""
        ask = self.ask_of(choice)
        if choice.offsets is None:
            choice.offsets = self.offsets_of(ask)
        return completion_lists(self.tokens, entries, choice.offsets.of([entry.token for entry in entries]))

    async def written_logprobs(self, choice: Choice, turns: Turns) -> Parts:
        own = choice.logprobs
        lists = await written_lists(lambda some: self._lists(choice, some), own, num_values_of(own), turns)
        if self.echo and self.prompt_entries_of(choice):
            prompt = await self.once(choice, "lists", lambda: self._written_prompt(choice, turns))
            lists = [joined_lists(before, behind) for before, behind in zip(prompt, lists, strict=True)]
        return with_more({}, {name: [b"[", *inside, b"]"] for name, inside in zip(LISTS, lists, strict=True)})

    async def _written_prompt(self, choice: Choice, turns: Turns) -> list[Parts]:
        ask, entries = self.ask_of(choice), self.prompt_entries_of(choice)
        places = prompt_places(self.tokens, ask.stream.prompt_token_ids, ask.echo_text, as_written=ask.as_written)

        def write(some: Sequence[TokenLogprobs]) -> tuple[list[Any], ...]:
            return completion_lists(self.tokens, some, list(islice(places, len(some))))

        return await written_lists(write, entries, num_values_of(entries[1:]), turns)


def joined(pieces: Sequence[Piece]) -> tuple[str, str, list[dict[str, Any]]]:
    """(content, reasoning, tool calls) of all pieces of an answer."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.tool is not None:
            piece.tool.add_to(calls)
    content = "".join(piece.content for piece in pieces)
    return content, "".join(piece.reasoning for piece in pieces), [calls[i] for i in sorted(calls)]
