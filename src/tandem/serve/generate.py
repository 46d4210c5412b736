"""POST /v1/chat/completions and /v1/completions: body → prompt and parameters → stream → answer."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.request import SamplingParams
from tandem.serve.accept import chat_params, completion_params
from tandem.serve.events import ClientGoneError, EventStream, unless_gone
from tandem.serve.failure import read_json
from tandem.serve.calls import MISTRAL
from tandem.serve.parse import AnswerParser
from tandem.serve.reply import Ask, ChatReply, CompletionReply, Reply
from tandem.serve.schema import ChatRequest, CompletionRequest, Generation
from tandem.serve.service import Service
from tandem.serve.tools import ToolUse, tool_use

Prompt = str | Sequence[int]


async def chat(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_json(request, ChatRequest, service.limits.body_bytes)
    service.check_open()
    model = service.check_model(body.model)
    params = chat_params(body, service.engine.card.defaults, service.limits)
    use = tool_use(body, service.engine.card.chat_template)
    if use.constraint is not None:
        if params.constraint is not None:
            raise RequestError("tool_choice and response_format exclude each other.", param="tool_choice")
        params = dataclasses.replace(params, constraint=use.constraint)
    if use.form is MISTRAL:  # its mark of a call is a special token
        params = dataclasses.replace(params, skip_special_tokens=False)
    prompt = await _chat_prompt(service, body, use)
    end = service.engine.text.decode(prompt[-8:], skip_special_tokens=False)
    shown = _shown(body, use.parser(service.engine.card.chat_template, end))

    def reply(asks: Sequence[Ask]) -> Reply:
        return ChatReply(asks, model, service.engine.text, show_logprobs=bool(body.logprobs), **shown)

    return await _answer(request, service, body, params, [prompt], reply)


async def _chat_prompt(service: Service, body: ChatRequest, use: ToolUse) -> list[int]:
    if body.chat_template is not None:
        raise RequestError("a template sent by a client is not run here.", param="chat_template")
    continued = bool(body.continue_final_message)
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra["reasoning_effort"] = body.reasoning_effort
    return await service.engine.encode_chat(
        use.messages(body.messages),
        tools=use.for_template,
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        **extra,
    )


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_json(request, CompletionRequest, service.limits.body_bytes)
    service.check_open()
    model = service.check_model(body.model)
    params = completion_params(body, service.engine.card.defaults, service.limits)
    prompts = _prompts(body, service.limits.max_prompts)
    shown = _shown(body, None)

    def reply(asks: Sequence[Ask]) -> Reply:
        has_logprobs = body.logprobs is not None
        return CompletionReply(
            asks, model, service.engine.text, show_logprobs=has_logprobs,
            echo_logprobs=has_logprobs and bool(body.echo), **shown,
        )  # fmt: skip

    return await _answer(request, service, body, params, prompts, reply, echo=bool(body.echo))


def _prompts(body: CompletionRequest, limit: int) -> list[Prompt]:
    """The four shapes of ``prompt``: text, texts, ids, lists of ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list.", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt mixes text, ids and lists; all items must be of one kind.", param="prompt")
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > limit:
        raise RequestError(f"prompt holds {len(prompt)} prompts; the limit is {limit}.", param="prompt")
    return prompt  # type: ignore[return-value]


def _shown(body: Generation, parser: Callable[[], AnswerParser] | None) -> dict[str, Any]:
    options = body.stream_options
    return {
        "usage_chunk": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.continuous_usage_stats),
        "show_token_ids": bool(body.return_token_ids),
        "parser": parser,
    }


async def _answer(
    request: Request, service: Service, body: Generation, params: SamplingParams, prompts: Sequence[Prompt],
    make_reply: Callable[[Sequence[Ask]], Reply], *, echo: bool = False,
) -> Response:  # fmt: skip
    """Encode, admit, submit every prompt, then stream or collect. Nothing submitted is ever left running."""
    engine = service.engine
    tokens = [await engine.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    with ExitStack() as stack:
        stack.enter_context(service.admitted(sum(map(len, tokens))))
        asks: list[Ask] = []
        stack.callback(_abort, asks)
        for i, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
            stream = await engine.submit(ids, params, priority=body.priority or 0, salt=body.cache_salt or "")
            asks.append(Ask(stream, params.n, i * params.n, _echoed(service, prompt) if echo else ""))
        reply = make_reply(asks)
        updates = service.updates(asks, body.timeout_s)
        held = stack.pop_all()
    if body.stream:
        return EventStream(reply.chunks(updates), lambda error: held.close(), service.keep_alive_s)  # type: ignore[return-value]
    with held:
        try:
            whole = await unless_gone(request.receive, reply.whole(updates))
        except ClientGoneError:
            return Response(status_code=499)
    return Response(orjson.dumps(whole), media_type="application/json")


def _abort(asks: Sequence[Ask]) -> None:
    for ask in asks:
        ask.stream.abort()


def _echoed(service: Service, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else service.engine.text.decode(list(prompt))
