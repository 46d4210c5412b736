"""From an answer's text to its pieces: content, reasoning, tool calls. It does not know tokens or HTTP.

text ──► Reasoning ──► outside of <think>…</think> ──► Calls ──► outside of a call: content
             │                                           └─────► inside: name, arguments as they come
             └──► inside: reasoning
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(slots=True)
class ToolPiece:
    """Part of a tool call: the first of an index has id and name, the rest only more of the arguments' JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def as_delta(self) -> dict[str, Any]:
        if not self.id:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}

    def add_to(self, calls: dict[int, dict[str, Any]]) -> None:
        """Fold this piece into complete tool calls by index."""
        if self.index not in calls:
            calls[self.index] = {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": ""}}
        calls[self.index]["function"]["arguments"] += self.arguments


@dataclass(slots=True)
class Piece:
    """What one delta carries; at most one of the three is set."""

    content: str = ""
    reasoning: str = ""
    tool: ToolPiece | None = None


class AnswerParser(Protocol):
    """Fed the text of one answer as it comes; gives pieces as soon as they are certain."""

    def feed(self, text: str, *, final: bool) -> list[Piece]: ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes tool calls. opening "": the whole answer is one call if it begins with "{".

    is_list  between opening and closing stands a list of calls.
    """

    opening: str
    closing: str
    arguments_key: str = "arguments"
    is_list: bool = False


HERMES = CallFormat("<tool_call>", "</tool_call>")
MISTRAL = CallFormat("[TOOL_CALLS]", "", is_list=True)
LLAMA = CallFormat("", "", arguments_key="parameters")


def hold_back(text: str, mark: str) -> int:
    """How many characters at the end of text may be the beginning of mark."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


class Reasoning:
    """Parts text at <think> and </think>. inside: the prompt ended within a thought already."""

    def __init__(self, then: AnswerParser | None, *, inside: bool) -> None:
        self._then, self._inside = then, inside
        self._buffer = ""
        self._begun = inside

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            mark = THINK_CLOSE if self._inside else THINK_OPEN
            before, found, after = self._buffer.partition(mark)
            if not found or (not self._inside and self._begun):
                break
            self._give(before.rstrip("\n") if self._inside else before.lstrip(), pieces)
            self._begun = True
            self._inside = not self._inside
            self._buffer = after.lstrip("\n")
        held = 0 if final or (self._begun and not self._inside) else hold_back(self._buffer, mark)
        self._give(self._buffer[: len(self._buffer) - held], pieces)
        self._buffer = self._buffer[len(self._buffer) - held :]
        if final and self._then is not None:
            pieces += self._then.feed("", final=True)
        return pieces

    def _give(self, text: str, pieces: list[Piece]) -> None:
        if self._inside:
            if text:
                pieces.append(Piece(reasoning=text))
        elif self._then is not None:
            pieces += self._then.feed(text, final=False)
        elif text:
            pieces.append(Piece(content=text))


class Calls:
    """Parts text into content and tool calls of one format; names outside ``names`` are given as content."""

    def __init__(self, form: CallFormat, names: Sequence[str], *, single: bool = False) -> None:
        self._form, self._names, self._single = form, frozenset(names), single
        self._buffer = ""
        self._call: _Call | None = None
        self._inside = False
        self._seen_content = False
        self._number = 0

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._advance(pieces, final):
            pass
        return pieces

    def _advance(self, pieces: list[Piece], final: bool) -> bool:
        """One step of the machine. Returns whether another may follow on what is buffered."""
        if self._call is not None:
            return self._inside_call(pieces, final)
        if self._inside:
            return self._between_calls(pieces)
        return self._outside(pieces, final)

    def _outside(self, pieces: list[Piece], final: bool) -> bool:
        opening = self._form.opening
        if not opening:
            stripped = self._buffer.lstrip()
            if not self._seen_content and not stripped and not final:
                return False
            if not self._seen_content and stripped.startswith("{"):
                self._buffer, self._inside = stripped, True
                return True
            self._content(self._buffer, pieces)
            self._buffer = ""
            return False
        before, found, after = self._buffer.partition(opening)
        if found:
            self._content(before.rstrip(), pieces)
            self._buffer, self._inside = after, True
            return True
        held = 0 if final else max(hold_back(self._buffer, opening), len(self._buffer) - len(self._buffer.rstrip()))
        self._content(self._buffer[: len(self._buffer) - held], pieces)
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _between_calls(self, pieces: list[Piece]) -> bool:
        self._buffer = self._buffer.lstrip(" \n\t\r,;[" if self._form.is_list or not self._form.opening else " \n\t\r")
        if self._buffer.startswith("{"):
            self._call = _Call(self._form.arguments_key)
            return True
        if self._form.closing and self._buffer.startswith(self._form.closing):
            self._buffer, self._inside = self._buffer[len(self._form.closing) :], False
            return True
        if self._form.is_list and self._buffer.startswith("]"):
            self._buffer, self._inside = self._buffer[1:], False
        return False

    def _inside_call(self, pieces: list[Piece], final: bool) -> bool:
        call = self._call
        assert call is not None
        taken = call.feed(self._buffer)
        self._buffer = self._buffer[taken:]
        if call.name is not None and call.name in self._names and not (self._single and self._number):
            first = not call.announced
            fresh = call.fresh_arguments()
            if first or fresh:
                call.announced = True
                identity = f"call_{uuid.uuid4().hex[:24]}" if first else ""
                pieces.append(Piece(tool=ToolPiece(self._number, identity, call.name if first else "", fresh)))
        if not call.complete:
            if final and not call.announced:
                self._content(self._form.opening + call.text, pieces)
            return False
        if call.announced:
            self._number += 1
        elif not (self._single and self._number):
            self._content(self._form.opening + call.text + self._form.closing, pieces)
        self._call = None
        return True

    def _content(self, text: str, pieces: list[Piece]) -> None:
        if text:
            self._seen_content = True
            pieces.append(Piece(content=text))


class _Call:
    """One call's JSON object as it comes: where its name and its arguments are, and whether it is complete."""

    def __init__(self, arguments_key: str) -> None:
        self.text = ""
        self.name: str | None = None
        self.complete = self.announced = False
        self._arguments_key = arguments_key
        self._depth, self._in_string, self._escaped = 0, False, False
        self._string_start = self._value_start = 0
        self._key: str | None = None
        self._expects_value = False
        self._arguments: tuple[int, int | None] | None = None
        self._given = 0

    def feed(self, text: str) -> int:
        """Scan characters until the object closes. Returns how many were taken."""
        start = len(self.text)
        for i, character in enumerate(text):
            self.text += character
            self._scan(start + i, character)
            if self.complete:
                return i + 1
        return len(text)

    def fresh_arguments(self) -> str:
        """Text of the arguments that was not given before."""
        if self._arguments is None:
            return "{}" if self.complete and not self.announced else ""
        start, end = self._arguments
        known = self.text[start : len(self.text) if end is None else end]
        fresh, self._given = known[self._given :], len(known)
        return fresh

    def _scan(self, at: int, character: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 1:
                    self._end_string(at)
            return
        if self._depth == 1 and self._expects_value and not character.isspace():
            self._expects_value = False
            if self._key == self._arguments_key:
                self._arguments = (at, None)
        if character == '"':
            self._in_string, self._string_start = True, at
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            if self._depth == 1:
                self._end_value(at)
            self._depth -= 1
            if self._depth == 1:
                self._end_value(at + 1)
            self.complete = self._depth == 0
        elif self._depth == 1 and character == ":":
            self._expects_value = True
        elif self._depth == 1 and character == ",":
            self._end_value(at)
            self._key = None

    def _end_string(self, at: int) -> None:
        try:
            value = json.loads(self.text[self._string_start : at + 1])
        except ValueError:
            return
        if self._key is None:
            self._key = value
        elif self._key == "name":
            self.name = value

    def _end_value(self, at: int) -> None:
        if self._arguments is not None and self._arguments[1] is None:
            self._arguments = (self._arguments[0], at)
