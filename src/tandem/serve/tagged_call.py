"""One tool call between tags, as Qwen3-Coder writes it, read as it comes. It knows neither what stands around nor HTTP.

    <function=NAME> <parameter=KEY> VALUE </parameter> … </function>

Values are text between their tags, a newline beside each. What the tool's schema says is no string is JSON, or Python's
word for it; what is no such value stays a string.
"""

import json
import re
from typing import Any

from tandem.engine.earlier_calls import json_number
from tandem.serve.parse import well_formed
from tandem.serve.value_kinds import KINDS, ValueKinds

MAX_NAME = 256
FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_PARAMETER, END_OF_FUNCTION, END_OF_CALL = "</parameter>", "</function>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_TAGS = (PARAMETER, END_OF_FUNCTION, END_OF_CALL)
_LONGEST_TAG = max(map(len, _TAGS))
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_EXACT = 2**53


class TaggedCall:
    """Reads a call that begins with <function=. Arguments come a parameter at a time, as the JSON text of an object.

    kinds    of values, by tool and parameter, as far as known.
    closed   it ended with </tool_call>, without an end of the function: that tag was taken as well.
    """

    def __init__(self, kinds: ValueKinds) -> None:
        self.name: str | None = None
        self.complete = self.announced = self.closed = False
        self._kinds = kinds
        self._text, self._at, self._searched = "", 0, 0
        self._keys: set[str] = set()
        self._fresh = ""

    def feed(self, text: str) -> int:
        """Read on, up to the call's end. Returns how many characters were taken."""
        self._text += text
        while not self.complete and self._step():
            pass
        taken = len(text) - (len(self._text) - self._at) if self.complete else len(text)
        assert 0 <= taken <= len(text), "a call ends in the text that ends it"
        return taken

    def fresh_arguments(self, *, final: bool) -> str:
        """JSON that was not given before. final changes nothing: parameters are given whole."""
        fresh, self._fresh = self._fresh, ""
        return fresh

    def _step(self) -> bool:
        """Read one tag, if all of it has come."""
        if self.name is None:
            return self._head()
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        if self._text.startswith(PARAMETER, self._at):
            return self._parameter()
        for end in (END_OF_FUNCTION, END_OF_CALL):
            if self._text.startswith(end, self._at):
                self._at += len(end)
                self._fresh += "}" if self._keys else "{}"
                self.complete, self.closed = True, end == END_OF_CALL
                return True
        rest = self._text[self._at : self._at + _LONGEST_TAG]
        if any(tag.startswith(rest) for tag in _TAGS):
            return False
        place = self._text.find("<", self._at + 1)  # no tag: left out
        self._at = place if place >= 0 else len(self._text)
        return place >= 0

    def _head(self) -> bool:
        end = self._text.find(">")
        name = self._text[len(FUNCTION) : end if end >= 0 else None]
        if len(name) > MAX_NAME:  # no call of ours; it ends at the same place however it was cut
            self._at, self.complete = len(FUNCTION) + MAX_NAME + 1, True
        elif end >= 0:
            self.name, self._at = name.strip(), end + 1
        return self.name is not None

    def _parameter(self) -> bool:
        begin = self._at
        end_of_key = self._text.find(">", begin)
        if end_of_key < 0:
            return False
        end = self._text.find(END_OF_PARAMETER, max(end_of_key + 1, self._searched))
        if end < 0:
            self._searched = max(0, len(self._text) - len(END_OF_PARAMETER))
            return False
        key = self._text[begin + len(PARAMETER) : end_of_key].strip()
        value = self._text[end_of_key + 1 : end].removeprefix("\n").removesuffix("\n")
        self._at = end + len(END_OF_PARAMETER)
        if key not in self._keys:
            written = self._written(key, value)
            self._fresh += f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: {written}"
            self._keys.add(key)
        return True

    def _written(self, key: str, text: str) -> str:
        """A value as JSON: what its schema's types allow, else the text as a string."""
        kinds = self._kinds.of(self.name or "", key)
        if kinds:
            try:
                return well_formed(json.dumps(_value(text, kinds), ensure_ascii=False))
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)


def _value(text: str, kinds: frozenset[str]) -> Any:
    """Raises ValueError or RecursionError for what is no JSON, or none that could be written again."""
    word = text.strip()
    value: Any = _WORDS.get(word.lower(), _WORDS)
    if value is _WORDS:
        value = json.loads(word, parse_constant=_no_constant, parse_float=json_number)
    kind = KINDS[type(value)]
    if kind == "number" and "number" not in kinds and "integer" in kinds and value.is_integer():  # 5.0 is an integer
        kind, value = "integer", int(value) if abs(value) < _EXACT else value
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    if kind == "null" or "string" not in kinds:
        return value if fits else text
    return text


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
