"""OpenTelemetry: one span for each request that generates. It knows the GenAI conventions; it does not know prompts.

Off unless asked for; the SDK is loaded only then. A span begins when the request's head is read and ends when its
answer is complete; it goes on with the trace that the client's ``traceparent`` header names. Attributes follow the
semantic conventions for generative AI (opentelemetry.io/docs/specs/semconv/gen-ai); the latencies are named as vLLM
names them, for the conventions have no attribute for them. No text of prompt or answer is in a span.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem import __version__
from tandem.engine.contract import Update
from tandem.errors import SettingError
from tandem.serve.reply import Ask
from tandem.serve.service import Service

log = logging.getLogger("tandem.serve")

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}
FROM_PARAMS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed", "max_tokens": "max_tokens",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "n": "choice.count",
}  # fmt: skip


class Sight:
    """What is seen of one request on its way, for its span."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.first_s = self.last_s = 0.0
        self.prompt_tokens = self.cached_tokens = self.tokens = self.num_answers = 0
        self.finish: dict[int, str] = {}
        self.params: Any = None
        self.status = 0
        self.response_id: str | None = None
        self.left: str | None = None

    def saw(self, ask: Ask, update: Update) -> None:
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or (self.last_s if update.token_ids else 0.0)
        self.tokens += len(update.token_ids)
        if update.finish is not None:
            self.finish[ask.first_index + update.index] = update.finish

    def close(self, left: str | None) -> None:
        if left != "aborted" or len(self.finish) < self.num_answers:
            self.left = left


SIGHT: ContextVar[Sight | None] = ContextVar("tandem_sight", default=None)


class Tracing:
    """ASGI middleware and updates.Tap in one. tracer: of OpenTelemetry's API."""

    def __init__(self, app: ASGIApp, service: Service, tracer: Any) -> None:
        self.app, self.service, self.tracer = app, service, tracer
        service.taps.append(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await self.app(scope, receive, send)
            return
        sight = Sight()
        SIGHT.set(sight)
        span = self._begin(scope, operation)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                sight.status = message["status"]
                named = dict(message.get("headers", ())).get(b"x-request-id")
                sight.response_id = named.decode("latin-1") if named else None
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            self._end(span, sight)

    def _begin(self, scope: Scope, operation: str) -> Any:
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        model = self.service.names[0]
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.model": model,
            "gen_ai.response.model": self.service.engine.card.name,
            "http.request.method": scope["method"],
            "url.path": scope["path"],
        }
        if scope.get("server"):
            attributes["server.address"], attributes["server.port"] = scope["server"]
        context = propagate.extract(headers)
        return self.tracer.start_span(
            f"{operation} {model}", context=context, kind=SpanKind.SERVER, attributes=attributes
        )

    def _end(self, span: Any, sight: Sight) -> None:
        try:
            span.set_attributes(attributes_of(sight))
            failed = sight.left == "failed" or sight.status >= 500
            if failed or sight.left == "aborted" or sight.status >= 400:
                span.set_attribute("error.type", sight.left or str(sight.status))
            if failed:
                from opentelemetry.trace import Status, StatusCode

                span.set_status(Status(StatusCode.ERROR))
            span.end()
        except Exception:
            log.exception("a span could not be ended; the request is unharmed")

    def watch(self, asks: Sequence[Ask]) -> Sight | None:
        """updates.Tap.watch: note what a span tells."""
        sight = SIGHT.get()
        if sight is not None:
            sight.num_answers = sum(ask.num_choices for ask in asks)
            sight.prompt_tokens = sum(len(ask.stream.prompt_token_ids) for ask in asks)
            sight.params = asks[0].params
        return sight


def attributes_of(sight: Sight) -> dict[str, Any]:
    """What is known at the end. Times are seconds."""
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sight.prompt_tokens,
        "gen_ai.usage.output_tokens": sight.tokens,
        "http.response.status_code": sight.status,
    }
    if sight.response_id:
        found["gen_ai.response.id"] = sight.response_id
    if sight.finish:
        found["gen_ai.response.finish_reasons"] = [sight.finish[index] for index in sorted(sight.finish)]
    if sight.first_s:
        found["gen_ai.latency.time_to_first_token"] = sight.first_s - sight.began_s
        found["gen_ai.latency.e2e"] = sight.last_s - sight.began_s
    for name, attribute in FROM_PARAMS.items():
        value = getattr(sight.params, name, None)
        if value is not None:
            found[f"gen_ai.request.{attribute}"] = value
    return found


@contextlib.contextmanager
def tracing(endpoint: str | None, app: ASGIApp, service: Service, exporter: Any = None) -> Iterator[ASGIApp]:
    """The application with spans sent to a collector; unchanged if endpoint is None. Sends the last ones at the end.

    endpoint   base address of a collector that takes OTLP over HTTP, as http://127.0.0.1:4318.
    exporter   takes the spans instead, for tests.
    Raises SettingError if OpenTelemetry is not installed.
    """
    if endpoint is None and exporter is None:
        yield app
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            assert endpoint is not None
            address = endpoint.rstrip("/")
            address = address if address.endswith("/v1/traces") else f"{address}/v1/traces"
            processor: Any = BatchSpanProcessor(OTLPSpanExporter(endpoint=address))
        else:
            processor = SimpleSpanProcessor(exporter)
    except ImportError as error:
        raise SettingError(
            "otlp_endpoint is given, but OpenTelemetry is not installed.",
            hint='pip install -e ".[serve]", in the repository.',
        ) from error
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES of the environment win over these
    resource = Resource({"service.name": "tandem", "service.version": __version__}).merge(Resource.create())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(processor)
    try:
        yield Tracing(app, service, provider.get_tracer("tandem", __version__))
    finally:
        provider.shutdown()
