"""OpenTelemetry: one span a request, with GenAI attributes and no text; nothing is loaded unless it is asked for."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from front_drive import TEXT, at_rest, client_of, serving

from tandem.errors import SettingError
from tandem.serve.trace import tracing

pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@contextlib.asynccontextmanager
async def traced(
    exporter: InMemorySpanExporter | None = None, **options: Any
) -> AsyncIterator[tuple[Any, httpx.AsyncClient, InMemorySpanExporter]]:
    exporter = exporter or InMemorySpanExporter()
    with contextlib.ExitStack() as stack:

        def wrap(app: Any, service: Any) -> Any:
            return stack.enter_context(tracing(None, app, service, exporter))

        async with serving(wrap=wrap, **options) as (service, url), client_of(url) as client:
            yield service, client, exporter


async def spans_of(exporter: InMemorySpanExporter, count: int) -> list[Any]:
    for _ in range(100):
        if len(exporter.get_finished_spans()) >= count:
            break
        await asyncio.sleep(0.02)
    found = exporter.get_finished_spans()
    assert len(found) == count
    return list(found)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_span_a_request_with_its_figures(stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 9, "temperature": 0.5, "seed": 3,
            "ignore_eos": True, "stream": stream, "n": 2}  # fmt: skip
    async with traced(step_s=0.005) as (_, client, exporter):
        began_s = time.perf_counter()
        response = await client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
        took_s = time.perf_counter() - began_s
        await client.get("/v1/models")
        await client.get("/metrics")
        span = (await spans_of(exporter, 1))[0]
    found = dict(span.attributes)
    assert span.name == "chat served" and span.kind is SpanKind.SERVER and span.status.status_code is StatusCode.UNSET
    assert (
        f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
        and f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    )
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == "served"
    assert found["gen_ai.response.model"] == "null" and found["gen_ai.provider.name"] == "tandem"
    assert found["gen_ai.usage.output_tokens"] == 18 and found["gen_ai.usage.input_tokens"] > 8
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert found["gen_ai.request.max_tokens"] == 9 and found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.seed"] == 3 and found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.response.id"] == response.headers["x-request-id"]
    assert found["http.response.status_code"] == 200 and "error.type" not in found
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"] <= took_s
    assert "secret" not in str(span.to_json()) and TEXT[:15] not in str(span.to_json())


async def test_refused_left_and_failed_requests_say_so() -> None:
    async with traced(step_s=0.05) as (service, client, exporter):
        assert (await client.post("/v1/completions", json={"prompt": "x", "temperature": -1})).status_code == 400
        for stream in (False, True):
            body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
            leaving = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while not service.meter.live:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.12)
            leaving.cancel()
            await asyncio.wait([leaving])
            assert leaving.cancelled()
            await at_rest(service)
        late = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "timeout_s": 0.1}
        assert (await client.post("/v1/completions", json=late)).status_code == 504
        spans = await spans_of(exporter, 4)
    kinds = sorted((dict(span.attributes)["error.type"], span.status.status_code) for span in spans)
    assert kinds == [
        ("400", StatusCode.UNSET), ("aborted", StatusCode.UNSET), ("aborted", StatusCode.UNSET),
        ("failed", StatusCode.ERROR),
    ]  # fmt: skip


async def test_a_fault_of_the_exporter_never_touches_a_request() -> None:
    class Broken(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            raise RuntimeError("the collector is gone")

    async with traced(Broken()) as (_, client, _exporter):
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_spans_go_to_a_collector() -> None:
    """Over OTLP and HTTP, at the latest when the server ends."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    asked: list[bytes] = []

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        asked.append(head.split(b" ")[1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    collector = await asyncio.start_server(collect, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{collector.sockets[0].getsockname()[1]}"
    entered = contextlib.ExitStack()

    def wrap(app: Any, service: Any) -> Any:
        return entered.enter_context(tracing(endpoint, app, service))

    async with serving(wrap=wrap) as (_, url), client_of(url) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    await asyncio.to_thread(entered.close)
    collector.close()
    assert asked == [b"/v1/traces"]


def test_it_is_off_by_default_and_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    app = object()
    with tracing(None, app, object()) as same:  # type: ignore[arg-type]
        assert same is app
    code = "import sys, tandem.serve.server; print('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingError, match="not installed"), tracing("http://127.0.0.1:1", app, object()):  # type: ignore[arg-type]
        pass
