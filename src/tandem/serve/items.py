"""An answer as the items of the Responses API, streamed or whole. It does not know requests' fields or HTTP.

    reasoning ─► a reasoning item     content ─► a message with one text part     each tool call ─► a function_call
Each item is opened, grown and closed by events; the whole answer is what the events built.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import orjson

from tandem.serve.attribution import Attribution, Entry
from tandem.serve.logprobs import Tokens
from tandem.serve.parse import Piece, ToolPiece
from tandem.serve.reply import Ask, Reply, Show, Updates
from tandem.serve.schema import ResponsesRequest
from tandem.serve.written import PIECE_BYTES, Parts

Event = dict[str, Any]
ECHOED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "top_p", "tool_choice",
    "tools", "user", "safety_identifier", "prompt_cache_key", "top_logprobs", "reasoning", "text",
)  # fmt: skip
BEGIN = ("created", "in_progress")
ITEM_FIELDS: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}


class Items:
    """Builds the output items of one answer out of its pieces, one open item at a time."""

    def __init__(self, identity: str) -> None:
        self.output: list[dict[str, Any]] = []
        self._identity = identity
        self._open: dict[str, Any] | None = None
        self._tool = -1

    def grow(self, piece: Piece, entries: Sequence[Entry] = ()) -> Iterator[Event]:
        """Events of one piece. entries: log-probabilities of its tokens, written."""
        if piece.tool is not None:
            if piece.tool.index != self._tool:
                yield from self.close("completed")
                yield self._begin_call(piece.tool)
            if piece.tool.arguments:
                self._item["arguments"] += piece.tool.arguments
                yield self._about("response.function_call_arguments.delta", delta=piece.tool.arguments)
        elif piece.reasoning:
            yield from self._part("reasoning", "reasoning_text", piece.reasoning, ())
        elif piece.content:
            yield from self._part("message", "output_text", piece.content, entries)

    @property
    def open_kind(self) -> str | None:
        """The type of the open item."""
        return None if self._open is None else self._open["type"]

    @property
    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _begin(self, item: dict[str, Any]) -> Event:
        self._open = {**item, "status": "in_progress"}
        self.output.append(self._open)
        return {"type": "response.output_item.added", "output_index": self._index, "item": _copy(self._open)}

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _begin_call(self, tool: ToolPiece) -> Event:
        self._tool = tool.index
        name = f"fc_{self._identity}_{len(self.output)}"
        return self._begin(
            {"type": "function_call", "id": name, "call_id": tool.id, "name": tool.name, "arguments": ""}
        )

    def _part(self, kind: str, part_kind: str, text: str, entries: Sequence[Entry]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close("completed")
            name = f"{'msg' if kind == 'message' else 'rs'}_{self._identity}_{len(self.output)}"
            item: dict[str, Any] = {"type": kind, "id": name, "content": []}
            item |= ITEM_FIELDS[kind]
            yield self._begin(item)
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._item["content"].append(part)
            yield self._about("response.content_part.added", content_index=0, part=_copy(part))
        part = self._item["content"][0]
        part["text"] += text
        more = {}
        if kind == "message":
            part["logprobs"] += entries
            more = {"logprobs": entries}
        yield self._about(f"response.{part_kind}.delta", content_index=0, delta=text, **more)

    def close(self, status: str, entries: Sequence[Entry] = ()) -> Iterator[Event]:
        """Events that end the open item, if there is one. entries: of tokens behind its text that belong to it."""
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            yield self._about("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if "logprobs" in part:  # one piece from here on: four events show it
                part["logprobs"] = orjson.Fragment(orjson.dumps([*part["logprobs"], *entries]))
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._about(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._about("response.content_part.done", content_index=0, part=_copy(part))
        yield {"type": "response.output_item.done", "output_index": self._index, "item": _copy(item)}
        self._open = None

    def _about(self, kind: str, **values: Any) -> Event:
        return {"type": kind, "item_id": self._item["id"], "output_index": self._index, **values}


class ResponsesReply(Reply):
    """POST /v1/responses: one answer."""

    kind, prefix = "response", "resp_"

    def __init__(
        self, asks: Sequence[Ask], model: str, tokens: Tokens, show: Show, *, echoed: dict[str, Any]
    ) -> None:  # fmt: skip
        """echoed: see echoed_of."""
        super().__init__(asks, model, tokens, show)
        self._echoed = echoed
        self._items = Items(self.id.removeprefix(self.prefix))
        self._tokens_of: Attribution | None = None
        if show.logprobs or show.parser is not None:
            self._tokens_of = Attribution(tokens, self.offsets_of(asks[0]), shows_logprobs=show.logprobs)
        self._num_reasoning = 0
        self._number = 0

    async def whole(self, updates: Updates) -> Parts:
        async with aclosing(updates), aclosing(self._events(updates)) as events:
            async for _ in events:
                pass
        return [orjson.dumps(self._response() | await self.explanation())]

    async def chunks(self, updates: Updates) -> AsyncGenerator[bytes, None]:
        """The events. The first two wait for the engine's first word, so that a refusal can still be a plain 400."""
        begin = [self._sse({"type": f"response.{kind}", "response": self._response()}) for kind in BEGIN]
        async with aclosing(updates), aclosing(self._events(updates)) as events:
            async for event in events:
                for first in begin:
                    yield first
                begin = []
                data = self._sse(event)
                yield data
                if len(data) > PIECE_BYTES:
                    await asyncio.sleep(0)
        for first in begin:
            yield first
        response = self._response() | await self.explanation()
        yield self._sse({"type": f"response.{response['status']}", "response": response})

    async def _events(self, updates: Updates) -> AsyncGenerator[Event, None]:
        choice = self.choices[0]
        async for ask, update in updates:
            self.admit(ask, update)
            pieces = choice.take(update)
            if self._tokens_of is not None:
                self._tokens_of.come(update.token_ids, update.logprobs)
            for piece in pieces:
                for event in self._items.grow(piece, self._entries_of(piece)):
                    yield event
        last = [] if self._tokens_of is None else self._tokens_of.behind(choice.num_characters)
        if self._items.open_kind == "reasoning":
            self._num_reasoning += len(last)
        cut = choice.finish == "length"
        if self._items.open_kind == "function_call":  # whole calls stay whole, and a model may leave one unfinished
            cut = choice.parser is not None and choice.parser.in_call
        for event in self._items.close("incomplete" if cut else "completed", last if self.show.logprobs else ()):
            yield event

    def _entries_of(self, piece: Piece) -> Sequence[Entry]:
        """Written log-probabilities of a piece of text. Tokens of thoughts are counted."""
        text = piece.content or piece.reasoning
        if self._tokens_of is None or not text:
            return ()
        end = self.choices[0].num_characters - piece.behind
        entries = self._tokens_of.of_part(end - len(text), end)
        if piece.reasoning:
            self._num_reasoning += len(entries)
        return entries if self.show.logprobs else ()

    def _response(self) -> dict[str, Any]:
        finish = self.choices[0].finish
        status = {None: "in_progress", "length": "incomplete"}.get(finish, "completed")
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model,
            "output": self._items.output, "error": None, "background": False, "store": False, "truncation": "disabled",
            "previous_response_id": None, "usage": self.usage() if finish else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None, **self._echoed,
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.num_prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.num_completion,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": self.num_prompt + self.num_completion,
        }

    def _sse(self, event: Event) -> bytes:
        body: bytes = orjson.dumps({**event, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), body)


def echoed_of(body: ResponsesRequest) -> dict[str, Any]:
    """What an answer says of its request, written: it is shown several times, and decoded it takes more memory."""
    echoed = {name: getattr(body, name) for name in ECHOED}
    echoed["parallel_tool_calls"] = body.parallel_tool_calls is not False
    echoed["tool_choice"] = body.tool_choice or "auto"
    echoed["tools"] = body.tools or []
    echoed["text"] = body.text or {"format": {"type": "text"}}
    return {name: orjson.Fragment(msgspec.json.encode(value)) for name, value in echoed.items()}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """A copy that later growth does not change."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}
