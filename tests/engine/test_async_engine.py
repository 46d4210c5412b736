"""AsyncEngine over both hosts: streams, aborts, n, stops, slow readers, death, drain, start-up."""

import asyncio
import os
import signal
import time

import psutil
import pytest
from engine_fakes import made_up

from tandem import LLM, AsyncEngine, SamplingParams
from tandem.engine.contract import Update
from tandem.errors import CapacityError, ContextLengthError, EngineDeadError, ModelError, RequestError, SettingError

FAKE = "engine_fakes:make_fake_loop"
NULL = "engine_fakes:make_null_loop"


def start(make: str = FAKE, in_process: bool = True, **options):
    return AsyncEngine.start(make=make, in_process=in_process, options=options)


async def read(stream) -> list[Update]:
    return [update async for update in stream]


def tokens_of(updates: list[Update], index: int = 0) -> list[int]:
    return [token for update in updates if update.index == index for token in update.token_ids]


def text_of(updates: list[Update], index: int = 0) -> str:
    return "".join(update.text for update in updates if update.index == index)


async def settle(engine: AsyncEngine, finished: int = 1, timeout_s: float = 3.0) -> dict:
    """The statistics once so many requests have ended and the engine has come to rest."""
    deadline_s = time.perf_counter() + timeout_s
    while (now := engine.statistics()).get("finished", 0) < finished or now["live"] or now["open"]:
        assert time.perf_counter() < deadline_s, f"it never came to rest: {engine.statistics()}"
        await asyncio.sleep(0.02)
    return engine.statistics()


@pytest.mark.parametrize("in_process", [True, False])
async def test_streams_end_by_themselves_with_every_token_once(in_process: bool) -> None:
    async with await start(in_process=in_process) as engine:
        prompts = [[3 + number, number] for number in range(40)]
        streams = [await engine.submit(p, SamplingParams(max_tokens=1 + 3 * (p[1] % 5))) for p in prompts]
        for prompt, updates in zip(prompts, await asyncio.gather(*map(read, streams)), strict=True):
            assert tokens_of(updates) == [made_up(prompt, i) for i in range(1 + 3 * (prompt[1] % 5))]
            assert [update.finish for update in updates if update.finish] == ["length"] and updates[-1].finish
        assert (await settle(engine, 40))["finished"] == 40
        with pytest.raises(StopAsyncIteration):
            await streams[0].__anext__()


@pytest.mark.parametrize("in_process", [True, False])
async def test_c03_a_client_cannot_name_a_request(in_process: bool) -> None:
    """Ids inside are the engine's own; two equal requests live side by side, and ending one leaves the other."""
    async with await start(in_process=in_process, step_s=0.001) as engine:
        first = await engine.submit([7, 7], SamplingParams(max_tokens=200))
        second = await engine.submit([7, 7], SamplingParams(max_tokens=200))
        other = await engine.submit([8, 8], SamplingParams(max_tokens=200))
        assert len({first.id, second.id, other.id}) == 3
        await first.__anext__()
        first.abort()
        first.abort()
        ended, lived, third = await asyncio.gather(read(first), read(second), read(other))
        assert ended[-1].finish == "abort" and len(tokens_of(ended)) < 200
        assert tokens_of(lived) == [made_up([7, 7], i) for i in range(200)]
        assert tokens_of(third) == [made_up([8, 8], i) for i in range(200)]
        await settle(engine)


async def test_refusals_are_the_requests_own() -> None:
    async with await start() as engine:
        with pytest.raises(RequestError, match="299"):
            await engine.submit([5, 300], SamplingParams())
        with pytest.raises(RequestError, match="empty"):
            await engine.submit([], SamplingParams())
        with pytest.raises(RequestError, match="no token id"):
            await engine.submit([5, True], SamplingParams())
        with pytest.raises(ContextLengthError):
            await engine.submit([5] * 4000, SamplingParams(max_tokens=200))
        with pytest.raises(ContextLengthError):
            await engine.submit("x" * 100_000, SamplingParams(max_tokens=200))
        with pytest.raises(RequestError):
            await engine.submit([5], SamplingParams(min_tokens=10**30))
        good = await engine.submit([5], SamplingParams(max_tokens=3, top_k=10**30))
        with pytest.raises(CapacityError, match="pool"):
            await read(await engine.submit([1], SamplingParams()))
        with pytest.raises(RequestError) as caught:
            await read(await engine.submit([2], SamplingParams()))
        assert caught.value.code == "internal_error"
        assert len(tokens_of(await read(good))) == 3
        assert engine.error is None and (await settle(engine))["open"] == 0


async def test_n_answers_are_siblings_in_one_stream() -> None:
    async with await start(NULL) as engine:
        params = SamplingParams(max_tokens=12, n=4, seed=2**63 - 2, ignore_eos=True, prompt_logprobs=1)
        updates = await read(await engine.submit([9] * 30, params))
        assert {update.index for update in updates if update.finish} == {0, 1, 2, 3}
        alone = [
            tokens_of(await read(await engine.submit([9] * 30, SamplingParams(max_tokens=12, seed=s, ignore_eos=True))))
            for s in (2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1)
        ]
        assert [tokens_of(updates, index) for index in range(4)] == alone
        assert len({tuple(answer) for answer in alone}) > 1
        prompts = [update for update in updates if update.prompt_logprobs is not None]
        assert [(u.index, len(u.prompt_logprobs)) for u in prompts] == [(0, 30)]
        stream = await engine.submit([9], SamplingParams(max_tokens=2000, n=3, ignore_eos=True))
        await stream.__anext__()
        stream.abort()
        ended = [update for update in await read(stream) if update.finish]
        assert [update.finish for update in ended] == ["abort"] * 3
        await engine.call("check")


async def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    async with await start(NULL, script="one two three four " * 50, step_time=0.002) as engine:
        stream = await engine.submit("count: ", SamplingParams(max_tokens=900, stop="thr"))
        updates = await read(stream)
        assert text_of(updates) == "one two " and updates[-1].finish == "stop" and updates[-1].stop == "thr"
        statistics = await settle(engine)
        assert statistics["steps"] < 60, "the engine went on behind the stop string"
        await engine.call("check")


async def test_a_slow_reader_gets_everything_and_delays_nobody() -> None:
    async with await start() as engine:
        slow = await engine.submit([5], SamplingParams(max_tokens=300))
        quick = await engine.submit([6], SamplingParams(max_tokens=300))
        assert len(tokens_of(await read(quick))) == 300
        await settle(engine)
        updates = await read(slow)
        assert len(updates) == 1, "what was not fetched is merged"
        assert tokens_of(updates) == [made_up([5], i) for i in range(300)] and updates[0].finish == "length"


@pytest.mark.parametrize("in_process", [True, False])
async def test_death_raises_in_every_waiting_stream(in_process: bool) -> None:
    engine = await start(in_process=in_process, fail_at_step=30, step_s=0.01)
    streams = [await engine.submit([5 + number], SamplingParams(max_tokens=50)) for number in range(3)]
    got = await asyncio.wait_for(asyncio.gather(*map(read, streams), return_exceptions=True), 5)
    assert all(isinstance(error, EngineDeadError) and "the device is gone" in str(error) for error in got)
    for _ in range(100):
        if engine.error is not None:
            break
        await asyncio.sleep(0.01)
    began_s = time.perf_counter()
    with pytest.raises(EngineDeadError):
        await engine.submit([5], SamplingParams())
    with pytest.raises(EngineDeadError):
        await engine.update_weights("second")
    await engine.close(drain_s=5)
    assert time.perf_counter() - began_s < 3


async def test_killed_process_raises_within_two_seconds() -> None:
    engine = await start(in_process=False, step_s=0.01)
    stream = await engine.submit([5], SamplingParams(max_tokens=4000))
    await stream.__anext__()
    os.kill(engine._host.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="signal 9"):
        await asyncio.wait_for(read(stream), 2.0)
    await engine.close()


async def test_a_hung_step_shows_as_a_stall() -> None:
    engine = await start(in_process=False, hang_at_step=3)
    assert engine.stalled_s == 0.0
    await asyncio.sleep(0.3)
    stream = await engine.submit([5], SamplingParams(max_tokens=50))
    assert engine.stalled_s < 0.2, "time without work is no stall"
    await stream.__anext__()
    await asyncio.sleep(0.5)
    assert engine.stalled_s > 0.3 and engine.error is None
    closing = asyncio.ensure_future(engine.close())
    with pytest.raises(EngineDeadError):
        await read(stream)
    os.kill(engine._host.pid, signal.SIGKILL)  # sooner than close would
    await closing


async def test_close_raises_in_streams_and_drain_lets_them_finish() -> None:
    engine = await start(step_s=0.005)
    stream = await engine.submit([5], SamplingParams(max_tokens=40))
    closing = asyncio.ensure_future(engine.close(drain_s=5))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="closing"):
        await engine.submit([6], SamplingParams())
    assert len(tokens_of(await read(stream))) == 40
    await closing
    engine = await start(step_s=0.005)
    stream = await engine.submit([5], SamplingParams(max_tokens=4000))
    waiting = asyncio.ensure_future(read(stream))
    await asyncio.sleep(0.02)
    await engine.close()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(waiting, 1.0)
    await engine.close()


async def test_new_weights_wait_for_what_runs() -> None:
    async with await start(step_s=0.002) as engine:
        old = await engine.submit([5], SamplingParams(max_tokens=30))
        swap = asyncio.ensure_future(engine.update_weights("second"))
        await asyncio.sleep(0)
        new = await engine.submit([6], SamplingParams(max_tokens=2))
        assert len(tokens_of(await read(old))) == 30
        await swap
        assert await engine.call("weights") == "second" and len(tokens_of(await read(new))) == 2
        with pytest.raises(ModelError):
            await engine.update_weights("bad")
        assert await engine.call("weights") == "second"
        assert len(tokens_of(await read(await engine.submit([7], SamplingParams(max_tokens=2))))) == 2


async def test_start_reports_phases_and_a_cancelled_start_leaves_nothing() -> None:
    phases: list[str] = []
    before = psutil.Process().children()
    engine = await AsyncEngine.start(make=FAKE, options={}, on_phase=phases.append)
    await engine.close()
    assert phases == ["pretending to load"]
    starting = asyncio.ensure_future(AsyncEngine.start(make=FAKE, options={}))
    await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not [p for p in psutil.Process().children() if p not in before and p.status() != psutil.STATUS_ZOMBIE]


async def test_start_errors_are_raised_as_they_are() -> None:
    for in_process in (True, False):
        with pytest.raises(ModelError) as caught:
            await start(in_process=in_process, start="error")
        assert caught.value.hint == "look elsewhere."
    with pytest.raises(SettingError, match="no setting"):
        await AsyncEngine.start(device="null", max_num_sequences=3)


async def test_text_in_text_out_through_a_real_process() -> None:
    async with await AsyncEngine.start(device="null", kv_cache_memory="64MiB", depth=2) as engine:
        assert "blocks of 16" in "\n".join(engine.card.lines) and engine.card.num_blocks == 256
        ids = await engine.encode_chat([{"role": "user", "content": "Grüße, 日本"}])
        assert engine.text.decode(ids) == "user: Grüße, 日本\nassistant: "
        params = SamplingParams(max_tokens=50, ignore_eos=True, logprobs=2)
        updates = await read(await engine.submit(ids, params))
        assert len(tokens_of(updates)) == 50 and text_of(updates) == engine.text.decode(tokens_of(updates))
        assert all(len(update.logprobs) == len(update.token_ids) for update in updates)
        families = {family["name"] for family in await engine.call("metrics")}
        assert families and (await engine.call("timeline"))["num_steps"] > 0
        await engine.call("check")


async def test_aborts_race_with_everything_and_nothing_is_left() -> None:
    async with await start(NULL, num_blocks=48, num_rows=6) as engine:

        async def one(number: int) -> None:
            stream = await engine.submit(
                [3 + number % 50] * (1 + number % 90), SamplingParams(max_tokens=1 + number % 40)
            )
            if number % 3 == 0:
                await asyncio.sleep(0.001 * (number % 7))
                stream.abort()
            async for update in stream:
                if number % 3 == 1 and update.token_ids:
                    stream.abort()

        await asyncio.gather(*(one(number) for number in range(300)))
        await settle(engine, 300)
        await engine.call("check")
        assert not engine._front._answers and engine.statistics()["planner"]["kv"]["num_owned"] == 0


async def test_a_model_in_a_process_says_what_it_says_here() -> None:
    settings = {"load_format": "random", "threads": 1, "kv_cache_memory": "1MiB"}
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM("tiny", **settings) as llm:
        expected = llm.generate([[5, 6, 7], [8] * 40], params, progress=False)
    async with await AsyncEngine.start("tiny", **settings) as engine:
        got = await asyncio.gather(*[read(await engine.submit(r.prompt_token_ids, params)) for r in expected])
        assert [tokens_of(updates) for updates in got] == [r.completions[0].token_ids for r in expected]
        assert engine.card.phases_s["runner: weights"] > 0
        with pytest.raises(RequestError, match="no tokenizer"):
            await engine.submit("text")
