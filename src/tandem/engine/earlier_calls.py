"""Earlier tool calls, handed to a template as it takes them, which is tried out. It knows no template's text.

The API carries arguments as text. Some templates write them as JSON themselves or go over their names, and want the
object; others put them between texts, and want the text. Some write calls only where the message has no content, and
some take only ids of nine letters and digits, which other servers do not make. Some know calls, but no
results, and some one call a message.
"""

import base64
import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.engine.messages import Written, json_of, with_written_results
from tandem.errors import RequestError

MAX_LEVELS = 100
_TOO_DEEP = f"nested too deep (the limit is {MAX_LEVELS} levels)"
_SHORT = re.compile("[a-zA-Z0-9]{9}")
_CLOSING = {"{": "}", "[": "]"}
_MARKS = re.compile(r'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
# Behind whole escapes: half of a pair of surrogates, and half an escape.
_HALF = re.compile(r"(?<!\\)((?:\\\\)*+)(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")


class CallWay(NamedTuple):
    """How a template takes calls.

    as_text         arguments as text, always.
    takes_text      it writes arguments that are text as they stand; else it only takes objects.
    needs_nothing   it writes calls only of messages whose content is None.
    short_ids       it refuses ids but those of nine letters and digits.
    one_call        of a message's calls it takes one alone: each goes into a message of its own, its result behind it.
    by_user         it refuses results, or leaves them out: they are told as the user's, in the Hermes way.
    """

    as_text: bool = False
    takes_text: bool = True
    needs_nothing: bool = False
    short_ids: bool = False
    one_call: bool = False
    by_user: bool = False


Run = Callable[[list[dict[str, Any]]], str]


def way_of(run: Run, *, mentions: bool) -> CallWay | None:
    """The way in which a template writes calls, found by rendering some; None: it leaves them out.

    run        renders messages; raises RequestError if the template refuses them.
    mentions   its text speaks of calls, which decides if it refuses every trial.
    """
    refused, by_repr = True, None
    for needs_nothing in (False, True):
        for as_text in (False, True):
            way = CallWay(as_text, as_text, needs_nothing)
            name, value = (f"x{secrets.token_hex(8)}" for _ in range(2))
            whole: Any = {"x": value}
            rendered = _tried(run, _Talk(name, json.dumps(whole) if as_text else whole, way))
            refused = refused and rendered is None
            if rendered is None or name not in rendered or value not in rendered:
                continue
            if not as_text and str(whole) in rendered:  # as Python writes it: it wants text
                by_repr = by_repr or way
                continue
            if not as_text:
                cut = Written(f'{{"x": "{value}')
                way = way._replace(takes_text=cut in (_tried(run, _Talk(name, cut, way)) or ""))
            return _refined(run, way)
    return _refined(run, by_repr) if by_repr else (CallWay() if refused and mentions else None)


def _refined(run: Run, way: CallWay) -> CallWay:
    """The same way, with what else the template wants of calls and results."""
    talk = _Talk("x", "{}" if way.as_text else {}, way)
    long = talk._replace(identity=f"call_{secrets.token_hex(12)}")
    short_ids = any(
        _run(run, talk.messages(answered)) is not None and _run(run, long.messages(answered)) is None
        for answered in (False, True)
    )
    way = way._replace(short_ids=short_ids, one_call=not _takes_two(run, talk))
    result = f"x{secrets.token_hex(8)}"
    answered = talk._replace(result=result).messages(True)
    if result not in (_run(run, answered) or ""):
        way = way._replace(by_user=result in (_run(run, with_written_results(answered)) or ""))
    return way


def _takes_two(run: Run, talk: "_Talk") -> bool:
    """Whether it writes both calls of a message."""
    names = [f"x{secrets.token_hex(8)}" for _ in range(2)]
    first, second = (
        talk._replace(name=name, identity=f"call0000{place}").messages(True) for place, name in enumerate(names)
    )
    calling = {**first[1], "tool_calls": first[1]["tool_calls"] + second[1]["tool_calls"]}
    both = [first[0], calling, first[2], second[2]]
    return any(all(name in (_run(run, tried) or "") for name in names) for tried in (both[:2], both))


class _Talk(NamedTuple):
    """A conversation to try a template with: a call, and perhaps its result."""

    name: str
    arguments: Any
    way: CallWay
    identity: str = "call00001"
    result: str = "x"

    def messages(self, answered: bool) -> list[dict[str, Any]]:
        call = {"id": self.identity, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        content = None if self.way.needs_nothing else ""
        result = {"role": "tool", "tool_call_id": self.identity, "name": self.name, "content": self.result}
        return [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            *([result] if answered else []),
        ]


def _tried(run: Run, talk: _Talk) -> str | None:
    """What it makes of the call, or of the call and its result; None: it refuses both."""
    alone = _run(run, talk.messages(False))
    return alone if alone is not None else _run(run, talk.messages(True))


def _run(run: Run, messages: list[dict[str, Any]]) -> str | None:
    try:
        return run(messages)
    except RequestError:
        return None


def handed_over(messages: Sequence[dict[str, Any]], way: CallWay) -> list[dict[str, Any]]:
    """The messages with their calls as the template takes them. Raises RequestError for what it cannot take."""
    handed = list(_with_handed_calls(messages, way))
    if way.short_ids:
        handed = [_with_short_ids(message) for message in handed]
    if way.one_call:
        handed = _with_one_call_each(handed)
    return with_written_results(handed) if way.by_user else handed


def _with_handed_calls(messages: Sequence[dict[str, Any]], way: CallWay) -> Iterator[dict[str, Any]]:
    for place, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not calls:
            yield message
            continue
        if way.needs_nothing and message["content"]:
            yield {key: value for key, value in message.items() if key != "tool_calls"}
        where = f"messages[{place}].tool_calls"
        made = [_handed(call, f"{where}[{number}].function.arguments", way) for number, call in enumerate(calls)]
        yield {**message, "tool_calls": made, **({"content": None} if way.needs_nothing else {})}


def _with_one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call in a message of its own, with its results behind it; other results of the same turn come last."""
    split: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        results: dict[Any, list[dict[str, Any]]] = {}
        while place < len(messages) and messages[place]["role"] == "tool":
            results.setdefault(messages[place].get("tool_call_id"), []).append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            content = message["content"] if number == 0 or message["content"] is None else ""
            split += [{**message, "content": content, "tool_calls": [call]}, *results.pop(call.get("id"), ())]
        split += [result for left in results.values() for result in left]
    return split


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("tool_calls"):
        calls = [{**call, "id": _short(call["id"])} if call.get("id") else call for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    return {**message, "tool_call_id": _short(message["tool_call_id"])} if message.get("tool_call_id") else message


def _short(identity: str) -> str:
    """Nine letters and digits, always the same for an id, so that calls and results keep together."""
    if _SHORT.fullmatch(str(identity)):
        return identity
    digest = hashlib.sha256(str(identity).encode("utf-8", "replace")).digest()
    return base64.b32encode(digest).decode()[:9]


def _handed(call: dict[str, Any], where: str, way: CallWay) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        if _is_deep(arguments):
            raise RequestError(f"{where} is {_TOO_DEEP}.", param="messages")
        if not way.as_text:
            return call
        arguments = json_of(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        text = arguments or "{}"
        arguments = text if way.as_text else _object_of(text, where, way)
    else:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _object_of(text: str, where: str, way: CallWay) -> Any:
    value = arguments_of(text)
    if not isinstance(value, Mapping):
        if way.takes_text:
            return value
        value = {} if text.strip() == "null" else _begun(text)
    if value is None:
        why = _TOO_DEEP if _num_levels(text) > MAX_LEVELS else "which is no JSON object"
        raise RequestError(
            f"{where} is {text!r:.80}, {why}; this model's chat template writes arguments "
            "name by name.",
            param="messages", hint="send a JSON object, as '{\"city\": \"Rome\"}', or leave the call out.",
        )  # fmt: skip
    return _without_half_pairs(value) if _SURROGATE.search(text) else value


def _without_half_pairs(value: Any) -> Any:
    """The same with U+FFFD for each half of a surrogate pair: a model may name one alone, and no text can hold it."""
    if isinstance(value, str):
        return _HALF_PAIR.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {_without_half_pairs(name): _without_half_pairs(part) for name, part in value.items()}
    return [_without_half_pairs(part) for part in value] if isinstance(value, list) else value


def _num_levels(text: str) -> int:
    """Levels of arrays and objects of a JSON text; with at most MAX_LEVELS brackets how many there are."""
    depth = text.count("[") + text.count("{")
    if depth <= MAX_LEVELS:
        return depth
    depth = deepest = 0
    for mark in _MARKS.finditer(text):
        depth += (mark[0] in _CLOSING) - (mark[0] in "}]")
        deepest = max(deepest, depth)
    return deepest


def _is_deep(value: Any) -> bool:
    """Whether an object, which may hold itself, has more than MAX_LEVELS levels."""
    level = [value]
    for _ in range(MAX_LEVELS):
        parts = (part for whole in level for part in (whole.values() if isinstance(whole, Mapping) else whole))
        level = list({id(part): part for part in parts if isinstance(part, Mapping | list | tuple)}.values())
    return bool(level)


def arguments_of(text: str) -> Any:
    """The object. What is none, no JSON (a call that was cut short), nested deeper than MAX_LEVELS, or holds a number
    that no float can hold, stays the text that the model wrote."""
    if _num_levels(text) > MAX_LEVELS:
        return Written(text)

    def constant(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    try:
        value = json.loads(text or "{}", parse_constant=constant, parse_float=json_number)
    except (ValueError, RecursionError):
        return Written(text)
    return value if isinstance(value, dict) else Written(text)


def json_number(digits: str) -> float:
    """The number. Raises ValueError for one that no float can hold: it would become infinite, which is no JSON."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits:.20} is too large")
    return value


def _begun(text: str) -> dict[str, Any] | None:
    """Of an object's JSON that was cut short: the members that came, the last one as far as it did.

    None for what is no beginning of an object.
    """
    open_marks: list[str] = []
    wholes: list[tuple[int, str]] = [(0, "")]  # where a text may end, and what closes it there: the last two
    tail = ""
    for mark in _MARKS.finditer(text):
        kind = mark[0]
        tail = kind if mark.end() == len(text) else ""
        if kind in _CLOSING:
            open_marks.append(_CLOSING[kind])
        elif kind in ("}", "]"):
            if not open_marks or open_marks.pop() != kind:
                return None
        elif kind != ",":
            continue
        if len(open_marks) > MAX_LEVELS:
            return None
        place = mark.start() if kind == "," else mark.end()
        wholes = [*wholes[-1:], (place, "".join(reversed(open_marks)))]
    if not open_marks:
        return None
    closing = "".join(reversed(open_marks))
    whole = text
    if tail.startswith('"') and not (len(tail) > 1 and _is_closed(tail)):
        near_end = len(text[:-12].rstrip("\\"))
        whole = text[:near_end] + _HALF.sub(r"\1", text[near_end:]) + '"'
    for found in (whole + closing, *(text[:place] + closed for place, closed in reversed(wholes))):
        value = arguments_of(found)
        if isinstance(value, dict) and found:
            return value
    return None


def _is_closed(string: str) -> bool:
    return string.endswith('"') and (len(string) - len(string[:-1].rstrip("\\")) - 1) % 2 == 0
