"""POST /v1/responses, the stateless part: a Responses request becomes a chat request, and is answered as items.

It knows how the two APIs differ in words; what they share is done by ``generate``. Nothing is stored.
"""

import re
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from tandem.errors import RequestError, TandemError
from tandem.serve.bodies import apart_of, read_json
from tandem.serve.explain import Journey
from tandem.serve.failure import reworded
from tandem.serve.generate import Job, answer, chat_job
from tandem.serve.items import ResponsesReply, echoed_of
from tandem.serve.refusals import (
    MAX_MESSAGES,
    MAX_PARTS,
    REASONING,
    RESPONSES,
    RESPONSES_TOOL,
    STREAM_OPTIONS,
    TEXT,
    check_count,
    check_labels,
    refuse,
)
from tandem.serve.schema import (
    ChatRequest,
    FunctionTool,
    JsonSchemaFormat,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    ResponsesNamedTool,
    ResponsesRequest,
    Tool,
)
from tandem.serve.service import Service
from tandem.serve.tools import MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
# What the chat request calls otherwise.
WORDS = {
    "messages": "input", "prompt": "input", "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens", "response_format": "text",
    "reasoning_effort": "reasoning", "logprobs": "top_logprobs",
}  # fmt: skip


async def responses(request: Request) -> ASGIApp:
    journey = Journey(time.perf_counter())
    service: Service = request.app.state.service
    places: list[str] = []
    job = await _responses_asked(request, service, journey, places)
    try:
        return await answer(request, service, job)
    except RequestError as error:
        raise _in_our_words(reworded(error, WORDS), places) from None


async def _responses_asked(request: Request, service: Service, journey: Journey, places: list[str]) -> Job:
    """What the body asks for; nobody holds the body behind this. places: see as_chat."""
    body = await read_json(request, ResponsesRequest, service.limits.body_bytes)
    service.check_open()
    refuse(body, RESPONSES)
    apart = apart_of(request)
    try:
        asked, echoed = await apart(as_chat, body, places), await apart(echoed_of, body)
        job = await chat_job(service, asked, journey, apart, lambda *a: ResponsesReply(*a, echoed=echoed))
    except RequestError as error:
        raise _in_our_words(reworded(error, WORDS), places) from None
    job.is_held = True  # the last event of a stream is the whole answer
    if job.constraint_param == "response_format":
        job.constraint_param = "text"
    return job


def _in_our_words(error: RequestError, places: Sequence[str]) -> RequestError:
    """The same error, naming paths as they are in this body. places: where each chat message comes from."""

    def place(found: "re.Match[str]") -> str:
        number = int(found[1])
        return places[number] if number < len(places) else found[0]

    if error.param not in ("input", "text", "tools"):
        return error
    what = re.sub(r"\bmessages\[(\d+)\]", place, error.what)
    what = re.sub(r"\b(tools\[\d+\])\.function\b", r"\1", what)
    what = re.sub(r"\bresponse_format(\.json_schema)?\b", "text.format", what)
    TandemError.__init__(error, what, hint=error.hint)
    return error


def as_chat(body: ResponsesRequest, places: list[str]) -> ChatRequest:
    """The same request in the chat API's words. Raises RequestError for what needs state or is not offered.

    places   is filled with the path of what each message comes from.
    """
    check_labels(body)
    include = body.include or []
    for name in include:
        if name != LOGPROBS:
            raise RequestError(
                f"include knows {LOGPROBS}, not {name!r:.80}.", param="include", code="unsupported_value"
            )
    if body.stream_options is not None:
        refuse(body.stream_options, STREAM_OPTIONS, param="stream_options", path="stream_options.")
        if not body.stream:
            raise RequestError("stream_options needs stream: true.", param="stream_options")
    reasoning = body.reasoning
    if reasoning is not None:
        refuse(reasoning, REASONING, param="reasoning", path="reasoning.")
    if body.text is not None:
        refuse(body.text, TEXT, param="text", path="text.")
    logprobs = LOGPROBS in include or bool(body.top_logprobs)
    return ChatRequest(
        model=body.model, messages=messages_of(body, places), stream=body.stream, temperature=body.temperature,
        top_p=body.top_p, max_completion_tokens=body.max_output_tokens, user=body.user, store=body.store,
        service_tier=body.service_tier, parallel_tool_calls=body.parallel_tool_calls,
        tools=_tools(body), tool_choice=_tool_choice(body), response_format=_format(body),
        reasoning_effort=reasoning.effort if reasoning is not None else None,
        logprobs=logprobs, top_logprobs=body.top_logprobs if logprobs else None, metadata=body.metadata,
        seed=body.seed, top_k=body.top_k, min_p=body.min_p, repetition_penalty=body.repetition_penalty,
        priority=body.priority, cache_salt=body.cache_salt, explain=body.explain, timeout_s=body.timeout_s,
    )  # fmt: skip


def _tools(body: ResponsesRequest) -> list[Tool] | None:
    found = []
    check_count("tools", body.tools, MAX_TOOLS, "tools")
    for i, tool in enumerate(body.tools or []):
        if tool.type != "function" or not tool.name:
            raise RequestError(
                f"tools[{i}] is of type {tool.type!r:.80}; only functions with a name are offered here.",
                param="tools", code="unsupported_value",
            )  # fmt: skip
        refuse(tool, RESPONSES_TOOL, param="tools", path=f"tools[{i}].")
        found.append(Tool("function", FunctionTool(tool.name, tool.description, tool.parameters, tool.strict)))
    return found or None


def _tool_choice(body: ResponsesRequest) -> Any:
    if isinstance(body.tool_choice, ResponsesNamedTool):
        if body.tool_choice.type != "function" or body.tool_choice.name is None:
            raise RequestError("tool_choice must name a function.", param="tool_choice", code="unsupported_value")
        return NamedToolChoice("function", NamedFunction(body.tool_choice.name))
    return body.tool_choice


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return None
    if wanted.type not in ("text", "json_object", "json_schema"):
        raise RequestError(f"text.format.type is {wanted.type!r:.80}; it must be text or JSON.", param="text")
    if wanted.type != "json_schema":
        return ResponseFormat(wanted.type)
    form = JsonSchemaFormat(wanted.name, wanted.schema, wanted.description, wanted.strict)
    return ResponseFormat(wanted.type, form)


def messages_of(body: ResponsesRequest, places: list[str]) -> list[dict[str, Any]]:
    """instructions and input as chat messages. Raises RequestError naming the item. places: see as_chat."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
        places.append("instructions")
    if isinstance(body.input, str):
        places.append("input")
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("input is an empty list.", param="input")
    check_count("input", body.input, MAX_MESSAGES, "items")
    thought: list[str] = []
    num_parts = 0
    for place, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            num_parts += len(parts) if isinstance(parts, list) else 0
            if num_parts > MAX_PARTS:
                raise RequestError(
                    f"input holds {num_parts} parts of reasoning or more; the limit is {MAX_PARTS}.", param="input"
                )
            if text := _text_of(parts):
                thought.append(text)
            continue
        message = _message(item, kind, place)
        if message["role"] == "assistant" and thought:
            message["reasoning_content"], thought = "".join(thought), []
        last = messages[-1] if messages else {}
        if kind == "function_call" and last.get("role") == "assistant" and "tool_calls" in last:
            last["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
            places.append(f"input[{place}]")
    if not messages:
        raise RequestError("input holds reasoning alone; a message is needed.", param="input")
    return messages


def _message(item: dict[str, Any], kind: object, place: int) -> dict[str, Any]:
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": _string(item, "name", place), "arguments": _string(item, "arguments", place)}
        call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": _string(item, "call_id", place), "content": item.get("output")}
    raise RequestError(
        f"input[{place}] is of type {kind!r:.80}; known are message, function_call, function_call_output, reasoning.",
        param="input", code="unsupported_value",
    )  # fmt: skip


def _string(item: dict[str, Any], name: str, place: int) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"input[{place}].{name} must be a string.", param="input")
    return value


def _text_of(parts: object) -> str:
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        return ""
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
