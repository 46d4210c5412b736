"""Chat messages as clients write them → as templates read them. It knows roles and parts, not templates."""

import json
from collections.abc import Sequence
from typing import Any

from tandem.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check each message and bring it into the form that chat templates expect.

    Content parts of type text are joined in order; ``developer`` becomes ``system``; a tool call's arguments become
    an object. Raises RequestError naming the message.
    """
    if not messages:
        raise RequestError("messages is empty; at least one message is needed.", param="messages")
    return [_one(index, message) for index, message in enumerate(messages)]


def _one(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}.")
    calls = message.get("tool_calls")
    if message.get("function_call") is not None:
        raise _wrong(f"{where}.function_call is not supported; use tool_calls.")
    if message.get("audio") is not None:
        raise _wrong(f"{where}.audio is not supported.")
    if calls is not None and role != "assistant":
        raise _wrong(f"{where} has tool_calls, but its role is {role}; only an assistant calls tools.")
    out: dict[str, Any] = {"role": "system" if role == "developer" else role}
    out["content"] = _content(where, message.get("content"), may_be_empty=role == "assistant" and bool(calls))
    if message.get("name") is not None:
        out["name"] = _string(f"{where}.name", message["name"])
    if role == "tool":
        out["tool_call_id"] = _string(f"{where}.tool_call_id", message.get("tool_call_id"))
    for field in ("reasoning_content", "reasoning"):
        if role == "assistant" and message.get(field) is not None:
            out["reasoning_content"] = _string(f"{where}.{field}", message[field])
    if calls:
        out["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(_list(where, calls))]
    return out


def _content(where: str, content: Any, *, may_be_empty: bool) -> str:
    if content is None and may_be_empty:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{where}.content is {type(content).__name__}; it must be text or a list of text parts.")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        field = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}.get(str(kind))
        if not isinstance(part, dict) or field is None:
            raise _wrong(f"{where}.content[{i}] is of type {kind!r}; this model takes text parts only.")
        texts.append(_string(f"{where}.content[{i}].{field}", part.get(field)))
    return "".join(texts)


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise _wrong(f"{where} must be of type function, with a field of that name.")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise _wrong(f"{where}.function.arguments is no valid JSON.") from None
    return {
        "id": _string(f"{where}.id", call.get("id")),
        "type": "function",
        "function": {"name": _string(f"{where}.function.name", function.get("name")), "arguments": arguments},
    }


def _string(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(f"{where} is {type(value).__name__}; it must be a string.")
    return value


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(f"{where}.tool_calls must be a list.")
    return value


def _wrong(what: str) -> RequestError:
    return RequestError(what, param="messages")
