"""From an answer's text to its pieces: content, reasoning, tool calls. It does not know tokens or HTTP.

text ──► Reasoning ──► outside of <think>…</think> ──► Calls ──► outside of a call: content
             │                                           └─────► inside: name, arguments as they come
             └──► inside: reasoning

However a text is cut into pieces on its way here, the joined results are the same: what a decision needs is held
back until it has come, whitespace beside a mark for one.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Protocol

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_HALF_PAIR = re.compile("[\ud800-\udfff]")


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
    """What one delta carries; at most one of the three is set.

    behind   characters that had come, and stand behind this content or reasoning, which is text as it was written.
    """

    content: str = ""
    reasoning: str = ""
    tool: ToolPiece | None = None
    behind: int = field(default=0, compare=False)


class AnswerParser(Protocol):
    """Fed the text of one answer as it comes; gives pieces as soon as they are certain.

    in_call     the last call that was given is not whole.
    cut_short   a call was begun and did not come to its end, when the text has.
    open_kind   of what was begun and may go on: "thought", "call", or "mark" for half a mark; else None.
    """

    @property
    def in_call(self) -> bool: ...

    @property
    def cut_short(self) -> bool: ...

    @property
    def open_kind(self) -> str | None: ...

    def feed(self, text: str, *, final: bool) -> list[Piece]: ...


def hold_back(text: str, mark: str) -> int:
    """How many characters at the end of text may be the beginning of mark."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


def space_before(text: str, end: int) -> int:
    """Where the whitespace begins that reaches up to end."""
    return len(text[:end].rstrip())


def well_formed(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair: JSON may name one alone, and no text can hold it."""
    return _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)


class Reasoning:
    """Parts text at <think> and </think>, without the whitespace beside them.

    inside   the prompt ended within a thought already. Else a thought is one only if the answer begins with it.
    then     parses what is not reasoning; None: it is content.
    """

    def __init__(self, then: AnswerParser | None, *, inside: bool) -> None:
        self._then = then
        self._buffer = ""
        self._state = self._inside if inside else self._start
        self._begun = False

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._state(pieces, final):
            pass
        if final and self._then is not None:
            pieces += self._then.feed("", final=True)
        return pieces

    @property
    def in_call(self) -> bool:
        return self._then is not None and self._then.in_call

    @property
    def cut_short(self) -> bool:
        return self._then is not None and self._then.cut_short

    @property
    def open_kind(self) -> str | None:
        if self._state == self._start and self._buffer.strip():
            return "mark"
        if self._state == self._inside:
            return "thought"
        return None if self._then is None else self._then.open_kind

    def _start(self, pieces: list[Piece], final: bool) -> bool:
        begin = self._buffer.lstrip()
        if begin.startswith(THINK_OPEN):
            self._buffer, self._state = begin[len(THINK_OPEN) :], self._inside
            return True
        if final or not THINK_OPEN.startswith(begin):
            self._state = self._outside
            return True
        return False

    def _inside(self, pieces: list[Piece], final: bool) -> bool:
        if not self._begun:
            self._buffer = self._buffer.lstrip()
        before, found, after = self._buffer.partition(THINK_CLOSE)
        end = len(before) if found or final else len(before) - hold_back(before, THINK_CLOSE)
        if found or not final:
            end = space_before(before, end)
        if end:
            self._begun = True
            pieces.append(Piece(reasoning=before[:end], behind=len(self._buffer) - end))
        self._buffer = after if found else before[end:]
        if found:
            self._state = self._behind
        return bool(found)

    def _behind(self, pieces: list[Piece], final: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._outside
        return bool(self._buffer)

    def _outside(self, pieces: list[Piece], final: bool) -> bool:
        text, self._buffer = self._buffer, ""
        if text:
            pieces += [Piece(content=text)] if self._then is None else self._then.feed(text, final=False)
        return False
