"""GET /metrics: figures that add up (C27), never fall and never harm (C28), and agree with a client's own clock."""

import asyncio
import json
import re
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from front_drive import at_rest, client_of, serving
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tandem.observe.metrics import Family, Histogram, Metrics
from tandem.serve.export import Exporter, family_of, names_of, readings_of
from tandem.serve.measure import Meter
from tandem.serve.service import Service

ROOT = Path(__file__).parents[2]
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "http_requests_open")


async def scrape(client: httpx.AsyncClient) -> dict[str, dict[tuple, float]]:
    """Sample name → labels without model_name → value, by the official parser."""
    response = await client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "served"
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


def one(found: dict[str, dict[tuple, float]], name: str, **labels: str) -> float:
    return found[f"tandem:{name}"][tuple(sorted(labels.items()))]


async def chat(client: httpx.AsyncClient, **body: object) -> dict:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "ignore_eos": True, **body}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def leave_before_the_first_token(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 50, "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v1/chat/completions", json=body, timeout=0.1)


async def test_c27_figures_add_up() -> None:
    """4 plain, 2 with n = 3, 2 that leave before the first token, 1 refused; and preempted ones that come back.

    Counted per answer, as docs/metrics.md says: n = 3 is three.
    """
    # 40 blocks of 16: eight answers of 200 tokens at once do not fit, so some are preempted and resumed
    async with (
        serving(step_s=0.004, max_model_len=600, kv_cache_memory=40 * 16 * 16384, prefix_cache=False) as (service, url),
        client_of(url) as client,
    ):
        answers = await asyncio.gather(*(chat(client, max_tokens=200) for _ in range(6)))
        mid = await scrape(client)
        assert one(mid, "num_preemptions_total") > 0, "the pool was to be too small"
        answers += await asyncio.gather(*(chat(client) for _ in range(4)), *(chat(client, n=3) for _ in range(2)))
        refused = await client.post("/v1/chat/completions", json={"messages": [], "temperature": -1})
        assert refused.status_code == 400
        service.engine._host._loop.runner._step_time = 0.5  # so slow that the next two leave before a token comes
        await asyncio.gather(*(leave_before_the_first_token(client) for _ in range(2)))
        await at_rest(service)
        for _ in range(100):  # a block that a step in flight reads is free only behind it
            found = await scrape(client)
            if not any(one(found, gauge) for gauge in GAUGES):
                break
            await asyncio.sleep(0.02)
        service.meter.check()
    finished = sum(found["tandem:request_success_total"].values())
    assert finished == 6 + 4 + 2 * 3 and one(found, "request_aborted_total") == 2
    assert one(found, "request_failed_total") == 0
    assert one(found, "request_accepted_total") == finished + 2
    assert one(found, "time_to_first_token_seconds_count") == finished
    assert one(found, "e2e_request_latency_seconds_count") == finished
    assert one(found, "generation_tokens_total") == sum(a["usage"]["completion_tokens"] for a in answers)
    assert one(found, "prompt_tokens_total") == sum(a["usage"]["prompt_tokens"] for a in answers)
    assert one(found, "http_responses_total", status="4xx") == 1
    queue, first, whole = (
        one(found, f"{name}_seconds_sum")
        for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency")
    )
    assert queue <= first <= whole
    for gauge in GAUGES:
        assert one(found, gauge) == 0, gauge


async def test_c28_counters_never_fall_and_all_series_are_there_from_the_start() -> None:
    sizes = {"kv_cache_memory": 40 * 16 * 16384, "max_model_len": 600}
    async with serving(step_s=0.003, **sizes) as (_, url), client_of(url) as client:
        fresh = await scrape(client)
        values = [value for name, series in fresh.items() for value in series.values() if not _is_constant(name)]
        assert not any(values), {n: s for n, s in fresh.items() if any(s.values()) and not _is_constant(n)}
        busy = [asyncio.ensure_future(chat(client, max_tokens=150)) for _ in range(12)]
        leaving = [asyncio.ensure_future(chat(client, max_tokens=400)) for _ in range(4)]
        last, scrapes = fresh, 0
        while not all(task.done() for task in busy):
            await asyncio.sleep(0.1)
            if scrapes == 3:
                for task in leaving:
                    task.cancel()
            now = await scrape(client)
            scrapes += 1
            assert now.keys() == fresh.keys()
            for name, series in now.items():
                assert series.keys() == last[name].keys(), f"{name} has grown a label"
                if name.endswith(("_total", "_count", "_sum", "_bucket")):
                    assert all(series[labels] >= last[name][labels] for labels in series), f"{name} fell"
            last = now
        await asyncio.gather(*busy, *leaving, return_exceptions=True)
        assert scrapes > 5 and one(last, "generation_tokens_total") > 500
        # The paced device takes 3 ms a step, so so long was it active; the share depends on the machine's load.
        assert 0.0 < one(last, "device_active_share") <= 1.0 and one(last, "device_active_seconds_total") > 0.4
        assert one(last, "num_preemptions_total") > 0
        text = (await client.get("/metrics", headers={"accept": "application/openmetrics-text"})).text
        assert text.rstrip().endswith("# EOF") and list(parse_openmetrics(text))


PROMETHEUS = {  # what the versions send that are in use, and what answers them
    "2": ("application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
          "text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "application/openmetrics-text"),
    "3": ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
          "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
          "text/plain;version=0.0.4;q=0.3,*/*;q=0.2", "application/openmetrics-text"),
    "3, underscores": ("application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,"
                       "text/plain;version=1.0.0;escaping=underscores;q=0.3,*/*;q=0.1", "application/openmetrics-text"),
    "3, text": ("text/plain;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.2",
                "text/plain; version=0.0.4"),
    "text first": ("application/openmetrics-text;q=0.3,text/plain;q=0.4", "text/plain; version=0.0.4"),
    "OpenMetrics 2": ("application/openmetrics-text;version=2.0.0", "text/plain; version=0.0.4"),
    "refused": ("application/openmetrics-text;q=0", "text/plain; version=0.0.4"),
    "a browser": ("text/html,*/*;q=0.8", "text/plain; version=0.0.4"), "nobody": ("", "text/plain; version=0.0.4"),
}  # fmt: skip


async def test_c28_names_keep_their_colon_whatever_prometheus_asks() -> None:
    """Every name that the dashboard and the alerts read is there under each version's own Accept header."""
    queries = (ROOT / "deploy" / "grafana" / "tandem.json").read_text()
    wanted = series_in(queries + (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    assert len(wanted) > 40
    async with serving() as (_, url), client_of(url) as client:
        await chat(client)
        for who, (accept, kind) in PROMETHEUS.items():
            answer = await client.get("/metrics", headers={"accept": accept})
            assert answer.headers["content-type"].startswith(kind), who
            parse = parse_openmetrics if "openmetrics" in kind else text_string_to_metric_families
            found = {sample.name for family in parse(answer.text) for sample in family.samples}
            assert wanted <= found, (who, wanted - found)
            assert "tandem_" not in answer.text, who


def _is_constant(name: str) -> bool:
    return any(part in name for part in ("_info", "engine_up", "kv_blocks", "http_re", "http_connections_open"))


@pytest.mark.parametrize("where", ["_open", "_tokens", "_end", "_close"])
async def test_c28_a_metrics_fault_never_touches_a_request(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*what: object) -> None:
        raise ValueError("Counters can only be incremented by non-negative amounts.")

    monkeypatch.setattr(Meter, where, fail)
    async with serving() as (service, url), client_of(url) as client:
        for _ in range(2):
            assert (await chat(client))["usage"]["completion_tokens"] == 6
        async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            assert (await response.aread()).endswith(b"data: [DONE]\n\n")
        assert service.meter.broken and (await client.get("/metrics")).status_code == 200


async def test_a_scrape_does_not_wait_for_a_long_step_nor_fail_behind_a_dead_engine() -> None:
    async with serving(step_s=0.01) as (service, url), client_of(url) as client:
        await chat(client)
        before = await scrape(client)
        service.engine._host._loop.runner._step_time = 2.5
        busy = asyncio.ensure_future(chat(client, max_tokens=2))
        await asyncio.sleep(0.1)
        began_s = time.perf_counter()
        during = await scrape(client)
        assert time.perf_counter() - began_s < 1.5
        assert one(during, "steps_total") == one(before, "steps_total") > 0
        assert one(during, "http_requests_open") == 1
        busy.cancel()
        service.engine._host._loop._die(RuntimeError("gone"))
        after = await scrape(client)
        assert one(after, "engine_up") == 0 and one(after, "steps_total") >= one(during, "steps_total")


async def load(url: str, path: Path, *words: str) -> dict:
    """What a client in a process of its own measures."""
    command = ["-m", "tandem", "bench", "serve", "--base-url", url, "--warm-up", "0", "--json", str(path), *words]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=quiet)
    assert await process.wait() == 0
    return json.loads(path.read_text())


async def test_times_match_a_clients_own_within_5_percent(tmp_path: Path) -> None:
    """TTFT, ITL, TPOT and end to end, on a device of 50 ms a step with 4 clients.

    A client that gets no core for a while is late by itself, so the best of three runs counts.
    """
    words = ("--concurrency", "4", "--prompt", "8", "--new", "16")
    names = ("ttft_s", "itl_s", "tpot_s", "e2e_s")
    worst = 1.0
    async with serving(step_s=0.05, in_process=False) as (service, url):
        await load(url, tmp_path / "warm.json", "--requests", "4", *words)
        meter = service.meter
        for _ in range(3):
            for name in names:
                setattr(meter, name, Histogram(getattr(meter, name).bounds))
            found = await load(url, tmp_path / "found.json", "--requests", "8", *words)
            assert found["completed"] == 8 and meter.ttft_s.count == 8 and meter.itl_s.count == 8 * 15
            ours = {name: getattr(meter, name).sum / getattr(meter, name).count for name in names}
            worst = min(worst, max(abs(ours[name] / found[name]["mean"] - 1.0) for name in names))
            if worst < 0.05:
                break
    assert worst < 0.05


async def test_vllm_names_are_there_by_option_only() -> None:
    async with serving() as (service, url), client_of(url) as client:
        assert "vllm:" not in (await client.get("/metrics")).text
        service.vllm_metric_names = True
        await chat(client)
        found = await scrape(client)
        for name in (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
            "generation_tokens_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
            "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_sum", "prefix_cache_hits_total",
            "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_prompt_tokens_bucket",
            "request_generation_tokens_bucket", "request_success_total", "num_preemptions_total",
            "request_max_num_generation_tokens_sum", "time_per_output_token_seconds_bucket",
        ):  # fmt: skip
            assert f"vllm:{name}" in found, name
        assert sum(found["vllm:request_success_total"].values()) == 1
        assert found["vllm:generation_tokens_total"] == found["tandem:generation_tokens_total"]


async def test_metrics_need_the_key_too() -> None:
    async with serving(keys=("secret",)) as (_, url), client_of(url) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"authorization": "Bearer secret"})).status_code == 200


def test_a_family_crosses_the_border_unchanged() -> None:
    from tandem.engine.build import plain_metrics

    metrics = Metrics()
    for value in (0.0005, 0.3, 0.3, 1e6):
        metrics.queue_s.observe(value)
    for plain, family in zip(plain_metrics(metrics), metrics.families(), strict=True):
        found = family_of(json.loads(json.dumps(plain)))
        assert (found.name, found.kind, found.help) == (family.name, family.kind, family.help)
        for ours, theirs in zip(found.samples, family.samples, strict=True):
            assert ours.labels == theirs.labels
            if isinstance(theirs.value, Histogram):
                assert isinstance(ours.value, Histogram)
                assert ours.value.cumulative() == theirs.value.cumulative()
                assert (ours.value.sum, ours.value.count) == (theirs.value.sum, theirs.value.count)
            else:
                assert ours.value == theirs.value


def exported_families() -> list[Family]:
    class Card:
        block_size, num_blocks = 16, 64

    class Engine:
        card, error = Card(), None

        async def call(self, name: str) -> None: ...

    service = Service(Engine(), ("served",))  # type: ignore[arg-type]
    return Exporter(service, readings_of(service)).families()


def series_in(text: str) -> set[str]:
    return set(re.findall(r"tandem:[a-zA-Z0-9_]+", text))


def test_names_end_as_prometheus_wants_them() -> None:
    names = names_of(exported_families())
    assert len(names) > 50 and "tandem:prompt_tokens_total" in names
    for family in exported_families():
        assert family.help.endswith(".") and not family.name.endswith(("_total", "_ms", "_ns")), family.name


def test_dashboard_and_alerts_read_only_what_is_exported() -> None:
    """And the dashboard shows everything that there is; its labels are those of the series."""
    families = exported_families()
    names = names_of(families)
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "tandem.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 40
    shown = series_in(" ".join(queries))
    assert shown <= names, f"nobody exports {shown - names}"
    labels = {label for family in families for sample in family.samples for label in sample.labels} | {"le"}
    for query in queries:
        assert all('model_name="$model_name"' in part for part in re.findall(r"tandem:[a-z0-9_]+(\{[^}]*\})", query))
        assert query.count("tandem:") == len(re.findall(r"tandem:[a-z0-9_]+\{", query)), "a series without its model"
        for by in re.findall(r"by \((\w+)\)", query):
            assert by in labels, by
    for family in families:
        if not family.name.endswith("_info"):
            assert any(name.startswith(f"tandem:{family.name}") for name in shown), f"{family.name} is not shown"
    variables = series_in(json.dumps(dashboard["templating"]) + json.dumps(dashboard["annotations"]))
    assert variables <= names
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)

    folder = ROOT / "deploy" / "prometheus"
    rules = [rule for group in yaml.safe_load((folder / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    assert rules and all(series_in(rule["expr"]) <= names and series_in(rule["expr"]) for rule in rules)
    scrape = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["metrics_path"] == "/metrics" and scrape["rule_files"] == ["alerts.yml"]


def test_the_document_names_every_series() -> None:
    told = (ROOT / "docs" / "metrics.md").read_text()
    for family in exported_families():
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        assert re.search(rf"`{name}[`{{]", told), f"docs/metrics.md does not tell of {name}"
