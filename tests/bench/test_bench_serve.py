"""The load tool against a server that keeps a script: what is a first token, a gap, a token, an error."""

import asyncio
import itertools
import json
import statistics
from pathlib import Path

import pytest
from mock_server import chat_chunk, mocking, usage_chunk

from tandem.bench.load_http import HttpClient
from tandem.bench.load_stream import Outcome, stream
from tandem.bench.load_work import WORDS, Ask, arrivals, file_asks, random_asks
from tandem.bench.serve import Load, figures, models_of, parse_slo, run_load
from tandem.cli.bench_serve import lines
from tandem.errors import TandemError

DONE = b"data: [DONE]\n\n"
CHAT = Ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})


def c37_events() -> list[tuple[float, object]]:
    """Role chunk at 0 ms, 10 content chunks at 500, 520 … 680, then finish, an empty chunk, usage and end mark."""
    contents = [(500 + 20 * i, chat_chunk({"content": f"w{i} "})) for i in range(10)]
    ends = [chat_chunk({}, "stop"), chat_chunk({"content": ""}), usage_chunk(10), DONE]
    return [(0, chat_chunk({"role": "assistant", "content": ""})), *contents, *((700, end) for end in ends)]


async def one(url: str, ask: Ask = CHAT, timeout_s: float = 10.0) -> Outcome:
    client = HttpClient(url)
    try:
        return await stream(client, ask.path, ask.body, timeout_s, keep_text=True)
    finally:
        await client.close()


async def test_c37_the_role_chunk_is_no_first_token() -> None:
    async with mocking(lambda body: (200, c37_events())) as (mock, url):
        outcome = await one(url)
    assert mock.seen[0]["stream"] and mock.seen[0]["stream_options"] == {"include_usage": True}
    assert outcome.error is None and outcome.finish == "stop" and outcome.num_tokens == 10
    assert outcome.ttft_s == pytest.approx(0.5, abs=0.03)
    assert len(outcome.gaps_s) == 9 and statistics.mean(outcome.gaps_s) == pytest.approx(0.02, abs=0.003)
    assert outcome.tpot_s == pytest.approx(0.02, abs=0.003)
    assert outcome.e2e_s == pytest.approx(0.68, abs=0.03)
    found = figures([outcome], Load())
    assert found["ttft_s"]["count"] == 1 and found["itl_s"]["count"] == 9 and found["tpot_s"]["count"] == 1


@pytest.mark.parametrize("usage", [True, False])
async def test_c38_tokens_are_counted_by_usage_not_by_text(usage: bool) -> None:
    """40 tokens of spaces and emoji, 4 a chunk, 40 ms between chunks."""
    texts = ["    ", "😀😀", " \n ", "👩‍👩‍👧"]
    events: list[tuple[float, object]] = [(50 + 40 * i, chat_chunk({"content": texts[i % 4]})) for i in range(10)]
    events += [(420, chat_chunk({}, "length"))] + ([(420, usage_chunk(40))] if usage else []) + [(420, DONE)]
    async with mocking(lambda body: (200, events)) as (_, url):
        client = HttpClient(url)
        outcomes = await run_load(client, [CHAT] * 4, Load(concurrency=4, warm_up=2))
        await client.close()
    found = figures(outcomes, Load())
    assert found["duration_s"] == pytest.approx(0.42, abs=0.06), "the warm-up is not in it"
    assert found["completed"] == 4 and len(outcomes[0].text) == 0
    assert found["output_tokens_estimated"] is not usage
    shown = "\n".join(lines(found))
    if usage:
        assert found["output_tokens"] == 160 and found["tokens_per_chunk"] == 4
        assert found["output_tokens_per_s"] == pytest.approx(160 / found["duration_s"])
        assert found["chunk_gap_s"]["count"] == 36 and found["itl_s"]["count"] == 144
        assert found["itl_s"]["mean"] == pytest.approx(found["chunk_gap_s"]["mean"] / 4)
        assert found["tpot_s"]["mean"] == pytest.approx(0.36 / 39, rel=0.1)
        assert "4.00 tokens each" in shown and "estimated" not in shown
    else:
        assert found["output_tokens"] == 40 and "estimated" in shown
        assert found["itl_s"]["count"] == 36


async def test_token_ids_say_how_many_tokens_a_chunk_holds() -> None:
    def chunk(text: str, ids: list[int]) -> dict:
        return {"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": None}]}

    # half a character has ids and no text: it is a token that came
    events = [(10, chunk("a", [1])), (30, chunk("", [2])), (70, chunk("é", [3, 4])), (70, DONE)]
    async with mocking(lambda body: (200, events)) as (_, url):
        outcome = await one(url, Ask("/v1/completions", {"prompt": "x"}))
    assert outcome.num_tokens == 4 and not outcome.estimated
    assert outcome.gaps_s == pytest.approx([0.02, 0.02, 0.02], abs=0.008)


async def test_events_may_be_cut_anywhere() -> None:
    whole = b"".join(b"data: " + json.dumps(e).encode() + b"\r\n\r\n" for _, e in c37_events() if isinstance(e, dict))
    whole = b": keep-alive\n\n" + whole + DONE
    pieces = [(i / 10, whole[i : i + 7]) for i in range(0, len(whole), 7)]
    async with mocking(lambda body: (200, pieces)) as (_, url):
        outcome = await one(url)
    assert outcome.error is None and "".join(outcome.text) == "".join(f"w{i} " for i in range(10))
    assert outcome.num_tokens == 10


async def test_reasoning_and_tool_calls_are_tokens_too() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}
    events = [
        (0, chat_chunk({"reasoning_content": "hm"})),
        (20, chat_chunk(call)),
        (30, chat_chunk({}, "tool_calls")),
        (30, DONE),
    ]
    async with mocking(lambda body: (200, events)) as (_, url):
        outcome = await one(url)
    assert len(outcome.chunks_s) == 2 and outcome.finish == "tool_calls"


async def test_errors_are_counted_apart() -> None:
    numbers = itertools.count()
    refusal = {"error": {"message": "full", "type": "rate_limit_error", "code": "queue_full"}}

    def script(body: dict) -> tuple[int, list[tuple[float, object]]]:
        kind = next(numbers) % 5
        content = (0.0, chat_chunk({"content": "x"}))
        return {
            0: (200, [content, (10, usage_chunk(1)), (10, DONE)]),
            1: (429, [(0, refusal)]),
            2: (200, [content, (5, {"error": {"code": "engine_dead", "message": "gone"}})]),
            3: (200, [content, (5, None)]),
            4: (200, [content, (2000, DONE)]),
        }[kind]

    async with mocking(script) as (_, url):
        client = HttpClient(url)
        outcomes = await run_load(client, [CHAT] * 10, Load(concurrency=1, timeout_s=0.2))
        await client.close()
    found = figures(outcomes, Load())
    assert found["completed"] == 2 and found["failed"] == 8
    assert found["errors"] == {
        "HTTP 429: queue_full": 2, "stream error: engine_dead": 2, "connection lost": 2, "timeout": 2,
    }  # fmt: skip
    assert found["output_tokens"] == 2 and found["ttft_s"]["count"] == 2
    assert "2 x HTTP 429: queue_full" in "\n".join(lines(found))


async def test_a_server_that_is_not_there_is_said_so() -> None:
    client = HttpClient("http://127.0.0.1:1")
    with pytest.raises(TandemError, match="cannot be reached"):
        await models_of(client)
    assert (await stream(client, "/v1/completions", {}, 5.0)).error.startswith("no connection")  # type: ignore[union-attr]
    for wrong in ("127.0.0.1:8000", "ftp://x", ""):
        with pytest.raises(TandemError, match="base URL"):
            HttpClient(wrong)


async def test_connections_are_used_again() -> None:
    async with mocking(lambda body: (200, [(0, chat_chunk({"content": "x"})), (0, DONE)])) as (mock, url):
        client = HttpClient(url)
        assert await models_of(client) == ["mock"]
        outcomes = await run_load(client, [CHAT] * 20, Load(concurrency=2))
        await client.close()
        assert not any(outcome.error for outcome in outcomes) and mock.num_connections <= 3


async def test_a_closed_loop_keeps_so_many_at_once_and_an_open_one_keeps_its_moments() -> None:
    running, most = 0, 0
    events = [(0, chat_chunk({"content": "x"})), (40, DONE)]

    def script(body: dict) -> tuple[int, list[tuple[float, object]]]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        asyncio.get_running_loop().call_later(0.039, leave)
        return 200, events

    def leave() -> None:
        nonlocal running
        running -= 1

    async with mocking(script) as (_, url):
        client = HttpClient(url)
        await run_load(client, [CHAT] * 12, Load(concurrency=3))
        assert most == 3
        load = Load("poisson", rate=100.0, seed=3)
        outcomes = await run_load(client, [CHAT] * 30, load)
        await client.close()
    due = [outcome.due_s - outcomes[0].due_s for outcome in outcomes]
    assert due == pytest.approx(list(itertools.islice(arrivals("poisson", 100.0, 1.0, 3), 30)))
    assert figures(outcomes, load)["late_s"]["p50"] < 0.01


@pytest.mark.parametrize(
    ("kind", "shape", "variation"), [("poisson", 0.2, 1.0), ("bursty", 0.25, 2.0), ("bursty", 4, 0.5)]
)
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(kind: str, shape: float, variation: float) -> None:
    """The coefficient of variation of gamma gaps is 1/sqrt(shape)."""
    moments = list(itertools.islice(arrivals(kind, 50.0, shape, 1), 40_000))
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.06)


def test_goodput_counts_requests_that_keep_every_objective() -> None:
    def outcome(first_s: float, gap_s: float, error: str | None = None) -> Outcome:
        chunks = [first_s + gap_s * i for i in range(5)]
        return Outcome(sent_s=0.0, due_s=0.0, end_s=chunks[-1], chunks_s=chunks, usage_tokens=5, error=error)

    slo = parse_slo(["ttft=500", "tpot=50"])
    assert slo == {"ttft": 0.5, "tpot": 0.05}
    outcomes = [outcome(0.4, 0.04), outcome(0.6, 0.04), outcome(0.4, 0.06), outcome(0.1, 0.01, "timeout")]
    good = figures(outcomes, Load(slo_s=slo))["goodput"]
    assert good["met"] == 1 and good["share"] == 0.25
    assert good["requests_per_s"] == pytest.approx(1 / max(o.end_s for o in outcomes))
    for wrong in ("ttft", "ttft=x", "speed=4", "ttft=-1"):
        with pytest.raises(TandemError, match="objective"):
            parse_slo([wrong])


def test_random_work_is_the_same_for_the_same_seed() -> None:
    asks = random_asks(20, True, (5, 9), (3, 4), 7, extra={"model": "m"})
    assert [a.body for a in asks] == [a.body for a in random_asks(20, True, (5, 9), (3, 4), 7, extra={"model": "m"})]
    for ask in asks:
        words = ask.body["messages"][0]["content"].split()
        assert 5 <= len(words) <= 9 and set(words) <= set(WORDS) and ask.body["max_tokens"] in (3, 4)
    ids = random_asks(3, False, (6, 6), (1, 1), 0, ids=(10, 12))[0]
    assert len(ids.body["prompt"]) == 6 and set(ids.body["prompt"]) <= {10, 11, 12} and ids.path == "/v1/completions"


def test_files_of_every_kind(tmp_path: Path) -> None:
    share = tmp_path / "share.json"
    turns = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "x" * 40}]
    share.write_text(json.dumps([{"conversations": turns}, {"conversations": []}, {"id": 3}]))
    asks = file_asks(str(share), 3, True, None, 0)
    assert [a.body["messages"][0]["content"] for a in asks] == ["Hello?"] * 3
    assert [a.body["max_tokens"] for a in asks] == [10] * 3
    lines_of = tmp_path / "lines.jsonl"
    lines_of.write_text(
        '{"prompt": "one", "max_tokens": 5}\n\n{"messages": [{"role": "user", "content": "two"}], "output_tokens": 6}\n'
        '{"custom_id": "c", "body": {"messages": [{"role": "user", "content": "three"}], "max_completion_tokens": 7}}\n'
    )
    asks = file_asks(str(lines_of), 3, False, None, 0, {"model": "m"})
    assert {(a.body["prompt"], a.body["max_tokens"]) for a in asks} == {("one", 5), ("two", 6), ("three", 7)}
    assert file_asks(str(lines_of), 1, True, (9, 9), 0)[0].body["max_tokens"] == 9
    lines_of.write_text('{"prompt": "one"}\n{"prompt": ')
    with pytest.raises(TandemError, match="line 2"):
        file_asks(str(lines_of), 1, True, None, 0)
    lines_of.write_text("[]")
    with pytest.raises(TandemError, match="no request"):
        file_asks(str(lines_of), 1, True, None, 0)


async def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli import main

    async with mocking(lambda body: (200, c37_events())) as (_, url):
        target = tmp_path / "figures.json"
        words = ["bench", "serve", "--base-url", url, "--requests", "2", "--warm-up", "0", "--endpoint", "chat",
                 "--slo", "ttft=600", "tpot=10", "--json", str(target)]  # fmt: skip
        assert await asyncio.to_thread(main, words) == 0
    shown = capsys.readouterr().out
    assert "2 completed, 0 failed" in shown and "TTFT, ms" in shown and "0.0% met" in shown
    written = json.loads(target.read_text())
    assert written["settings"]["model"] == "mock" and written["completed"] == 2 and written["machine"]["cores"]
