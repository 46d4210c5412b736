"""Chat messages as templates expect them: checked, contents plain text. It does not know templates.

Nothing of the caller's is changed; what is returned is a copy one level deep.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import RequestError


class Written(str):
    """JSON text, or the beginning of one, that goes into the prompt as it stands."""

    __slots__ = ()


def json_of(value: Any, **layout: Any) -> str:
    """The value as JSON; what is Written in it as it stands."""
    texts: list[Written] = []
    mark = secrets.token_hex(16)

    def marked(part: Any) -> Any:
        if isinstance(part, Written):
            texts.append(part)
            return f"{mark}{len(texts) - 1}"
        if isinstance(part, Mapping):
            return {key: marked(item) for key, item in part.items()}
        return [marked(item) for item in part] if isinstance(part, list | tuple) else part

    found = json.dumps(marked(value), **layout)
    return re.sub(f'"{mark}([0-9]+)"', lambda place: texts[int(place[1])], found) if texts else found


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
            copy["tool_calls"] = [
                _checked_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)
            ]
        plain.append(copy)
    return plain


def final_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The content of the last message, to be continued. Raises RequestError if it can have none."""
    content = messages[-1]["content"]
    if content is None:
        raise RequestError(
            "the final message has tool calls, which this model's chat template writes only where there is no content; "
            "it cannot be continued.", param="continue_final_message",
        )  # fmt: skip
    assert isinstance(content, str)
    return content


def with_written_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The assistant's earlier calls as text of its messages, for a template that does not write them.

    In the Hermes way, <tool_call>{"name": …, "arguments": …}</tool_call>: models whose template knows no tools are told
    to call them so. Where a message has several, each shows its id, and results begin with the id of theirs. Results
    are told as the user's.
    """
    written = []
    several: set[str] = set()
    for message in messages:
        message = dict(message)
        made = message.pop("tool_calls", None) or ()
        if len(made) > 1:
            several.update(str(call["id"]) for call in made if call.get("id"))
        calls = [
            {
                **({"id": call["id"]} if len(made) > 1 and call.get("id") else {}),
                "name": call.get("function", {}).get("name"),
                "arguments": call.get("function", {}).get("arguments", {}),
            }
            for call in made
        ]
        if message["role"] == "tool" and message.get("tool_call_id") in several:
            message["content"] = f"{message['tool_call_id']}: {message['content']}"
        texts = [f"<tool_call>{json_of(call, ensure_ascii=False)}</tool_call>" for call in calls]
        written.append({**message, "content": "\n".join(text for text in (message["content"], *texts) if text)})
    return with_written_results(written)


def with_written_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of calls as the user's messages, for a template that knows no such role.

    In the Hermes way, <tool_response>…</tool_response>. Results in a row are one message, together with what the user
    says next: many templates want roles to alternate.
    """
    written: list[dict[str, Any]] = []
    follows = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if follows and message["role"] == "user":
            message = {**message, "content": f"{written.pop()['content']}\n{message['content']}"}
        written.append(message)
        follows = is_result
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
            f"{where}.content is of type {type(content).__name__}; it must be a string or a list of parts.",
            param="messages",
        )
    return "".join(_text_of_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} is {part!r:.80}; it must be a string or an object.", param="messages")
    kind, text = part.get("type"), part.get("text")
    if kind not in ("text", "input_text", "output_text"):
        raise RequestError(f"{where} is of type {kind!r:.80}; this model takes text parts only.", param="messages")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text is missing; it must be a string.", param="messages")
    return text


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function", {}), Mapping):
        raise RequestError(f"{where} is no object with a function.", param="messages")
    return dict(call)
