"""GET / and GET /live: the page, and the figures that its live view draws. It knows what is shown, not how it looks.

However many pages are open, the engine is asked at most every ``PERIOD_S``, for a few numbers and the moments of the
newest steps; all pages share the answer. No prompt and no answer is in it.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from tandem import __version__
from tandem.errors import RequestError
from tandem.serve.export import READ_TIMEOUT_S, Readings, readings_of
from tandem.serve.service import Service

FOLDER = Path(__file__).parent / "page"
PERIOD_S = 0.15
WINDOW_S = 10.0
STEPS_A_FETCH = 240
STEPS_KEPT = 1200
MAX_VISITS = 50
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Steps:
    """The newest steps of a service's engine, fetched piece by piece. Moments are microseconds from an origin."""

    def __init__(self, service: Service) -> None:
        self.kept: deque[list[int]] = deque(maxlen=STEPS_KEPT)
        self.depth = 1
        self.now_us = 0
        self._service = service
        self._origin_s = 0.0
        self._fetched_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Fetch what is new, unless that was done a moment ago. Never raises."""
        if self._task is None or self._task.done():
            if time.perf_counter() - self._fetched_s < PERIOD_S or self._service.engine.error is not None:
                return
            self._task = asyncio.ensure_future(self._fetch())
        await asyncio.wait((self._task,), timeout=READ_TIMEOUT_S)
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # an engine without this errand, or one that has just died, shows no steps

    async def _fetch(self) -> None:
        last = self.kept[-1][0] if self.kept else -1
        told = await self._service.engine.call("steps", f"{last} {STEPS_A_FETCH}")
        self._fetched_s, self.depth = time.perf_counter(), told["depth"]
        self._origin_s = self._origin_s or told["now_s"]
        self.now_us = self._us(told["now_s"])
        for step, spans, tokens, decodes, *moments in told["steps"]:
            self.kept.append([step, spans, tokens, decodes, *map(self._us, moments)])

    def _us(self, moment_s: float) -> int:
        """0 stays 0: a moment that a runner does not give."""
        return round((moment_s - self._origin_s) * 1e6) + 1_000_000_000 if moment_s else 0

    def after(self, step: int) -> list[list[int]]:
        found = []
        for record in reversed(self.kept):
            if record[0] <= step:
                break
            found.append(record)
        return found[::-1]


async def live(request: Request) -> Response:
    """The route. ?after=STEP: steps that the page has already."""
    service: Service = request.app.state.service
    try:
        after = int(request.query_params.get("after", "-1"))
    except ValueError:
        raise RequestError("after must be the number of a step.", param="after") from None
    readings = readings_of(service)
    steps: Steps | None = getattr(request.app.state, "steps", None)
    if steps is None:
        steps = request.app.state.steps = Steps(service)
    if service.engine.error is None:
        await asyncio.gather(readings.refresh(PERIOD_S), steps.refresh())
    return Response(
        orjson.dumps(snapshot(service, readings, steps, after)), headers={"cache-control": "no-store"},
        media_type="application/json",
    )  # fmt: skip


def snapshot(service: Service, readings: Readings, steps: Steps, after: int) -> dict[str, Any]:
    meter, card, now_s = service.meter, service.engine.card, time.perf_counter()
    kv, timeline = readings.state.get("planner", {}).get("kv", {}), readings.timeline
    visits = sorted(meter.live.values(), key=lambda visit: visit.number)
    return {
        "version": __version__,
        "model": service.names[0],
        "alive": service.engine.error is None,
        "draining": service.draining,
        "device": card.settings.get("facts", {}).get("device_name") or card.settings.get("facts", {}).get("device"),
        "running": gauge(readings, "num_requests_running"),
        "waiting": gauge(readings, "num_requests_waiting"),
        "open": service.num_requests,
        "kv": {
            "num_blocks": kv.get("num_blocks", card.num_blocks),
            "block_size": card.block_size,
            **{state: kv.get(f"num_{state}", 0) for state in ("free", "cached", "owned")},
        },
        "totals": {
            "prompt_tokens": meter.num_prompt_tokens,
            "generation_tokens": meter.num_generated_tokens,
            "finished": sum(meter.num_finished.values()),
            "aborted": meter.num_aborted,
            "failed": meter.num_failed,
            "steps": timeline.get("num_steps", 0),
            "preemptions": gauge(readings, "num_preemptions"),
            "ghosts": gauge(readings, "ghost_rows"),
        },
        "ttft_s": spread(meter.recent_ttft_s, now_s),
        "itl_s": spread(meter.recent_itl_s, now_s),
        "active_share": readings.active_share,
        "idle_s": timeline.get("idle_s", {}),
        "active_s": timeline.get("device_active_s", 0.0),
        "now_us": steps.now_us,
        "depth": steps.depth,
        "steps": steps.after(after),
        "visits": [visit.as_dict(now_s) for visit in visits[:MAX_VISITS]],
    }


def gauge(readings: Readings, name: str) -> float:
    value = readings.families[name].samples[0].value
    return value if isinstance(value, int | float) else 0.0


def spread(recent: Iterable[tuple[float, float]], now_s: float) -> dict[str, float] | None:
    """p50 and p95 (nearest rank) of the last seconds' values; None if there were none."""
    values = sorted(value for when_s, value in recent if now_s - when_s <= WINDOW_S)
    if not values:
        return None
    return {f"p{share}": values[max(0, math.ceil(len(values) * share / 100) - 1)] for share in (50, 95)}


class Page:
    """The page itself. Files are small and given whole: a Range header is passed over (RFC 9110, 14.2)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await FileResponse(FOLDER / "index.html", headers=HEADERS)(without_range(scope), receive, send)


def without_range(scope: Scope) -> Scope:
    return {**scope, "headers": [pair for pair in scope["headers"] if pair[0] not in (b"range", b"if-range")]}


class Files(StaticFiles):
    """The page's scripts and styles."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        await super().__call__(without_range(scope), receive, sending)
