"""Routes for operators and for clients' small questions: health, readiness, load, models, tokens."""

import asyncio
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tandem import __version__
from tandem.errors import EngineDeadError, RequestError
from tandem.serve.bodies import apart_of, read_json
from tandem.serve.conversation import understood
from tandem.serve.refusals import check_count
from tandem.serve.schema import DetokenizeRequest, TokenizeRequest
from tandem.serve.service import Service

MAX_DETOKENIZED = 65536


def answer(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


async def health(request: Request) -> Response:
    """Liveness: 200 while the engine lives and its last step is not overdue, else 503."""
    service: Service = request.app.state.service
    if (error := service.dead) is not None:
        raise error if isinstance(error, EngineDeadError) else EngineDeadError(error.what, hint=error.hint)
    return answer({"status": "ok"})


async def ready(request: Request) -> Response:
    """Readiness: loaded, making progress, and not draining."""
    service: Service = request.app.state.service
    service.check_open()
    return await health(request)


async def explain(request: Request) -> Response:
    """Where the whole time of an answered request went; see explain.py."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    journey = service.journeys.find(name)
    if journey is None or journey.answered_s is None:
        what = "is unknown here, or forgotten" if journey is None else "has not been answered yet"
        raise RequestError(f"the request {name!r:.80} {what}.", code="not_found", hint="the newest 1024 are kept.")
    return answer({"id": name, **await journey.account(service.engine)})


async def load(request: Request) -> Response:
    """How busy the server is, for load balancers."""
    service: Service = request.app.state.service
    return answer(service.statistics() | {"engine": service.engine.statistics()})


async def version(request: Request) -> Response:
    return answer({"version": __version__})


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    return answer({"object": "list", "data": [_card(service, name) for name in service.names]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    return answer(_card(service, service.check_model(request.path_params["name"])))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "tandem",
        "root": service.engine.card.name,
        "max_model_len": service.engine.card.max_length,
    }


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_json(request, TokenizeRequest, service.limits.body_bytes)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages.", param="prompt")
    if body.messages is not None and body.add_special_tokens:
        raise RequestError("messages get the template's tokens and no others.", param="add_special_tokens")
    if body.messages is None and body.add_generation_prompt is not None:
        raise RequestError("add_generation_prompt is for messages.", param="add_generation_prompt")
    if body.messages is not None:
        add = body.add_generation_prompt is not False
        apart = apart_of(request)
        messages = await understood(body.messages, service.engine.card, apart)
        tokens = await service.engine.encode_chat(messages, executor=apart.thread, add_generation_prompt=add)
    else:
        tokens = await service.engine.encode(body.prompt or "", body.add_special_tokens is not False)
    shown: dict[str, Any] = {
        "tokens": list(tokens), "count": len(tokens), "max_model_len": service.engine.card.max_length,
    }  # fmt: skip
    if body.return_token_strs:
        shown["token_strs"] = await asyncio.to_thread(lambda: list(map(service.engine.text.token_text, tokens)))
    return answer(shown)


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_json(request, DetokenizeRequest, service.limits.body_bytes)
    service.check_model(body.model)
    check_count("tokens", body.tokens, max(MAX_DETOKENIZED, service.engine.card.max_length), "token ids")
    limit = service.engine.card.num_logits
    for token in body.tokens:
        if not 0 <= token < limit:
            raise RequestError(f"tokens holds {token}; this model's ids are 0..{limit - 1}.", param="tokens")
    return answer({"prompt": await asyncio.to_thread(service.engine.text.decode, body.tokens)})


async def embeddings(request: Request) -> Response:
    raise RequestError(
        "this server generates text; it serves no embeddings.",
        code="unsupported_endpoint",
        hint="use a server with an embedding model for /v1/embeddings.",
    )
