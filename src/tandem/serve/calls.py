"""Tool calls in an answer's text, in the ways that model families write them. It knows neither tokens nor HTTP.

    Hermes, Qwen   text <tool_call>{"name": …, "arguments": {…}}</tool_call> …
    Qwen3-Coder    text <tool_call><function=…><parameter=…>…</parameter>…</function></tool_call> …
    Mistral        text [TOOL_CALLS][{"name": …, "arguments": {…}}, …]     or  [TOOL_CALLS]name[ARGS]{…}
    Llama 3        {"name": …, "parameters": {…}}; {…}                     the whole answer, or none of it

A call of a name that was not offered, or that is no JSON, is given as content, as it was written; beside others of a
list or a row its JSON alone is, without their marks. A call is given from its first argument on: one that is cut short
before that is given as nothing.
"""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.serve.call_text import CallText
from tandem.serve.parse import Piece, ToolPiece, hold_back, space_before
from tandem.serve.tagged_call import FUNCTION, MAX_NAME, TaggedCall
from tandem.serve.value_kinds import ValueKinds

_ALPHABET = string.ascii_letters + string.digits
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
MAX_HEAD = MAX_NAME + len(CALL_ID) + 64 + len(ARGS)  # a name, an identity and their marks


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes tool calls. opening "": the whole answer is calls if it begins with "{".

    arguments_key   as the family writes it; both keys are understood.
    is_list         between opening and closing stands a list of calls, or a name and arguments.
    is_tagged       a call's name and arguments stand between tags, see tagged_call.
    """

    opening: str
    closing: str
    arguments_key: str = "arguments"
    is_list: bool = False
    is_tagged: bool = False


HERMES = CallFormat("<tool_call>", "</tool_call>")
TAGGED = CallFormat("<tool_call>", "</tool_call>", is_tagged=True)
MISTRAL = CallFormat("[TOOL_CALLS]", "", is_list=True)
LLAMA = CallFormat("", "", arguments_key="parameters")


class Calls:
    """Parts text into content and tool calls of one format, without the whitespace beside calls.

    names    the tools that were offered.
    kinds    of the parameters of tools, by which values between tags are understood.
    single   only the first call is given, later ones are dropped.

    What a grammar governs is a call as soon as it begins as one, so what is none yet when the answer is cut short is no
    content either:
    governed   behind every opening.
    alone      in the whole answer, if it begins with one: a call does not stand beside text.
    forced     in the whole answer, which is a call of one of these.
    """

    def __init__(
        self, form: CallFormat, names: Sequence[str], *, single: bool = False, governed: bool = False,
        alone: bool = False, forced: Sequence[str] = (), kinds: ValueKinds | None = None,
    ) -> None:  # fmt: skip
        self._form, self._names, self._single = form, frozenset(names), single
        self._governed, self._alone, self._forced = governed, alone, tuple(forced)
        self._begin, self._kinds = "", kinds or ValueKinds({})
        self._in_rows = form.is_list or not form.opening
        self._separators = " \t\r\n,;" if self._in_rows else " \t\r\n"
        self._buffer = ""
        self._space = ""  # whitespace that belongs to content if content follows, and to nothing beside a call
        self._raw = ""  # what was written since the opening and is not known to be a call
        # Of what the opening began: a call was of an offered tool; the last was of none; where the first begins in
        # _raw, and the last ends, while none was of an offered tool.
        self._has_calls, self._is_strange, self._strange = False, False, (0, 0)
        self._state = self._outside if form.opening else self._start
        self._call: CallText | TaggedCall = CallText()
        self._number = 0
        self._cut = False  # a call was begun, and nothing of it given

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._state(pieces, final):
            pass
        if self._alone:
            self._begin = (self._begin + text).lstrip()[: len(self._form.opening)]
        if self._forced or (self._begin and self._form.opening.startswith(self._begin)):
            pieces = [piece for piece in pieces if piece.tool is not None]
        return pieces

    @property
    def in_call(self) -> bool:
        return self._call.announced and not self._call.complete

    @property
    def cut_short(self) -> bool:
        return self.in_call or self._cut

    @property
    def open_kind(self) -> str | None:
        if self._state == self._outside:  # half an opening is held back
            return "mark" if self._buffer else None
        return None if self._state in (self._start, self._rest, self._behind) else "call"

    def _start(self, pieces: list[Piece], final: bool) -> bool:
        """Llama: what the answer begins with decides."""
        begin = self._buffer.lstrip()
        if not begin and not final:
            return False
        if begin.startswith("{"):
            self._begin_call(CallText())
        else:
            self._state = self._rest
        return True

    def _rest(self, pieces: list[Piece], final: bool) -> bool:
        self._content(self._take(len(self._buffer)), pieces)
        return False

    def _outside(self, pieces: list[Piece], final: bool) -> bool:
        """Content, up to the next opening. Whitespace at its end is held back: a call may follow."""
        opening = self._form.opening
        at = self._buffer.find(opening)
        end = at if at >= 0 else len(self._buffer) - (0 if final else hold_back(self._buffer, opening))
        end_of_text = space_before(self._buffer, end)
        if end_of_text:
            self._content(self._take(end_of_text), pieces)
        self._space += self._take(end - end_of_text)
        if at >= 0:
            self._raw = self._take(len(opening))
            self._has_calls = self._is_strange = False
            self._state = self._opened
            return True
        if final:
            self._content("", pieces)
        return False

    def _opened(self, pieces: list[Piece], final: bool) -> bool:
        """Behind an opening: a call, a list of calls, a name, or something that is no call."""
        self._skip_space()
        if not self._buffer:
            return self._no_call(pieces, final) if final else False
        if self._buffer[0] == "{":
            self._begin_call(CallText())
            return True
        if self._form.is_tagged and FUNCTION.startswith(self._buffer[: len(FUNCTION)]):
            if len(self._buffer) >= len(FUNCTION):
                self._begin_call(TaggedCall(self._kinds))
                return True
            return self._no_call(pieces, final) if final else False
        if not self._form.is_list:
            return self._no_call(pieces, final)
        if self._buffer[0] == "[" and not ARGS.startswith(self._buffer[:6]):
            self._raw += self._take(1)
            self._state = self._between
            return True
        return self._named(pieces, final)

    def _named(self, pieces: list[Piece], final: bool) -> bool:
        head, found, _ = self._buffer.partition("{")
        if found and len(head) <= MAX_HEAD:
            self._raw += self._take(len(head))
            self._begin_call(CallText(head.partition(ARGS)[0].partition(CALL_ID)[0].strip()))
            return True
        return self._no_call(pieces, final) if final or len(head) > MAX_HEAD else False

    def _begin_call(self, call: CallText | TaggedCall) -> None:
        if not self._is_strange:
            self._strange = len(self._raw), len(self._raw)
        self._call, self._state = call, self._inside

    def _inside(self, pieces: list[Piece], final: bool) -> bool:
        call = self._call
        taken = self._take(call.feed(self._buffer))
        self._raw += taken
        dropped, offered = self._is_dropped, call.name in self._names
        if offered and not dropped:
            first, fresh = not call.announced, call.fresh_arguments(final=final)
            if fresh:
                self._set_apart(pieces)
                call.announced = True
                identity = new_identity() if first else ""
                pieces.append(Piece(tool=ToolPiece(self._number, identity, (call.name or "") if first else "", fresh)))
                self._raw = self._space = ""
        if not call.complete:
            if final and not call.announced and (offered or dropped):
                self._set_apart(pieces)
            if final and not call.announced and not dropped:
                self._cut = offered
                return self._no_call(pieces, final)
            return False
        if call.announced:
            self._number += 1
        elif not offered:
            self._state = self._no_call if call.closed else self._failed
            if self._in_rows and isinstance(call, CallText) and not call.is_bare:
                self._state = self._stranger
            return True
        self._set_apart(pieces)
        self._raw = ""
        self._state = self._behind if call.closed else self._between
        return True

    def _set_apart(self, pieces: list[Piece]) -> None:
        """A call of an offered tool: what stood in front of it in its row is content, without the row's marks."""
        if self._is_strange and not self._has_calls:
            begin, end = self._strange
            self._content("", pieces, len(self._raw))  # the space in front of the opening
            self._content(self._raw[begin:end], pieces, len(self._raw) - end)
        self._has_calls, self._is_strange = True, False

    def _stranger(self, pieces: list[Piece], final: bool) -> bool:
        """Behind a call of a row that is none of ours: others of the row may be. A row that began without a mark is
        content as it comes: an answer of JSON lines."""
        if self._has_calls or not (self._form.opening or self._governed):
            self._content(self._raw, pieces)
            self._raw = ""
        self._is_strange, self._strange = True, (self._strange[0], len(self._raw))
        self._state = self._between
        return True

    def _failed(self, pieces: list[Piece], final: bool) -> bool:
        """Behind a call that is none of ours: its closing is content as well."""
        closing = self._form.closing
        rest = self._buffer.lstrip()
        if closing and not final and closing.startswith(rest[: len(closing)]) and len(rest) < len(closing):
            return False
        if closing and rest.startswith(closing):
            self._raw += self._take(len(self._buffer) - len(rest) + len(closing))
        return self._no_call(pieces, final)

    def _between(self, pieces: list[Piece], final: bool) -> bool:
        """Behind a call: another one, the closing, or content again."""
        rest = self._buffer.lstrip(self._separators)
        self._raw += self._take(len(self._buffer) - len(rest))
        closing = "]" if self._form.is_list else self._form.closing
        is_call = self._has_calls and not self._is_strange
        if not self._buffer:
            return self._no_call(pieces, final) if final and not is_call else False
        if self._buffer[0] == "{" and self._in_rows:
            self._raw = "" if is_call else self._raw
            self._begin_call(CallText())
            return True
        if closing and len(self._buffer) < len(closing) and closing.startswith(self._buffer):
            self._buffer = "" if final else self._buffer
            return False
        if closing and self._buffer.startswith(closing):
            mark = self._take(len(closing))
            self._raw, is_call = "" if self._has_calls else self._raw + mark, not self._is_strange
        if not is_call:
            return self._no_call(pieces, final)
        self._raw = ""
        self._state = self._behind if self._form.opening else self._rest
        return True

    def _behind(self, pieces: list[Piece], final: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._outside
        return bool(self._buffer)

    def _no_call(self, pieces: list[Piece], final: bool) -> bool:
        """What was written since the opening is content; go on behind it."""
        raw, self._raw = self._raw, ""
        if self._governed:  # cut short, or it would be a call
            self._cut = not self._is_dropped
        if self._cut:
            self._state = self._silent
            return True
        self._content(raw, pieces)
        self._state = self._outside if self._form.opening else self._rest
        return True

    def _silent(self, pieces: list[Piece], final: bool) -> bool:
        """Behind a call that was cut: nothing is content any more."""
        self._buffer = ""
        return False

    @property
    def _is_dropped(self) -> bool:
        return self._single and self._number > 0

    def _skip_space(self) -> None:
        self._raw += self._take(len(self._buffer) - len(self._buffer.lstrip()))

    def _take(self, size: int) -> str:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _content(self, text: str, pieces: list[Piece], num_behind: int = 0) -> None:
        """num_behind: characters behind it that are no longer in the buffer."""
        text, self._space = self._space + text, ""
        if text:
            pieces.append(Piece(content=text, behind=num_behind + len(self._buffer)))


def new_identity() -> str:
    """Nine letters and digits: Mistral's templates take no other ids, and nobody else looks at their form."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))
