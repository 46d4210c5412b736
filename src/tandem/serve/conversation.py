"""Messages as the API's clients write them: checked beyond their shape, names told apart, instructions put in.

It knows the API's fields of a message; it does not know what a template makes of roles and contents.
"""

import asyncio
import re
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tandem.engine.chat import ChatTemplate
from tandem.engine.contract import Card
from tandem.errors import RequestError, TandemError
from tandem.serve.bodies import Apart
from tandem.serve.nesting import MAX_CONTAINERS, SMALL_BYTES, check_build, check_inner
from tandem.serve.refusals import MAX_MESSAGES, MAX_PARTS, check_count

Message = dict[str, Any]
NAME = re.compile(r"[^\s<|\\/>]{1,64}")
# Roles whose name tells participants apart. A tool's name is no field of the API: it goes to the template alone.
PARTICIPANTS = ("system", "developer", "user", "assistant")
REFUSED = {
    "audio": "there is no audio here",
    "function_call": "it is deprecated; use tool_calls",
}


async def understood(messages: Sequence[Message], card: Card, apart: Apart) -> list[Message]:
    """The messages, checked, with all that the API says of them honoured.

    ``name`` tells participants of one role apart. Where a role has only one there is nothing to tell; where it has
    several and the model's template does not write names, each named message begins with "NAME: ".
    Raises RequestError naming the path.
    """
    plain: list[Message] = await apart(_all_checked, messages)
    for role in PARTICIPANTS:
        own = [message for message in plain if message.get("role") == role]
        if len({message.get("name") for message in own}) < 2 or card.chat_template is None:
            continue
        tokens = card.bos_token, card.eos_token
        if not await asyncio.to_thread(_writes_names, card.chat_template, tokens, role):
            for message in own:
                if message.get("name"):
                    _put_before(message, f"{message['name']}: ")
    return plain


def _all_checked(messages: Sequence[Message]) -> list[Message]:
    check_count("messages", messages, MAX_MESSAGES, "messages")
    _check_parts(messages)
    checked = [_checked(message, f"messages[{place}]") for place, message in enumerate(messages)]
    _check_arguments(checked)
    return checked


def with_instruction(messages: Sequence[Message], text: str) -> list[Message]:
    """The conversation, with text joined to its system message if it begins with one, else before it."""
    first = messages[0] if messages else {}
    content = first.get("content")
    if first.get("role") in ("system", "developer") and isinstance(content, str | list):
        added = f"{content}\n\n{text}" if isinstance(content, str) else [*content, f"\n\n{text}"]
        return [{**first, "content": added}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def renumbered(error: RequestError, num_before: int) -> RequestError:
    """The same error, naming messages as the client counts them: without so many that were put before the first."""
    if num_before and error.param == "messages":
        what = re.sub(r"\bmessages\[(\d+)\]", lambda found: f"messages[{int(found[1]) - num_before}]", error.what)
        TandemError.__init__(error, what, hint=error.hint)
    return error


@lru_cache(maxsize=16)
def _writes_names(source: str, tokens: tuple[str | None, str | None], role: str) -> bool:
    """Whether a template writes the names of a role's messages, tried out."""
    template = ChatTemplate(source, bos_token=tokens[0], eos_token=tokens[1])
    mark = f"n{secrets.token_hex(8)}"
    talk = [{"role": "user", "content": "x"}, {"role": role, "content": "x", "name": mark}]
    try:
        return mark in template.render(talk if role == "assistant" else talk[1:])
    except RequestError:
        return False


def _check_parts(messages: Sequence[Message]) -> None:
    """Parts of contents and tool calls of all messages, by their numbers alone."""
    lists = (message.get(field) for message in messages for field in ("content", "tool_calls"))
    num = sum(len(items) for items in lists if isinstance(items, list))
    if num > MAX_PARTS:
        raise _wrong(f"messages hold {num} content parts and tool calls; the limit is {MAX_PARTS}.")


def _checked(message: Message, where: str) -> Message:
    message = dict(message)
    for field, why in REFUSED.items():
        if message.get(field) is not None:
            raise _wrong(f"{where}.{field} is not supported: {why}.", code="unsupported_value")
    role, name = message.get("role"), message.get("name")
    if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)) and role in PARTICIPANTS:
        raise _wrong(f"{where}.name is {name!r:.80}; it has 1 to 64 characters, no space and none of < | \\ / >.")
    if role == "tool" and not _is_text(message.get("tool_call_id")):
        raise _wrong(f"{where}.tool_call_id is missing; it is the id of the call that this message answers.")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls must be a list.")
    if calls and role != "assistant":
        raise _wrong(f"{where}.tool_calls: only the assistant calls tools.")
    for place, call in enumerate(calls or ()):
        _check_call(call, f"{where}.tool_calls[{place}]")
    content = message.get("content")
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("prompt_cache_breakpoint") is not None:
            raise _wrong(
                f"{where}.content[{place}].prompt_cache_breakpoint is not supported: caching needs none.",
                code="unsupported_value",
            )
    refusal = message.pop("refusal", None)
    if refusal is not None:
        if not isinstance(refusal, str) or content:
            raise _wrong(f"{where}.refusal must be a string, and stand alone: what the assistant said instead.")
        message["content"] = refusal
    return message


def _check_call(call: Any, where: str) -> None:
    if not isinstance(call, dict) or not _is_text(call.get("id")):
        raise _wrong(f"{where}.id is missing.")
    if call.get("type", "function") != "function":
        raise _wrong(f"{where}.type is {call['type']!r:.80}; only functions are called here.")
    function = call.get("function")
    if not isinstance(function, dict) or not _is_text(function.get("name")):
        raise _wrong(f"{where}.function.name is missing.")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        raise _wrong(f"{where}.function.arguments is missing; it is the arguments' JSON as a string.")
    if isinstance(arguments, str) and len(arguments) > SMALL_BYTES:  # decoded for the template
        check_build(arguments.encode("utf-8", "replace"), f"{where}.function.arguments", "messages", MAX_CONTAINERS)


def _check_arguments(messages: Sequence[Message]) -> None:
    """Of all calls together, however many strings they are in: they are decoded, and templates go over them."""
    found = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()]
    texts = [arguments for arguments in found if isinstance(arguments, str)]
    check_inner(
        texts, "the arguments of earlier tool calls have", "messages", "leave out earlier calls, or what they hold."
    )


def _put_before(message: Message, text: str) -> None:
    """Begin a message's content with a text. A content that is none is left, to be refused as it is without a name."""
    content = message.get("content")
    if isinstance(content, list):  # parts keep their numbers, which errors name
        first = content[0] if content else ""
        if isinstance(first, str):
            message["content"] = [text + first, *content[1:]]
        elif isinstance(first, dict) and isinstance(first.get("text"), str):
            message["content"] = [{**first, "text": text + first["text"]}, *content[1:]]
    elif isinstance(content, str) or (content is None and message["role"] == "assistant"):
        message["content"] = text + (content or "")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _wrong(what: str, code: str | None = None) -> RequestError:
    return RequestError(what, param="messages", code=code)
