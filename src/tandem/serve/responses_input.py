"""The input of a Responses request as chat messages, and chat's paths in the words of that input.

It knows items; it does not know what else a request holds.

    reasoning · message · function_call · function_call …       ─►  the one turn that the model wrote
    function_call_output                                        ─►  a tool's message
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import RequestError
from tandem.serve.refusals import MAX_MESSAGES, MAX_PARTS, check_count
from tandem.serve.schema import ResponsesRequest

Message = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("text", "input_text", "output_text")
_PATH = re.compile(r"\bmessages\[(\d+)\](?:\.tool_calls\[(\d+)\])?((?:\.\w+)*)")
# What a message calls otherwise.
_NAMES = {
    ".id": ".call_id",
    ".tool_call_id": ".call_id",
    ".function.name": ".name",
    ".function.arguments": ".arguments",
}


@dataclass(slots=True)
class Place:
    """Where a chat message comes from.

    item   its path, of several the first's.      content   what its content is called there.
    calls  the paths of its calls.
    """

    item: str
    content: str = "content"
    calls: list[str] = field(default_factory=list)


def messages_of(body: ResponsesRequest, places: list[Place]) -> list[Message]:
    """instructions and input as chat messages. Raises RequestError naming the item.

    Items of the assistant that stand together are one turn, as the model wrote it and as chat has it; only a message
    directly behind another is one of its own. places: is filled, with one of each message.
    """
    talk = _Conversation(places)
    if body.instructions:
        talk.add({"role": "system", "content": body.instructions}, Place("instructions"))
    if isinstance(body.input, str):
        talk.add({"role": "user", "content": body.input}, Place("input"))
        return talk.end()
    if not body.input:
        raise _wrong("input is an empty list.")
    check_count("input", body.input, MAX_MESSAGES, "items")
    num_parts = 0
    for number, item in enumerate(body.input):
        kind, where = item.get("type"), f"input[{number}]"
        kind = "message" if kind is None else kind
        parts = [item[name] for name in ("content", "summary", "output") if isinstance(item.get(name), list)]
        num_parts += sum(map(len, parts)) + (kind == "function_call")
        if num_parts > MAX_PARTS:
            raise _wrong(f"input holds {num_parts} parts and calls or more; the limit is {MAX_PARTS}.")
        if kind == "reasoning":
            talk.think(_text_of(item.get("content") or item.get("summary")))
        else:
            talk.add(*_message(item, kind, where))
    messages = talk.end()
    if not messages:
        raise _wrong("input holds reasoning alone; a message is needed.")
    return messages


def in_words_of_input(what: str, places: Sequence[Place]) -> str:
    """What an error says, with chat's paths as they are in the input."""

    def renamed(found: "re.Match[str]") -> str:
        message, call, rest = int(found[1]), found[2], found[3]
        if message >= len(places):
            return found[0]
        place = places[message]
        if call is not None:
            path = place.calls[int(call)] if int(call) < len(place.calls) else place.item
            return path + _NAMES.get(rest, rest)
        head, dot, inner = rest[1:].partition(".")
        return f"{place.item}.{place.content}{dot}{inner}" if head == "content" else place.item + _NAMES.get(rest, rest)

    return _PATH.sub(renamed, what)


class _Conversation:
    """Chat messages as the items make them. What is joined is joined once, however many items a turn has."""

    def __init__(self, places: list[Place]) -> None:
        self._messages: list[Message] = []
        self._places = places
        self._thought: list[str] = []  # which belongs to what the assistant says next
        # Of the last message: whether a turn may go on there; its thoughts, and texts that go on with its content.
        self._is_turn = False
        self._thoughts: list[str] = []
        self._texts: list[str] = []

    def think(self, text: str) -> None:
        if text:
            self._thought.append(text)

    def add(self, message: Message, place: Place) -> None:
        if message["role"] != "assistant":
            if self._thought:  # all that the assistant said, or said last
                if not self._messages or self._messages[-1]["role"] != "assistant":
                    self._append({"role": "assistant", "content": ""}, place)
                self._put_thought()
            self._append(message, place)
            return
        if self._goes_on(message):
            self._texts.append(_plain(message["content"]))
            if "tool_calls" in message:
                self._messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
                self._places[-1].calls += place.calls
        else:
            self._append(message, place)
        self._put_thought()

    def end(self) -> list[Message]:
        """All messages. A thought that nothing follows is left out."""
        self._settle()
        return self._messages

    def _goes_on(self, message: Message) -> bool:
        """Whether it is of the same turn as the last one. Contents that will be refused are left where they are."""
        if not self._is_turn or not ("tool_calls" in message or "tool_calls" in self._messages[-1]):
            return False
        return _is_text(message["content"])

    def _append(self, message: Message, place: Place) -> None:
        self._settle()
        self._messages.append(message)
        self._places.append(place)
        self._is_turn = message["role"] == "assistant" and _is_text(message["content"])

    def _put_thought(self) -> None:
        self._thoughts += self._thought
        self._thought = []

    def _settle(self) -> None:
        if any(self._texts):
            last = self._messages[-1]
            last["content"] = "".join((_plain(last["content"]), *self._texts))
        if self._thoughts:
            self._messages[-1]["reasoning_content"] = "".join(self._thoughts)
        self._thoughts, self._texts = [], []


def _message(item: Message, kind: object, where: str) -> tuple[Message, Place]:
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise _wrong(
                f"{where}.role is {role!r:.80}; it must be one of {', '.join(ROLES)}. What a call gave is an item of "
                "type function_call_output."
            )
        return {"role": role, "content": item.get("content")}, Place(where)
    if kind == "function_call":
        function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where, may_be="")}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}, Place(where, calls=[where])
    if kind == "function_call_output":
        output = item.get("output")
        if output is None:
            raise _wrong(f"{where}.output is missing; it is what the function gave, a string or a list of text parts.")
        message = {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output}
        return message, Place(where, content="output")
    raise RequestError(
        f"{where} is of type {kind!r:.80}; known are message, function_call, function_call_output, reasoning.",
        param="input", code="unsupported_value",
    )  # fmt: skip


def _string(item: Message, name: str, where: str, may_be: str | None = None) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name} must be a string.")
    if not value and value != may_be:
        raise _wrong(f"{where}.{name} is empty.")
    return value


def _is_text(content: Any) -> bool:
    """Content that is taken, or none."""
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(
        isinstance(part, str)
        or (
            isinstance(part, dict)
            and part.get("type") in TEXTS
            and isinstance(part.get("text"), str)
            and part.get("prompt_cache_breakpoint") is None
        )
        for part in content
    )


def _plain(content: Any) -> str:
    """The text of content that _is_text."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    return content or ""


def _text_of(parts: object) -> str:
    """The text of a thought's parts."""
    if not isinstance(parts, list):
        return ""
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _wrong(what: str) -> RequestError:
    return RequestError(what, param="input")
