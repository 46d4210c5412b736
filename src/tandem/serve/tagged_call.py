"""One tool call between tags, as Qwen3-Coder writes it, read as it comes. It knows neither what stands around nor HTTP.

    <function=NAME> <parameter=KEY> VALUE </parameter> … </function>

Values are text between their tags, a newline beside each. What the tool's schema says is no string is JSON, or Python's
word for it; what is no such value stays a string.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_NAME = 256
FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_PARAMETER, END_OF_FUNCTION, END_OF_CALL = "</parameter>", "</function>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_TAGS = (PARAMETER, END_OF_FUNCTION, END_OF_CALL)
_KINDS: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class TaggedCall:
    """Reads a call that begins with <function=. Arguments come a parameter at a time, as the JSON text of an object.

    schemas   parameters of each tool by its name, as far as known.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.name: str | None = None
        self.complete = self.announced = False
        self._schemas = schemas
        self._text, self._at, self._searched = "", 0, 0
        self._keys: set[str] = set()
        self._fresh = ""

    def feed(self, text: str) -> int:
        """Read on, up to the call's end. Returns how many characters were taken."""
        self._text += text
        while not self.complete and self._step():
            pass
        return len(text) - (len(self._text) - self._at) if self.complete else len(text)

    def fresh_arguments(self) -> str:
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
                self._at += len(end) if end == END_OF_FUNCTION else 0
                self._fresh += "}" if self._keys else "{}"
                self.complete = True
                return True
        rest = self._text[self._at : self._at + len(END_OF_FUNCTION)]
        if any(tag.startswith(rest) for tag in _TAGS):
            return False
        place = self._text.find("<", self._at + 1)  # no tag: left out
        self._at = place if place >= 0 else len(self._text)
        return place >= 0

    def _head(self) -> bool:
        end = self._text.find(">")
        name = self._text[len(FUNCTION) : end if end >= 0 else None]
        if len(name) > MAX_NAME:  # no call of ours
            self._at, self.complete = len(self._text), True
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
            written = json.dumps(self._value(key, value), ensure_ascii=False)
            self._fresh += f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: {written}"
            self._keys.add(key)
        return True

    def _value(self, key: str, text: str) -> Any:
        parameters = self._schemas.get(self.name or "", {})
        properties = parameters.get("properties")
        kinds = set(_kinds_of(properties.get(key) if isinstance(properties, Mapping) else None, parameters))
        if not kinds:
            return text
        word = text.strip()
        try:
            value = _WORDS[word.lower()] if word.lower() in _WORDS else json.loads(word, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return text
        kind = _KINDS[type(value)]
        fits = kind in kinds or (kind == "integer" and "number" in kinds)
        if kind == "null" or "string" not in kinds:
            return value if fits else text
        return text


def _kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """The JSON types that a schema speaks of."""
    if not isinstance(schema, Mapping) or depth > 8:
        return
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else [one for one in kind or () if isinstance(one, str)]
    if kind is None:
        values = schema.get("enum")
        for value in [*(values if isinstance(values, list) else ()), *([schema["const"]] if "const" in schema else ())]:
            yield _KINDS.get(type(value), "string")
    for word in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(word) or () if isinstance(schema.get(word), list) else ():
            yield from _kinds_of(inner, root, depth + 1)
    place = schema.get("$ref")
    if isinstance(place, str) and place.startswith("#/"):
        found: Any = root
        for part in place[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        yield from _kinds_of(found, root, depth + 1)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
