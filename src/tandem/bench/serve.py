"""Load on an OpenAI-compatible server, and what its clients got. It knows streams and clocks, not what serves.

    warm-up │◄──────────────── measured: first request sent … last answer complete ────────────────►│
             due ─► sent ─── TTFT ───► first chunk with tokens ─ gaps ─► … ─► last chunk
                    └───────────────────────────── E2E ──────────────────────────┘

TPOT is (last - first chunk) / (tokens - 1), one figure a request; ITL are all gaps of all requests. Failed requests are
counted apart and are in no time and no rate.
"""

import asyncio
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tandem.bench.drive import percentiles
from tandem.bench.load_http import ConnectionLostError, HttpClient
from tandem.bench.load_stream import Outcome, stream
from tandem.bench.load_work import Ask, arrivals
from tandem.errors import TandemError

SHARES = (50, 90, 95, 99)
SLO_NAMES = ("ttft", "tpot", "e2e", "itl")


@dataclass(frozen=True, slots=True)
class Load:
    """How to ask. kind: poisson, bursty or closed; rate: requests a second; concurrency: at once, for closed loops.

    warm_up: requests sent before the measured ones. slo_s: name → most seconds, for the goodput.
    """

    kind: str = "closed"
    rate: float = 1.0
    burstiness: float = 0.25
    concurrency: int = 8
    warm_up: int = 0
    timeout_s: float = 600.0
    seed: int = 0
    slo_s: dict[str, float] = field(default_factory=dict)


async def models_of(client: HttpClient, timeout_s: float = 10.0) -> list[str]:
    """Names at /v1/models. Raises TandemError if nobody answers there."""
    raw: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            status = await client.request("GET", "/v1/models", b"", lambda data, now_s: raw.append(data))
        if status == 401:
            raise TandemError("the server wants an API key.", hint="put it into the environment as OPENAI_API_KEY.")
        return [model["id"] for model in orjson.loads(b"".join(raw))["data"]]
    except (OSError, ConnectionLostError) as error:
        raise TandemError(
            f"the server cannot be reached: {error}.", hint="is it running, and --base-url right?"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise TandemError(f"/v1/models gave no list of models: {error!r}.", hint="name one with --model.") from error


async def run_load(
    client: HttpClient, asks: Sequence[Ask], load: Load, on_done: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Warm up, then send all asks as ``load`` says. One outcome an ask, in their order."""
    if load.warm_up:
        await _closed(client, [asks[i % len(asks)] for i in range(load.warm_up)], load, lambda outcome: None)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would be seen as a gap
    try:
        send = _closed if load.kind == "closed" else _open
        return await send(client, asks, load, on_done)
    finally:
        gc.enable()
        gc.unfreeze()


async def _closed(
    client: HttpClient, asks: Sequence[Ask], load: Load, on_done: Callable[[Outcome], None]
) -> list[Outcome]:
    """So many at once; the next is sent when one is done."""
    outcomes: list[Outcome | None] = [None] * len(asks)
    numbers = iter(range(len(asks)))

    async def work() -> None:
        for number in numbers:
            due_s = time.perf_counter()
            outcomes[number] = outcome = await stream(client, asks[number].path, asks[number].body, load.timeout_s)
            outcome.due_s = due_s
            on_done(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, len(asks))):
            group.create_task(work())
    return [outcome for outcome in outcomes if outcome is not None]


async def _open(
    client: HttpClient, asks: Sequence[Ask], load: Load, on_done: Callable[[Outcome], None]
) -> list[Outcome]:
    """Each at its moment, however many run."""
    began_s = time.perf_counter() + 0.05

    async def work(ask: Ask, due_s: float) -> Outcome:
        await asyncio.sleep(due_s - time.perf_counter())
        outcome = await stream(client, ask.path, ask.body, load.timeout_s)
        outcome.due_s = due_s
        on_done(outcome)
        return outcome

    moments = itertools.islice(arrivals(load.kind, load.rate, load.burstiness, load.seed), len(asks))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work(ask, began_s + at_s)) for ask, at_s in zip(asks, moments, strict=True)]
    return [task.result() for task in tasks]


def figures(outcomes: Sequence[Outcome], load: Load) -> dict[str, Any]:
    """All figures as plain data: seconds, tokens and requests a second."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    duration_s = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes) if outcomes else 0.0
    tokens, prompt = sum(o.num_tokens for o in good), sum(o.prompt_tokens or 0 for o in good)
    chunks = sum(len(o.chunks_s) for o in good)

    def a_second(count: float) -> float:
        return count / duration_s if duration_s else 0.0

    found: dict[str, Any] = {
        "duration_s": duration_s,
        "completed": len(good),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common()),
        "prompt_tokens": prompt,
        "output_tokens": tokens,
        "output_tokens_estimated": any(o.estimated for o in good),
        "prompt_tokens_known": all(o.prompt_tokens is not None for o in good),
        "requests_per_s": a_second(len(good)),
        "output_tokens_per_s": a_second(tokens),
        "total_tokens_per_s": a_second(tokens + prompt),
        "tokens_per_chunk": tokens / chunks if chunks else 0.0,
        "finish": dict(Counter(o.finish or "none" for o in good)),
        "ttft_s": spread([o.ttft_s for o in good]),
        "tpot_s": spread([o.tpot_s for o in good]),
        "itl_s": spread([gap for o in good for gap in o.gaps_s]),
        "chunk_gap_s": spread([gap for o in good for gap in o.chunk_gaps_s]),
        "e2e_s": spread([o.e2e_s for o in good]),
        "late_s": spread([o.sent_s - o.due_s for o in outcomes]),
    }
    if load.slo_s:
        num_good = sum(meets(o, load.slo_s) for o in good)
        found["goodput"] = {
            "slo_s": dict(load.slo_s),
            "met": num_good,
            "share": num_good / len(outcomes) if outcomes else 0.0,
            "requests_per_s": a_second(num_good),
        }
    return found


def spread(values: Sequence[float | None]) -> dict[str, float]:
    """Count, mean and percentiles (nearest rank); empty for no values."""
    known = [value for value in values if value is not None]
    if not known:
        return {"count": 0}
    return {"count": len(known), "mean": sum(known) / len(known), **percentiles(known, SHARES), "max": max(known)}


def meets(outcome: Outcome, slo_s: dict[str, float]) -> bool:
    """Whether a request kept every limit; its ITL is judged by its longest gap. What it has not, it keeps."""
    has: dict[str, float | None] = {
        "ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.e2e_s, "itl": max(outcome.gaps_s, default=None),
    }  # fmt: skip
    return all((value := has[name]) is None or value <= limit for name, limit in slo_s.items())


def parse_slo(words: Sequence[str]) -> dict[str, float]:
    """['ttft=500', 'tpot=50'] in milliseconds → seconds by name. Raises TandemError."""
    found = {}
    for word in words:
        name, _, number = word.partition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if name not in SLO_NAMES or not limit > 0:
            raise TandemError(
                f"{word!r} is no objective.",
                hint=f"write NAME=MILLISECONDS, as ttft=500; names: {', '.join(SLO_NAMES)}.",
            )
        found[name] = limit / 1e3
    return found
