"""GET /metrics: the figures of requests and engine in Prometheus' formats. It knows names and labels, not meanings.

Names are stable, under ``tandem:``; on request the ones that vLLM's dashboards read are there once more under
``vllm:``. Every series exists at zero from the start and carries model_name, the served name; no label grows with
requests. What the engine does not answer in time stays at its last value: a scrape never waits for a long step.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.exposition import generate_latest as plain_text
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as _open_metrics
from starlette.requests import Request
from starlette.responses import Response

from tandem import __version__
from tandem.errors import TandemError
from tandem.observe.metrics import Family, Histogram, Metrics, Sample
from tandem.observe.requests import REASONS
from tandem.observe.timeline import CAUSES
from tandem.serve.bodies import Bodies
from tandem.serve.border import Border
from tandem.serve.measure import Meter
from tandem.serve.service import Service

log = logging.getLogger("tandem.serve")

READ_TIMEOUT_S = 1.0
SHARE_WINDOW_S = 10.0
FROM_ENGINE = (
    "num_requests_running", "num_requests_waiting", "num_preemptions", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "steps", "step_tokens", "ghost_rows", "host_seconds",
)  # fmt: skip
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
open_metrics: Any = _open_metrics  # it has no annotations
KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
ALIASES = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries",),
    "prefix_cache_hits": ("prefix_cache_hits",),
    "num_preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "request_decode_time_seconds": ("request_decode_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "request_max_num_generation_tokens": ("request_max_num_generation_tokens",),
}
"""Family → its names under ``vllm:``; the second names are those that older dashboards read."""


class Readings:
    """What the engine last told of itself: its answers to "metrics", "timeline" and "state", one fetch at a time.

    num_read   fetches that have come back.
    shown      by format, what was written of the last one for a scrape, and its number.
    """

    NAMES = ("metrics", "timeline", "state")

    def __init__(self, call: Callable[[str], Any]) -> None:
        self._call = call
        self._task: asyncio.Task[None] | None = None
        self._read_s = float("-inf")
        self.num_read = 0
        self.shown: dict[str, tuple[int, bytes]] = {}
        self._shares: deque[tuple[float, float, float]] = deque()
        self.families = {family.name: family for family in Metrics().families()}
        self.timeline: dict[str, Any] = {}
        self.state: dict[str, Any] = {}

    async def refresh(self, max_age_s: float = 0.0, timeout_s: float = READ_TIMEOUT_S) -> None:
        """Fetch if the last answers are older than max_age_s; give up waiting behind timeout_s. Never raises."""
        if self._task is None or self._task.done():
            if time.perf_counter() - self._read_s <= max_age_s:
                return
            self._task = asyncio.ensure_future(self._fetch())
        await asyncio.wait((self._task,), timeout=timeout_s)

    async def _fetch(self) -> None:
        told = await asyncio.gather(*(self._call(name) for name in self.NAMES), return_exceptions=True)
        families, timeline, state = (None if isinstance(answer, BaseException) else answer for answer in told)
        for plain in families or ():
            self.families[plain["name"]] = family_of(plain)
        self.timeline, self.state = timeline or self.timeline, state or self.state
        self._read_s = time.perf_counter()
        self.num_read += 1
        if timeline:
            idle_s = sum(s for cause, s in timeline["idle_s"].items() if cause != "nothing")
            self._shares.append((self._read_s, timeline["device_active_s"], idle_s))
            while self._read_s - self._shares[0][0] > SHARE_WINDOW_S:
                self._shares.popleft()

    @property
    def active_share(self) -> float:
        """The device's active share of the time with work, over the readings of the last seconds; 0 without any."""
        if not self._shares:
            return 0.0
        (_, active_s, idle_s), (_, first_active_s, first_idle_s) = self._shares[-1], self._shares[0]
        if len(self._shares) == 1 or active_s == first_active_s:
            return 0.0
        active_s, idle_s = active_s - first_active_s, idle_s - first_idle_s
        return min(1.0, active_s / (active_s + idle_s))


def family_of(plain: dict[str, Any]) -> Family:
    """A family that has crossed the process border as plain data."""
    samples = [Sample(sample["labels"], _value(sample["value"])) for sample in plain["samples"]]
    return Family(plain["name"], plain["kind"], plain["help"], samples)


def _value(plain: Any) -> float | Histogram:
    if not isinstance(plain, dict):
        return float(plain)
    found = Histogram([bound for bound, _ in plain["buckets"][:-1]])
    found.sum, found.count = plain["sum"], plain["count"]
    totals = [total for _, total in plain["buckets"]]
    found.counts = [after - before for before, after in zip([0, *totals], totals, strict=False)]
    return found


def request_families(meter: Meter) -> list[Family]:
    """What clients got, measured where tokens leave for them."""

    def histogram(name: str, text: str, value: Histogram) -> Family:
        return Family(name, "histogram", text, [Sample({}, value)])

    return [
        _counter("request_accepted", "Answers begun.", meter.num_accepted),
        Family("request_success", "counter", "Answers that came to their end, by reason.",
               [Sample({"finished_reason": reason}, value) for reason, value in meter.num_finished.items()]),
        _counter("request_aborted", "Answers whose client left.", meter.num_aborted),
        _counter("request_failed", "Answers that ended with an error.", meter.num_failed),
        _counter("prompt_tokens", "Prompt tokens, counted with the first token.", meter.num_prompt_tokens),
        _counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", meter.num_cached_tokens),
        _counter("generation_tokens", "Tokens generated and delivered.", meter.num_generated_tokens),
        histogram("time_to_first_token_seconds", "From arrival to the first token.", meter.ttft_s),
        histogram("inter_token_latency_seconds", "Between an answer's tokens.", meter.itl_s),
        histogram("request_time_per_output_token_seconds", "Mean time a token after the first.", meter.tpot_s),
        histogram("e2e_request_latency_seconds", "From arrival to the last token.", meter.e2e_s),
        histogram("request_prompt_tokens", "Prompt lengths.", meter.prompt_lengths),
        histogram("request_generation_tokens", "Answer lengths.", meter.generated_lengths),
        histogram("request_max_num_generation_tokens", "The longest of a request's answers.", meter.most_lengths),
        Family("http_responses", "counter", "HTTP answers begun, by class of status.",
               [Sample({"status": status}, value) for status, value in meter.responses.items()]),
    ]  # fmt: skip


def engine_families(readings: Readings) -> list[Family]:
    """What the engine did."""
    planner, runner, timeline = (readings.state.get("planner", {}), readings.state.get("runner", {}), readings.timeline)
    kv, idle_s, queue_s = planner.get("kv", {}), timeline.get("idle_s", {}), readings.state.get("queue_s", {})
    usage = kv["num_owned"] / kv["num_blocks"] if kv.get("num_blocks") else 0.0
    return [
        *(readings.families[name] for name in FROM_ENGINE),
        _gauge("kv_cache_usage_perc", "Share of the KV blocks that live requests own, 0 to 1.", usage),
        Family("kv_blocks", "gauge", "KV blocks by state; cached ones are free for the taking.",
               [Sample({"state": state}, kv.get(f"num_{state}", 0)) for state in ("free", "cached", "owned")]),
        _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", kv.get("num_asked_tokens", 0)),
        _counter("prefix_cache_hits", "Prompt tokens found there.", kv.get("num_hit_tokens", 0)),
        _counter("prefix_cache_evictions", "Cached blocks given up for new ones.", kv.get("num_evictions", 0)),
        _counter("device_active_seconds", "Time in which the device computed.", timeline.get("device_active_s", 0.0)),
        Family("device_idle_seconds", "counter", "Time in which the device waited, by cause.",
               [Sample({"cause": cause}, idle_s.get(cause, 0.0)) for cause in CAUSES]),
        _gauge("device_active_share", "Active share of the time with work, over 10 s, 0 to 1.", readings.active_share),
        Family("queue_wait_seconds", "counter", "Time that requests waited for a row, by reason, added when they join.",
               [Sample({"reason": reason.replace(" ", "_")}, queue_s.get(reason, 0.0)) for reason in REASONS]),
        _counter("graph_rows", "Rows of decode steps that ran as CUDA graphs.", runner.get("graph_rows", 0)),
        _counter("graph_padding_rows", "Of these, rows that stood for nobody.", runner.get("graph_padding_rows", 0)),
    ]  # fmt: skip


def _counter(name: str, text: str, value: float) -> Family:
    return Family(name, "counter", text, [Sample({}, value)])


def border_families(border: Border, bodies: Bodies) -> list[Family]:
    """Connections and bodies; how many were turned away, and why."""
    ended = {
        "full": border.num_refused, "evicted": border.num_evicted, "late": border.num_late + bodies.num_late,
        "stuck": border.num_stuck, "malformed": border.num_malformed, "bodies": bodies.num_refused,
    }  # fmt: skip
    return [
        _gauge("http_connections_open", "Open connections.", len(border.open)),
        _gauge("http_bodies_bytes", "Request bodies in memory that are read or encoded.", bodies.num_bytes),
        _gauge("http_bodies_waiting", "Large request bodies that wait for their turn.", len(bodies.line)),
        Family("http_connections_refused", "counter", "Connections and bodies turned away, by reason.",
               [Sample({"reason": reason}, value) for reason, value in ended.items()]),
    ]  # fmt: skip


def _gauge(name: str, text: str, value: float) -> Family:
    return Family(name, "gauge", text, [Sample({}, value)])


class Exporter:
    """A collector for prometheus_client. vllm_names: the dashboards' names once more."""

    def __init__(self, service: Service, readings: Readings, *, vllm_names: bool = False) -> None:
        self.service, self.readings, self.vllm_names = service, readings, vllm_names

    def families(self) -> list[Family]:
        service, card = self.service, self.service.engine.card
        cache = {"block_size": str(card.block_size), "num_blocks": str(card.num_blocks)}
        return [
            *request_families(service.meter),
            *engine_families(self.readings),
            _gauge("http_requests_open", "Requests that are being answered.", service.num_requests),
            *border_families(service.border or Border(), service.bodies),
            _gauge("engine_up", "1 while the engine lives.", float(service.engine.error is None)),
            Family("cache_config_info", "gauge", "Always 1; what the cache is.", [Sample(cache, 1)]),
            Family("build_info", "gauge", "Always 1; which tandem this is.", [Sample({"version": __version__}, 1)]),
        ]

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's word for: give all metrics."""
        families = self.families()
        for family in families:
            yield self._metric(f"tandem:{family.name}", family)
        if self.vllm_names:
            for name, family in vllm_families(families, self.service.meter):
                yield self._metric(f"vllm:{name}", family)

    def _metric(self, name: str, family: Family) -> Metric:
        labels = ["model_name", *family.samples[0].labels]
        metric: Any = KINDS[family.kind](name, family.help, labels=labels)
        for sample in family.samples:
            values = [self.service.names[0], *sample.labels.values()]
            if isinstance(sample.value, Histogram):
                buckets = [(_bound(bound), total) for bound, total in sample.value.cumulative()]
                metric.add_metric(values, buckets, sample.value.sum)
            else:
                metric.add_metric(values, sample.value)
        found: Metric = metric
        return found


def vllm_families(families: Iterable[Family], meter: Meter) -> Iterator[tuple[str, Family]]:
    """Pairs (name, family) as vLLM's dashboards and routers know them."""
    for family in families:
        for name in ALIASES.get(family.name, ()):
            yield name, family
        if family.name == "request_success":
            ended = {**meter.num_finished, "abort": meter.num_aborted, "error": meter.num_failed}
            samples = [Sample({"finished_reason": reason}, value) for reason, value in ended.items()]
            yield family.name, family._replace(samples=samples)
        if family.name == "cache_config_info":
            labels = family.samples[0].labels
            samples = [Sample({"block_size": labels["block_size"], "num_gpu_blocks": labels["num_blocks"]}, 1)]
            yield family.name, family._replace(samples=samples)


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else f"{float(bound)}"


def readings_of(service: Service) -> Readings:
    """The one Readings of a service, which all who look at it share."""
    if service.readings is None:
        service.readings = Readings(service.engine.call)
    found: Readings = service.readings
    return found


async def metrics(request: Request) -> Response:
    """The route. It answers 200 whatever the engine does.

    Those who waited for the same fetch get the same text, written once behind it: many may ask, and it takes
    milliseconds.
    """
    service: Service = request.app.state.service
    readings = readings_of(service)
    num_before = readings.num_read
    if service.engine.error is None:
        with contextlib.suppress(TandemError):
            await readings.refresh()
    is_open = wants_open_metrics(request.headers.get("accept", ""))
    kind = OPEN_METRICS if is_open else CONTENT_TYPE_PLAIN_0_0_4
    number, text = readings.shown.get(kind, (0, b""))
    if number != readings.num_read or number == num_before:
        exporter = Exporter(service, readings, vllm_names=service.vllm_metric_names)
        text = (open_metrics if is_open else plain_text)(exporter, escaping=ALLOWUTF8)
        readings.shown[kind] = readings.num_read, text
    return Response(text, headers={"content-type": kind})


def wants_open_metrics(accept: str) -> bool:
    """Whether an Accept header prefers OpenMetrics 1.0.0 to text 0.0.4, which is what all others get.

    Names have their colon in both, whatever escaping is asked for: a colon has been part of names since the first
    version of either, and dashboards and rules are written with it.
    """
    best = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for offer in accept.lower().split(","):
        kind, *options = (part.strip() for part in offer.split(";"))
        given = dict(option.partition("=")[::2] for option in options)
        version, quality = given.get("version", "").strip('"'), given.get("q", "1")
        if kind in best and (kind == "text/plain" or version in ("", "1.0.0")):
            with contextlib.suppress(ValueError):
                best[kind] = max(best[kind], float(quality))
    return best["application/openmetrics-text"] > 0 and best["application/openmetrics-text"] >= best["text/plain"]


def names_of(families: Sequence[Family], prefix: str = "tandem") -> set[str]:
    """The series' names as a scrape shows them."""
    found = set()
    for family in families:
        ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[family.kind]
        found |= {f"{prefix}:{family.name}{end}" for end in ends}
    return found
