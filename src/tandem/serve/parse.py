"""From an answer's text to its pieces: content, reasoning, tool calls. It does not know tokens or HTTP."""

from dataclasses import dataclass
from typing import Any, Protocol


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
