"""How a JSON text is built, told from its bytes: how deep, of how many values. It does not know fields.

What would take long to decode, or to walk over, is refused before any code does: a decoder holds the interpreter lock,
and with it the event loop, for as long as it makes objects. Nothing here holds it for more than a millisecond or two.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.errors import RequestError

MAX_DEPTH = 100
MAX_FIELDS = 256
MAX_CONTAINERS = 65536
MAX_STRINGS = 131072
MAX_VALUES = 1 << 20
MAX_NUMBER = 512
SMALL_BYTES = 64 << 10
# What is over these is no quick body: it stands in line. Each earlier tool call of four brackets takes some 50 µs.
QUICK_BYTES = 8 << 10
QUICK_CONTAINERS = 128
# Of JSON in strings of a body, all of them together: each value is at least a token of the prompt.
MAX_INNER_VALUES = 131072
_SLICE_BYTES = 1 << 17
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_ESCAPED_BRACKET = re.compile(rb"\\u00[57][bB]")
_ENDS_NUMBER = np.zeros(256, bool)
_ENDS_NUMBER[list(b'[]{},:" \t\r\n')] = True


class Build(NamedTuple):
    """Of a valid JSON text; of another one, what stands in front of its first fault.

    depth    levels of arrays and objects.     containers   arrays and objects.    strings   keys among them.
    fields   of the outermost object.          values       beside others in an array or object.
    number   characters of the longest number or word.
    """

    depth: int
    containers: int
    strings: int
    fields: int
    values: int
    number: int


def is_quick(raw: bytes | bytearray) -> bool:
    """Whether it is decoded, understood and rendered within 2 ms or so, all JSON within its strings too."""
    if len(raw) > QUICK_BYTES:
        return False
    return raw.count(b"[") + raw.count(b"{") + len(_ESCAPED_BRACKET.findall(raw)) <= QUICK_CONTAINERS


def depth_of(raw: bytes, enough: int = MAX_DEPTH) -> int:
    """Levels of arrays and objects in a valid JSON text; of one with at most ``enough`` brackets, how many it has."""
    num_brackets = raw.count(b"[") + raw.count(b"{")
    return num_brackets if num_brackets <= enough else build_of(raw).depth


def build_of(raw: bytes) -> Build:
    """Some 10 ns a byte, slice by slice, so that other threads have their turn."""
    depth = deepest = containers = quotes = fields = values = longest = run = 0
    in_string, start = False, 0
    while start < len(raw):
        end = start + _SLICE_BYTES
        if end < len(raw):  # an escaped character is not cut in two
            piece = raw[start:end]
            end -= (len(piece) - len(piece.rstrip(b"\\"))) % 2
        # Backslashes stand in strings only. Without escaped ones each quote begins or ends a string.
        text = np.frombuffer(raw[start:end].replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        start = end
        if not len(text):
            continue
        quote = text == ord('"')
        inside = np.bitwise_xor.accumulate(quote.view(np.uint8)).view(bool)
        inside ^= in_string
        in_string = bool(inside[-1])
        steps = _STEPS[text]
        steps[inside] = 0
        depths = np.cumsum(steps, dtype=np.int32)
        depths += depth
        depth, deepest = int(depths[-1]), max(deepest, int(depths.max()))
        containers += int((steps > 0).sum())
        quotes += int(quote.sum())
        commas = (text == ord(",")) & ~inside
        values += int(commas.sum())
        fields += int((commas & (depths == 1)).sum())
        ends = np.flatnonzero(inside | _ENDS_NUMBER[text])
        if len(ends):
            longest = max(longest, run + int(ends[0]), int(np.diff(ends).max(initial=1)) - 1)
            run = len(text) - 1 - int(ends[-1])
        else:
            run += len(text)
    return Build(deepest, containers, quotes // 2, fields + 1, values + 1, max(longest, run))


def check_build(raw: bytes, what: str = "the body", param: str | None = None, max_fields: int = MAX_FIELDS) -> None:
    """Raise RequestError for what would take long to decode."""
    found = build_of(raw)
    if found.depth > MAX_DEPTH:
        raise too_deep(what, param)
    limits = {
        "fields": (found.fields, max_fields),
        "arrays and objects": (found.containers, MAX_CONTAINERS),
        "strings": (found.strings, MAX_STRINGS),
        "values": (found.values, MAX_VALUES),
        "characters in a number": (found.number, MAX_NUMBER),
    }
    for kind, (number, most) in limits.items():
        if number > most:
            raise RequestError(f"{what} has {number} {kind}; the limit is {most}.", param=param)


def check_inner(texts: Sequence[str], what: str, param: str, hint: str) -> None:
    """Raise RequestError for JSON texts that would take long to decode and to walk over, all of them together."""
    containers = strings = values = 0
    for text in texts:
        if len(text) > SMALL_BYTES:
            found = build_of(text.encode("utf-8", "replace"))
            containers, strings, values = containers + found.containers, strings + found.strings, values + found.values
        else:
            bare, num_strings = _STRING.subn("", text)
            containers += bare.count("[") + bare.count("{")
            strings += num_strings
            values += bare.count(",") + 1
    limits = {
        "arrays and objects": (containers, MAX_CONTAINERS), "strings": (strings, MAX_STRINGS),
        "values": (values, MAX_INNER_VALUES),
    }  # fmt: skip
    for kind, (number, most) in limits.items():
        if number > most:
            raise RequestError(f"{what} {number} {kind} together; the limit is {most}.", param=param, hint=hint)


def too_deep(what: str = "the body", param: str | None = None) -> RequestError:
    return RequestError(f"{what} is nested too deep; the limit is {MAX_DEPTH} levels.", param=param)
