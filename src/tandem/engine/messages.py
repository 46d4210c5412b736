"""Chat messages as templates expect them: checked, contents plain text. It does not know templates.

Nothing of the caller's is changed; what is returned is a copy one level deep.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def checked_messages(messages: Sequence[Mapping[str, Any]], *, has_developer: bool = False) -> list[dict[str, Any]]:
    """Messages with plain text contents and known roles.

    has_developer  the template knows that role; else a developer's message is a system message, as it once was.
    Raises RequestError naming the message.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is of type {type(messages).__name__}; it must be a list.", param="messages")
    if not messages:
        raise RequestError("messages is empty; at least one is needed.", param="messages")
    plain = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} is {message!r:.80}; it must be an object.", param="messages")
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(
                f"{where} has the role {role!r:.80}; the roles are {', '.join(ROLES)}.", param="messages"
            )
        if role == "developer" and not has_developer:
            role = "system"
        calls = message.get("tool_calls")
        copy = {**message, "role": role, "content": _text_of(message, where)}
        if calls:
            if not isinstance(calls, list | tuple):
                raise RequestError(f"{where}.tool_calls must be a list.", param="messages")
            copy["tool_calls"] = [_with_parsed_arguments(call, where) for call in calls]
        plain.append(copy)
    return plain


def final_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The content of the last message, to be continued."""
    content = messages[-1]["content"]
    assert isinstance(content, str)
    return content


def with_written_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The assistant's earlier calls as text of its messages, for a template that does not write them.

    In the Hermes way, <tool_call>{"name": …, "arguments": …}</tool_call>: models whose template knows no tools are told
    to call them so.
    """
    written = []
    for message in messages:
        message = dict(message)
        calls = [
            {"name": call.get("function", {}).get("name"), "arguments": call.get("function", {}).get("arguments", {})}
            for call in message.pop("tool_calls", None) or ()
        ]
        texts = [f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls]
        written.append({**message, "content": "\n".join(text for text in (message["content"], *texts) if text)})
    return written


def _text_of(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant":
            return ""
        raise RequestError(f"{where} has no content.", param="messages")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"{where} has a content of type {type(content).__name__}; it must be a string or a list of parts.",
            param="messages",
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise RequestError(
                f"{where} has a content part of type {kind!r:.80}; this model takes text parts only.", param="messages"
            )
    return "".join(texts)


def _with_parsed_arguments(call: Any, where: str) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they want the object, where the API carries a string."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function", {}), Mapping):
        raise RequestError(f"{where} has a tool call that is no object with a function.", param="messages")
    function = dict(call.get("function", {}))
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where} has a tool call whose arguments are no JSON: {error}.", param="messages"
            ) from error
    return {**call, "function": function} if "function" in call else dict(call)
