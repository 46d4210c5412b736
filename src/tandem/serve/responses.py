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
    REASONING,
    RESPONSES,
    RESPONSES_TOOL,
    STREAM_OPTIONS,
    TEXT,
    check_count,
    check_labels,
    refuse,
)
from tandem.serve.responses_input import Place, in_words_of_input, messages_of
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
    places: list[Place] = []
    job = await _responses_asked(request, service, journey, places)
    try:
        return await answer(request, service, job)
    except RequestError as error:
        raise _in_our_words(reworded(error, WORDS), places) from None


async def _responses_asked(request: Request, service: Service, journey: Journey, places: list[Place]) -> Job:
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


def _in_our_words(error: RequestError, places: Sequence[Place]) -> RequestError:
    """The same error, naming paths as they are in this body. places: where each chat message comes from."""

    if error.param not in ("input", "text", "tools", "reasoning"):
        return error
    what = in_words_of_input(error.what, places)
    what = re.sub(r"\b(tools\[\d+\])\.function\b", r"\1", what)
    what = re.sub(r"\bresponse_format(\.json_schema)?\b", "text.format", what)
    what = re.sub(r"\breasoning_effort\b", "reasoning.effort", what)
    TandemError.__init__(error, what, hint=error.hint)
    return error


def as_chat(body: ResponsesRequest, places: list[Place]) -> ChatRequest:
    """The same request in the chat API's words. Raises RequestError for what needs state or is not offered.

    places   is filled with what each message comes from.
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
        if tool.type != "function":
            raise RequestError(
                f"tools[{i}] is of type {tool.type!r:.80}; only functions are offered here.",
                param="tools", code="unsupported_value",
            )  # fmt: skip
        if not tool.name:
            raise RequestError(f"tools[{i}].name is missing.", param="tools")
        refuse(tool, RESPONSES_TOOL, param="tools", path=f"tools[{i}].")
        found.append(Tool("function", FunctionTool(tool.name, tool.description, tool.parameters, tool.strict)))
    return found or None


def _tool_choice(body: ResponsesRequest) -> Any:
    if isinstance(body.tool_choice, ResponsesNamedTool):
        if body.tool_choice.type != "function":
            raise RequestError(
                f"tool_choice is of type {body.tool_choice.type!r:.80}; it must be function, and name one.",
                param="tool_choice", code="unsupported_value",
            )  # fmt: skip
        if body.tool_choice.name is None:
            raise RequestError("tool_choice.name is missing; it is the function's.", param="tool_choice")
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
