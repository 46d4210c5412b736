"""Answers that go on with text of the prompt (continue_final_message). It knows parsers; it does not know templates.

    prompt … <think>I begin            answer  to see.</think>Yes.     thought " to see.", content "Yes."
    prompt … <tool_call>{"name": "f",  answer  "arguments": {}}        the call f, whole

What the prompt holds is parsed as the answer's begin, and not given again; of a call all is given, for half of one is
of no use.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

from tandem.errors import RequestError
from tandem.serve.calls import new_identity
from tandem.serve.parse import THINK_OPEN, AnswerParser, Piece

MAX_SAID = 65_536  # characters: parsing many calls or what looks like some takes more than their length


class Continued:
    """A parser that has been fed what the prompt holds already. shared: what its copies hold in common."""

    def __init__(self, parser: AnswerParser, said: str, shared: object) -> None:
        self._parser, self._shared = parser, shared
        self._num_said = self._num_come = len(said)
        tools = [piece for piece in parser.feed(said, final=False) if piece.tool is not None]
        num_calls = 1 + max((piece.tool.index for piece in tools if piece.tool is not None), default=-1)
        self._first_index = num_calls - parser.in_call
        self._begun = [piece for piece in tools if piece.tool is not None and piece.tool.index >= self._first_index]

    def copy(self) -> "Continued":
        """The same for another answer, whose call is another one."""
        copy = deepcopy(self, {id(self._shared): self._shared})
        for piece in copy._begun:
            if piece.tool is not None and piece.tool.id:
                piece.tool.id = new_identity()
        return copy

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        self._num_come += len(text)
        pieces, self._begun = [*self._begun, *self._parser.feed(text, final=final)], []
        return [given for piece in pieces if (given := self._given(piece)) is not None]

    @property
    def in_call(self) -> bool:
        return self._parser.in_call

    @property
    def cut_short(self) -> bool:
        return self._parser.cut_short

    @property
    def open_kind(self) -> str | None:
        return self._parser.open_kind

    def _given(self, piece: Piece) -> Piece | None:
        """Without what stands in the prompt: a piece tells where it ends."""
        if piece.tool is not None:
            return Piece(tool=replace(piece.tool, index=piece.tool.index - self._first_index))
        text = piece.content or piece.reasoning
        begin = self._num_come - piece.behind - len(text)
        text = text[max(0, self._num_said - begin) :]
        if not text:
            return None
        return replace(piece, content=text) if piece.content else replace(piece, reasoning=text)


def continued(
    make: Callable[[], AnswerParser], said: str, *, is_governed: bool, shared: object = None
) -> Continued | None:
    """What goes on with the text that was said; None: nothing there is open, the answer stands for itself.

    make          makes a parser of an answer's begin.     shared   see Continued.
    is_governed   a grammar governs calls, from the answer's begin on.
    Raises RequestError: it is too long, or ends within a call, or a mark, that a grammar could not go on with.
    """
    if len(said) > MAX_SAID:
        raise RequestError(
            f"the final message to be continued has {len(said):,} characters; where calls or thoughts are told from "
            f"content the limit is {MAX_SAID:,}.",
            param="continue_final_message", code="unsupported_value",
            hint="continue a shorter message, or leave out tools.",
        )  # fmt: skip
    found = Continued(make(), said, shared)
    if found.open_kind is None:
        return None
    if found.open_kind in ("call", "mark") and is_governed:
        raise RequestError(
            "the final message ends within a tool call or half a mark, and a grammar governs this answer's calls from "
            "their begin.",
            param="continue_final_message", code="unsupported_value",
            hint="end the message in front of it; or use tools without strict and tool_choice auto (the call "
            "goes on), or none (it is text).",
        )  # fmt: skip
    return found


def said_in(end: str, content: str) -> str:
    """What of the final message the prompt ends with, as its template wrote it. end: the prompt's, no shorter."""
    core = content.strip()
    place = end.rfind(core) if core else -1
    if place < 0:
        return content
    opened = THINK_OPEN if end[:place].rstrip().endswith(THINK_OPEN) else ""
    return opened + end[place:]
