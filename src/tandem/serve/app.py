"""The routes, and what stands before and behind them. It knows which function answers what; not how."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from tandem.errors import TandemError
from tandem.serve import describe, export, generate, live, operate, responses
from tandem.serve.asking import AskingTurns
from tandem.serve.bodies import BodyClaims
from tandem.serve.failure import HttpError, report, response_of
from tandem.serve.guard import HostGuard, KeyGuard
from tandem.serve.measure import Doorkeeper
from tandem.serve.service import Service

ROUTES: tuple[BaseRoute, ...] = (
    Route("/v1/chat/completions", generate.chat, methods=["POST"]),
    Route("/v1/completions", generate.completions, methods=["POST"]),
    Route("/v1/responses", responses.responses, methods=["POST"]),
    Route("/v1/embeddings", operate.embeddings, methods=["POST"]),
    Route("/v1/models", operate.models, methods=["GET"]),
    Route("/v1/models/{name:path}", operate.model, methods=["GET"]),
    Route("/tokenize", operate.tokenize, methods=["POST"]),
    Route("/detokenize", operate.detokenize, methods=["POST"]),
    Route("/health", operate.health, methods=["GET"]),
    Route("/ready", operate.ready, methods=["GET"]),
    Route("/explain/{name}", operate.explain, methods=["GET"]),
    Route("/load", operate.load, methods=["GET"]),
    Route("/openapi.json", describe.openapi, methods=["GET"]),
    Route("/version", operate.version, methods=["GET"]),
    Route("/metrics", export.metrics, methods=["GET"]),
    Route("/live", live.live, methods=["GET"]),
    Route("/", live.Page(), methods=["GET"]),
    Mount("/page", live.Files()),
)


def create_app(
    service: Service, *, keys: Sequence[str] = (), origins: Sequence[str] = (), hosts: Sequence[str] | None = None,
    routes: Sequence[BaseRoute] = (),
) -> Starlette:  # fmt: skip
    """The application.

    keys      API keys, none means open.        origins  who may call from a browser, none by default.
    hosts     names that the Host header may have beside localhost; None: it is not looked at.
    """
    middleware = []
    shared = partial(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    if origins:
        middleware.append(Middleware(shared))
    if keys:
        middleware.append(Middleware(KeyGuard, keys=keys))
    if hosts is not None:
        middleware.insert(0, Middleware(HostGuard, hosts=hosts))
    middleware.append(Middleware(BodyClaims, bodies=service.bodies))
    middleware.insert(0, Middleware(Doorkeeper, meter=service.meter))
    middleware.insert(0, Middleware(AskingTurns))

    async def failed(request: Request, error: Exception) -> Response:
        answer: Any = _failed(request, error)
        return shared(answer) if origins else answer  # type: ignore[return-value]  # it stands outside of all middleware

    app = Starlette(
        routes=[*ROUTES, *routes],
        middleware=middleware,
        exception_handlers={
            TandemError: _refused,
            ClientDisconnect: _left,
            HTTPException: _unrouted,
            Exception: failed,
        },
    )
    app.state.service = service
    app.router.redirect_slashes = False  # a redirect would name the host that the client says we are
    return app


async def _refused(request: Request, error: Exception) -> Response:
    _count(request, error)
    report(error, request.method, request.url.path)
    return response_of(error)


def _count(request: Request, error: Exception) -> None:
    """Count an answer that was refused before it began."""
    if request.method == "POST" and request.url.path.startswith("/v1/") and not hasattr(request.state, "counted"):
        request.app.state.service.count(error)


async def _left(request: Request, error: Exception) -> Response:
    """The client went away while it sent its body; nobody reads this."""
    return Response(status_code=499)


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        wrong = HttpError(f"{request.url.path} does not take {request.method}.", code="method_not_allowed")
        wrong.headers.update(error.headers or {})
        return response_of(wrong)
    return response_of(HttpError(f"there is no route {request.url.path}.", code="not_found"))


def _failed(request: Request, error: Exception) -> Response:
    _count(request, error)
    report(error, request.method, request.url.path)
    answer = response_of(error)
    answer.headers["connection"] = "close"  # Starlette raises the error again, which closes it
    return answer
