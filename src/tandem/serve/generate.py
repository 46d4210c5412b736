"""POST /v1/chat/completions and /v1/completions: body → prompt and parameters → stream → answer."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tandem.engine.contract import Card
from tandem.engine.messages import checked_messages
from tandem.errors import ContextLengthError, RequestError
from tandem.request import Request as EngineRequest
from tandem.request import SamplingParams
from tandem.serve.accept import Limits, chat_params, completion_params, constraint_field
from tandem.serve.bodies import Apart, apart_of, read_json
from tandem.serve.calls import MISTRAL
from tandem.serve.continued import said_in
from tandem.serve.conversation import renumbered, understood
from tandem.serve.events import ClientGoneError, EventStream, unless_gone
from tandem.serve.explain import Journey
from tandem.serve.failure import reworded
from tandem.serve.guard import client_of
from tandem.serve.logprob_room import fit_logprobs, tokens_behind
from tandem.serve.refusals import MAX_VALUES, check_count
from tandem.serve.reply import Ask, Reply, Show
from tandem.serve.schema import ChatRequest, CompletionRequest, Generation
from tandem.serve.service import Service
from tandem.serve.shapes import ChatReply, CompletionReply
from tandem.serve.tools import ToolUse, tool_use
from tandem.serve.written import Closing, response_of_parts

Prompt = str | Sequence[int]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
RESERVED_VALUES = frozenset((
    "self", "messages", "tools", "template", "func", "args", "kwargs", "executor", "documents", "add_generation_prompt",
    "continue_final_message",
))  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """Fields of a body that its answer takes as they are."""

    stream: bool
    priority: int
    salt: str
    explain: bool
    timeout_s: float | None

    @classmethod
    def by(cls, body: Generation) -> "Asked":
        return cls(bool(body.stream), body.priority or 0, body.cache_salt or "", bool(body.explain), body.timeout_s)


@dataclasses.dataclass(slots=True)
class Job:
    """One HTTP request, understood: what to submit and how to answer. It holds nothing of the body, which may be large.

    make_reply         makes the answer of the submitted prompts.
    constraint_param   the field that asked for the grammar, to be named when it turns out to be wrong.
    adds_special       prompts that are text get what the tokenizer adds, its begin-of-sequence token for one.
    is_held            the answer is held until its end.
    is_silent          the prompt alone is wanted.
    """

    asked: "Asked"
    params: SamplingParams
    prompts: Sequence[Prompt]
    make_reply: Callable[[Sequence[Ask], Show], Reply]
    show: Show
    journey: Journey
    echo: bool = False
    constraint_param: str | None = None
    adds_special: bool = True
    is_held: bool = True
    is_silent: bool = False


async def chat(request: Request) -> ASGIApp:
    journey = Journey(time.perf_counter())
    service: Service = request.app.state.service
    words = {"prompt": "messages"}
    job = await _chat_asked(request, service, journey, words)
    try:
        return await answer(request, service, job)
    except RequestError as error:
        raise reworded(error, words) from None


async def _chat_asked(request: Request, service: Service, journey: Journey, words: dict[str, str]) -> Job:
    """What the body asks for; nobody holds the body behind this. words: is given those that this client uses."""
    body = await read_json(request, ChatRequest, service.limits.body_bytes)
    service.check_open()
    if body.max_completion_tokens is not None and body.max_tokens in (None, body.max_completion_tokens):
        words["max_tokens"] = "max_completion_tokens"
    try:
        return await chat_job(service, body, journey, apart_of(request))
    except RequestError as error:
        raise reworded(error, words) from None


async def chat_job(
    service: Service, body: ChatRequest, journey: Journey, apart: Apart, kind: Callable[..., Reply] = ChatReply
) -> Job:
    """Understand a chat request. Raises RequestError."""
    card = service.engine.card
    model = service.check_model(body.model)
    params: SamplingParams = await apart(chat_params, body, card.defaults, service.limits)
    use: ToolUse = await apart(tool_use, body, card.chat_template, params.constraint, service.engine.text.special_id)
    params = dataclasses.replace(params, constraint=use.constraint)
    show = show_of(body, bool(body.logprobs))
    if use.form is MISTRAL and params.skip_special_tokens:  # its mark of a call is a special token
        params, show.ending = dataclasses.replace(params, skip_special_tokens=False), card.eos_token or ""
    prompt, said = await _chat_prompt(service, body, use, apart)
    end = service.engine.text.decode(prompt[-8:], skip_special_tokens=False)
    show.parser = await apart(use.parser, card.chat_template, end, said)
    return Job(
        Asked.by(body), params, [prompt], lambda asks, show: kind(asks, model, service.engine.text, show), show,
        journey, constraint_param=use.constraint_param or constraint_field(body), is_held=not body.stream,
    )  # fmt: skip


async def _chat_prompt(service: Service, body: ChatRequest, use: ToolUse, apart: Apart) -> tuple[list[int], str]:
    """The prompt, and what of a message to be continued it ends with."""
    continued = bool(body.continue_final_message)
    plain = await understood(body.messages, service.engine.card, apart)
    messages = use.messages(plain)
    try:
        prompt = await service.engine.encode_chat(
            messages,
            tools=use.for_template,
            executor=apart.thread,
            add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continued,
            **_template_values(body, service.engine.card),
        )
    except RequestError as error:
        if error.param in (body.chat_template_kwargs or {}):
            error.param = "chat_template_kwargs"
        raise renumbered(error, len(messages) - len(plain)) from None
    return prompt, await apart(_said, service, messages, prompt) if continued else ""


def _said(service: Service, messages: Sequence[dict[str, Any]], prompt: list[int]) -> str:
    """What of an assistant's final message the prompt ends with; others hold no thoughts or calls of the model."""
    if messages[-1].get("role") != "assistant":
        return ""
    content = checked_messages(messages[-1:])[0]["content"]
    num_tokens = len(content.encode("utf-8", "replace")) + 32  # no fewer than it has
    return said_in(service.engine.text.decode(prompt[-num_tokens:], skip_special_tokens=False), content)


def _template_values(body: ChatRequest, card: Card) -> dict[str, Any]:
    """What the client adds to the template's variables. Raises RequestError for what the template does not know."""
    check_count("chat_template_kwargs", body.chat_template_kwargs, MAX_VALUES, "names")
    values = dict(body.chat_template_kwargs or {})
    for name in values:
        if name in RESERVED_VALUES or not name.isidentifier() or name.startswith("_") or not name.isascii():
            raise RequestError(f"chat_template_kwargs may not set {name!r:.80}.", param="chat_template_kwargs")
    if body.reasoning_effort is None:
        return values
    if body.reasoning_effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort is {body.reasoning_effort!r:.80}; it must be one of {', '.join(EFFORTS)}.",
            param="reasoning_effort",
        )
    template = card.chat_template or ""
    if "reasoning_effort" in template:
        return {"reasoning_effort": body.reasoning_effort, **values}
    if "enable_thinking" in template:
        return {"enable_thinking": body.reasoning_effort not in ("none", "minimal"), **values}
    if body.reasoning_effort == "none":
        return values  # a model that does not reason
    raise RequestError(
        "reasoning_effort is not supported: this model's template knows no such choice.",
        param="reasoning_effort", code="unsupported_value",
    )  # fmt: skip


async def completions(request: Request) -> ASGIApp:
    journey = Journey(time.perf_counter())
    service: Service = request.app.state.service
    return await answer(request, service, await _completion_asked(request, service, journey))


async def _completion_asked(request: Request, service: Service, journey: Journey) -> Job:
    """What the body asks for; nobody holds more of the body behind this than its prompts."""
    body = await read_json(request, CompletionRequest, service.limits.body_bytes)
    service.check_open()
    model = service.check_model(body.model)
    params = await apart_of(request)(completion_params, body, service.engine.card.defaults, service.limits)
    prompts = _prompts(body, service)
    show = show_of(body, body.logprobs is not None)
    echo = bool(body.echo)
    tokens = service.engine.text
    return Job(
        Asked.by(body), params, prompts, lambda asks, show: CompletionReply(asks, model, tokens, show, echo=echo), show,
        journey, echo, constraint_field(body), body.add_special_tokens is not False, not body.stream,
        body.max_tokens == 0,
    )  # fmt: skip


def _prompts(body: CompletionRequest, service: Service) -> list[Prompt]:
    """The four shapes of ``prompt``: text, texts, ids, lists of ids."""
    prompt, limit = body.prompt, service.limits.max_prompts
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list.", param="prompt")
    if isinstance(prompt[0], int):
        _check_length(len(prompt), service.engine.card)
    elif len(prompt) > limit:
        raise RequestError(f"prompt holds {len(prompt)} prompts; the limit is {limit}.", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt mixes text, ids and lists; all items must be of one kind.", param="prompt")
    return [prompt] if kinds == {int} else prompt  # type: ignore[list-item,return-value]


def _check_length(num_tokens: int, card: Card) -> None:
    if num_tokens > card.max_length:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens; the context limit is {card.max_length}.",
            param="prompt", hint="shorten the prompt.",
        )  # fmt: skip


def show_of(body: Generation, logprobs: bool) -> Show:
    options = body.stream_options
    return Show(
        usage_chunk=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
    )


async def answer(request: Request, service: Service, job: Job) -> ASGIApp:
    """Encode, check, admit, submit every prompt, then stream or collect. Nothing submitted is ever left running."""
    engine, asked, journey = service.engine, job.asked, job.journey
    _check_priority(asked, engine.card)
    num_answers = _checked_answers(job, service.limits)
    tokens = await _encoded(service, job)
    lengths = [len(ids) for ids in tokens]
    job.params, num_logprobs = fit_logprobs(
        job.params, job.show, lengths, engine.card.max_length, service.limits, held=job.is_held, echo=job.echo
    )
    service.bodies.release(request.scope)
    with ExitStack() as room, ExitStack() as stack:
        client = client_of(request.scope)
        room.enter_context(service.logprobs_held(client, num_logprobs))
        bundle = stack.enter_context(service.admitted(client, num_answers, sum(map(len, tokens)) * job.params.n))
        asks: list[Ask] = []
        stack.callback(_abort, asks)
        for i, (prompt, ids) in enumerate(zip(job.prompts, tokens, strict=True)):
            submitted_s, num = time.perf_counter(), job.params.n
            stream = await engine.submit(
                ids, job.params, priority=asked.priority, salt=asked.salt, client=client, bundle=bundle
            )
            echoed = _echoed(service, prompt) if job.echo else ""
            asks.append(Ask(stream, num, i * num, echoed, job.params, isinstance(prompt, str), job.is_silent))
            journey.add(submitted_s, stream.id, num)
            await asyncio.sleep(0)  # a prompt of ids is decoded to be echoed
        job.prompts, tokens, prompt, ids = (), [], "", []  # what is left of the body
        if asked.explain:
            job.show.explain = lambda: journey.account(engine)
        reply = job.make_reply(asks, job.show)
        service.journeys.keep(reply.id, journey)
        naming = job.constraint_param if job.params.constraint else None
        behind = None if job.is_held else tokens_behind(job.params)
        updates = service.updates(asks, asked.timeout_s, naming, behind)
        answered, sent = stack.pop_all(), room.pop_all()

    def end(error: Exception | None) -> None:
        journey.answered_s = time.perf_counter()
        answered.close()
        if asked.stream or error is not None:
            sent.close()
        request.state.counted = True
        service.count(error)

    name = [(b"x-request-id", reply.id.encode())]
    if asked.stream:
        return EventStream(reply.chunks(updates), end, service.keep_alive_s, name)
    try:
        whole = await unless_gone(request.receive, reply.whole(updates))
        finished = response_of_parts(whole, {"x-request-id": reply.id})
    except ClientGoneError as left:
        end(left)
        return Response(status_code=499)
    except BaseException as error:
        end(error if isinstance(error, Exception) else ClientGoneError())
        raise
    end(None)
    return Closing(finished, sent.close)


def _checked_answers(job: Job, limits: Limits) -> int:
    """How many answers the request asks for. Raises RequestError for too many."""
    num_prompts, n = len(job.prompts), job.params.n
    if num_prompts * n > limits.max_answers:
        raise RequestError(
            f"{num_prompts} prompts with n = {n} ask for {num_prompts * n} answers; the limit is {limits.max_answers}.",
            param="n" if n > 1 else "prompt", hint="send several requests, each when the one before it is answered.",
        )  # fmt: skip
    return num_prompts * n


def _check_priority(asked: Asked, card: Card) -> None:
    policy = card.settings.get("settings", {}).get("policy", "priority")
    if asked.priority and policy != "priority":
        raise RequestError(
            f"priority is {asked.priority}, but this server's policy is {policy}.",
            param="priority", code="unsupported_value", hint="start it with --policy priority.",
        )  # fmt: skip


async def _encoded(service: Service, job: Job) -> list[Sequence[int]]:
    """Ids of every prompt, all of them checked before any runs."""
    card, encoded = service.engine.card, list[Sequence[int]]()
    for prompt in job.prompts:
        if not isinstance(prompt, str):
            _check_length(len(prompt), card)
        ids = await service.engine.encode(prompt, job.adds_special) if isinstance(prompt, str) else prompt
        EngineRequest("", ids, job.params, card.eos_ids).check(card.num_logits, card.max_length)
        encoded.append(ids)
        await asyncio.sleep(0)  # many short prompts together are a long one
    return encoded


def _abort(asks: Sequence[Ask]) -> None:
    for ask in asks:
        ask.stream.abort()


def _echoed(service: Service, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else service.engine.text.decode(list(prompt))
