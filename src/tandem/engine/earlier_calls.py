"""Earlier tool calls, handed to a template as it takes them, which is tried out. It knows no template's text.

The API carries arguments as text. Some templates write them as JSON themselves or go over their names, and want the
object; others put them between texts, and want the text. Some write calls only where the message has no content.
"""

import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.engine.messages import Written, json_of
from tandem.errors import RequestError

MAX_LEVELS = 100
_CLOSING = {"{": "}", "[": "]"}
_MARKS = re.compile(r'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)
# Behind whole escapes: half of a pair of surrogates, and half an escape.
_HALF = re.compile(r"(?<!\\)((?:\\\\)*+)(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")


class CallWay(NamedTuple):
    """How a template takes calls.

    as_text         arguments as text, always.
    takes_text      it writes arguments that are text as they stand; else it only takes objects.
    needs_nothing   it writes calls only of messages whose content is None.
    """

    as_text: bool = False
    takes_text: bool = True
    needs_nothing: bool = False


def way_of(run: Callable[[list[dict[str, Any]]], str], *, mentions: bool) -> CallWay | None:
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
            rendered = _tried(run, name, json.dumps(whole) if as_text else whole, way)
            refused = refused and rendered is None
            if rendered is None or name not in rendered or value not in rendered:
                continue
            if not as_text and str(whole) in rendered:  # as Python writes it: it wants text
                by_repr = by_repr or way
                continue
            if not as_text:
                cut = Written(f'{{"x": "{value}')
                way = way._replace(takes_text=cut in (_tried(run, name, cut, way) or ""))
            return way
    return by_repr or (CallWay() if refused and mentions else None)


def _tried(run: Callable[[list[dict[str, Any]]], str], name: str, arguments: Any, way: CallWay) -> str | None:
    """What it makes of one call, or of a call and its result; None: it refuses both."""
    call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    calling = {"role": "assistant", "content": None if way.needs_nothing else "", "tool_calls": [call]}
    talk: list[dict[str, Any]] = [{"role": "user", "content": "x"}, calling]
    result = {"role": "tool", "tool_call_id": "call00001", "name": name, "content": "x"}
    for messages in (talk, [*talk, result]):
        try:
            return run(messages)
        except RequestError:
            continue
    return None


def handed_over(messages: Sequence[dict[str, Any]], way: CallWay) -> Iterator[dict[str, Any]]:
    """The messages with their calls as the template takes them. Raises RequestError for what it cannot take."""
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


def _handed(call: dict[str, Any], where: str, way: CallWay) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
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
    if isinstance(value, Mapping) or way.takes_text:
        return value
    if text.strip() == "null":
        return {}
    if (begun := _begun(text)) is not None:
        return begun
    raise RequestError(
        f"{where} is {text!r:.80}, which is no JSON object; this model's chat template writes arguments "
        "name by name.",
        param="messages", hint="send a JSON object, as '{\"city\": \"Rome\"}', or leave the call out.",
    )  # fmt: skip


def arguments_of(text: str) -> Any:
    """The object. What is none, no JSON (a call that was cut short), nested too deep, or holds a number that no float
    can hold, stays the text that the model wrote."""

    def constant(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise ValueError(f"{digits:.20} is too large")
        return value

    try:
        value = json.loads(text or "{}", parse_constant=constant, parse_float=number)
    except (ValueError, RecursionError):
        return Written(text)
    return value if isinstance(value, dict) else Written(text)


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
