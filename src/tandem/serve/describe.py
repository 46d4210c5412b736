"""GET /openapi.json: the server's own description, made from the structures that requests are decoded into.

It knows routes' methods and bodies; it does not know how they are answered.
"""

from functools import cache
from typing import Any

import msgspec
import orjson
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from tandem import __version__
from tandem.serve.schema import (
    OPEN,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """Every answer of status 4xx and 5xx."""

    error: ErrorDetail


TAKING_MORE = {"ErrorBody", "ErrorDetail", *(kind.__name__ for kind in OPEN)}
POSTS: dict[str, tuple[type[Struct], str, bool]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", True),
    "/v1/completions": (CompletionRequest, "Continue prompts", True),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, as items; nothing is stored", True),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation", False),
    "/detokenize": (DetokenizeRequest, "The text of token ids", False),
}
GETS = {
    "/v1/models": "The served models",
    "/v1/models/{name}": "One served model",
    "/explain/{name}": "Where the time of an answered request went",
    "/health": "Liveness",
    "/ready": "Readiness: loaded, making progress, not draining",
    "/load": "How busy the server is",
    "/version": "The server's version",
    "/openapi.json": "This document",
}
ERRORS = {
    "400": "the request cannot be honoured; param names the field",
    "401": "an API key is needed",
    "404": "there is no such model, route or request",
    "405": "the route does not take this method",
    "408": "the header or the body did not come in time",
    "413": "the body is too large",
    "415": "the body is not plain application/json in UTF-8",
    "421": "the Host header names another server",
    "429": "the server has too much to do; see Retry-After",
    "431": "the header is too large",
    "500": "the server failed",
    "503": "the server is full or draining, or its engine has stopped",
    "504": "the request's time is over",
}


async def openapi(request: Request) -> Response:
    return Response(written(), media_type="application/json")


@cache
def written() -> bytes:
    return orjson.dumps(document())


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [kind for kind, _, _ in POSTS.values()]
    _, components = msgspec.json.schema_components([*kinds, ErrorBody], ref_template="#/components/schemas/{name}")
    for component_name, component in components.items():
        if component_name not in TAKING_MORE:
            component["additionalProperties"] = False
    paths: dict[str, Any] = {}
    for path, (kind, text, streams) in POSTS.items():
        body = {"required": True, "content": {"application/json": {"schema": _reference(kind.__name__)}}}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": _answers(streams)}}
    for path, text in GETS.items():
        paths[path] = {"get": {"summary": text, "responses": _answers(False)}}
        if "{name}" in path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            paths[path]["get"]["parameters"] = [name]
    return {
        "openapi": "3.1.0",
        "info": {"title": "tandem", "version": __version__, "description": "An OpenAI-compatible inference server."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _answers(streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    wrong = {"application/json": {"schema": _reference("ErrorBody")}}
    answers: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    return answers | {status: {"description": text, "content": wrong} for status, text in ERRORS.items()}
