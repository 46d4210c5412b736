"""One tool call's JSON object while it comes, character by character. It does not know which family wrote it."""

import json
import re

from tandem.serve.parse import well_formed

ARGUMENT_KEYS = ("arguments", "parameters")
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# At the end: half a pair, and what may become half of one.
_OPEN = (
    r"(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?"
    r"|\\(?:u(?:[dD](?:[89a-fA-F][0-9a-fA-F]?)?)?)?)\Z"
)
_HALF = r"(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
_ESCAPE = re.compile(rf"{_PAIR}|(?P<open>{_OPEN})|{_HALF}|\\.", re.DOTALL)
_LAST_ESCAPE = re.compile(rf"{_PAIR}|{_HALF}|\\.", re.DOTALL)


class CallText:
    """One call's JSON object as it comes: where its name and its arguments are, and whether it is complete.

    name   given: the object holds the arguments alone.
    """

    def __init__(self, name: str | None = None) -> None:
        self.text = ""
        self.name = name
        self.complete = self.announced = self.closed = False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._string_start = 0
        self._key: str | None = None
        self._expects_value = False
        self._arguments: tuple[int, int | None] | None = (0, None) if name is not None else None
        self.is_bare = name is not None
        self._given = 0

    def feed(self, text: str) -> int:
        """Scan characters until the object closes. Returns how many were taken."""
        start = len(self.text)
        self.text += text
        for i, character in enumerate(text):
            self._scan(start + i, character)
            if self.complete:
                self.text = self.text[: start + i + 1]
                return i + 1
        return len(text)

    def fresh_arguments(self, *, final: bool) -> str:
        """Text of the arguments that was not given before; final: no more comes. Arguments written as a string come
        when it has ended.

        Escapes of half a surrogate pair are given as those of U+FFFD: no text could hold the value of such JSON.
        """
        start, end = self._arguments or (0, 0)
        known = self.text[start:end]
        if known.startswith('"'):
            known = _unquoted(known) if end is not None else ""
        if self.complete and not known.strip():
            known = "{}"
        fresh = _with_whole_pairs(known[self._given :], final=final or end is not None)
        self._given += len(fresh)
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
            if self._key in ARGUMENT_KEYS and self._arguments is None:
                self._arguments = (at, None)
        if character == '"':
            self._in_string, self._string_start = True, at
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._close(at)
        elif self._depth == 1 and character == ":":
            self._expects_value = True
        elif self._depth == 1 and character == "," and not self.is_bare:
            self._end_value(at)
            self._key = None

    def _close(self, at: int) -> None:
        if self._depth == 1:
            self._end_value(at + 1 if self.is_bare else at)
        self._depth -= 1
        if self._depth == 1 and not self.is_bare:
            self._end_value(at + 1)
        self.complete = self._depth == 0

    def _end_string(self, at: int) -> None:
        try:
            value = json.loads(self.text[self._string_start : at + 1])
        except ValueError:
            return
        if self._key is None:
            self._key = value
        elif self._key == "name" and self.name is None:
            self.name = value

    def _end_value(self, at: int) -> None:
        if self._arguments is not None and self._arguments[1] is None:
            self._arguments = (self._arguments[0], at)


def _unquoted(text: str) -> str:
    try:
        return well_formed(str(json.loads(text.strip())))
    except ValueError:
        return text


def _with_whole_pairs(text: str, *, final: bool) -> str:
    """JSON, or a part of it that begins at no escape's inside, with U+FFFD for half pairs, of the same length.

    What may be half of one is left out at the end, unless final.
    """
    if "\\" not in text:
        return text
    pieces, at = [], 0
    for escape in (_LAST_ESCAPE if final else _ESCAPE).finditer(text):
        kind = escape.lastgroup
        if kind is None:
            continue
        pieces.append(text[at : escape.start()])
        if kind == "open":
            return "".join(pieces)
        pieces.append("\\ufffd")
        at = escape.end()
    return "".join((*pieces, text[at:]))
