"""Whoever stops reading ends the request: by cancelling, breaking out, dropping, closing, or by a timeout."""

import asyncio
import gc
import threading
import time

import pytest

from tandem import AsyncEngine, SamplingParams
from tandem.engine.blocking import BlockingEngine
from tandem.errors import EngineDeadError

FAKE = "engine_fakes:make_fake_loop"
LONG = SamplingParams(max_tokens=4000)


async def start(in_process: bool = True) -> AsyncEngine:
    return await AsyncEngine.start(make=FAKE, in_process=in_process, options={"step_s": 0.002})


async def ended(engine: AsyncEngine) -> None:
    """Every request has ended in the engine, long before it had all its tokens; and the engine works on."""
    deadline_s = time.perf_counter() + 3.0
    while engine.statistics()["open"] or engine.statistics().get("live", 1):
        assert time.perf_counter() < deadline_s, f"the request runs on: {engine.statistics()}"
        await asyncio.sleep(0.01)
    assert engine.statistics()["tokens"] < 3000
    engine._front.check()
    async with await engine.submit([9], SamplingParams(max_tokens=2)) as stream:
        assert [update.finish async for update in stream][-1] == "length"


async def read(stream) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_cancelled_reader_ends_the_request(in_process: bool) -> None:
    async with await start(in_process) as engine:
        stream = await engine.submit([5], LONG)  # held: it is the cancelling that counts
        task = asyncio.ensure_future(read(stream))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ended(engine)


async def test_a_timeout_around_the_loop_ends_the_request() -> None:
    async with await start() as engine:
        stream = await engine.submit([5], LONG)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await read(stream)
        await ended(engine)


async def test_a_shielded_wait_may_time_out_and_go_on() -> None:
    async with await AsyncEngine.start(make=FAKE, in_process=True, options={"step_s": 0.05}) as engine:
        stream = await engine.submit([5], SamplingParams(max_tokens=3))
        waiting = asyncio.ensure_future(stream.__anext__())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.001)
        got = list((await waiting).token_ids)
        async for update in stream:
            got += update.token_ids
        assert len(got) == 3


async def test_breaking_out_of_the_loop_ends_the_request() -> None:
    async with await start() as engine:
        async for _ in await engine.submit([5], LONG):
            break
        await ended(engine)


@pytest.mark.parametrize("read_first", [True, False])
async def test_a_dropped_stream_ends_the_request(read_first: bool) -> None:
    async with await start() as engine:
        stream = await engine.submit([5], SamplingParams(max_tokens=4000, n=3))
        other = await engine.submit([6], SamplingParams(max_tokens=5))
        if read_first:
            await stream.__anext__()
        del stream
        await read(other)
        await ended(engine)


async def test_a_stream_in_a_cycle_ends_the_request_when_it_is_collected() -> None:
    async with await start() as engine:
        stream = await engine.submit([5], LONG)
        stream.itself = stream
        del stream
        gc.collect()
        await ended(engine)


async def test_leaving_a_stream_ends_it_and_drops_what_was_not_read() -> None:
    async with await start() as engine:
        async with await engine.submit([5], LONG) as stream:
            await stream.__anext__()
            await asyncio.sleep(0.02)
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
        await stream.aclose()
        await ended(engine)
        with pytest.raises(ZeroDivisionError):
            async with await engine.submit([6], LONG) as stream:
                raise ZeroDivisionError
        await ended(engine)


async def test_a_dropped_stream_of_an_engine_that_is_closed_is_nothing() -> None:
    engine = await start()
    stream = await engine.submit([5], LONG)
    await engine.close()
    with pytest.raises(EngineDeadError):
        await stream.__anext__()
    del stream
    gc.collect()
    assert not engine._front._abandoned


def rest(engine: BlockingEngine) -> None:
    deadline_s = time.perf_counter() + 3.0
    while engine.statistics()["open"] or engine.statistics().get("live", 1):
        assert time.perf_counter() < deadline_s, f"the request runs on: {engine.statistics()}"
        time.sleep(0.01)
    assert engine.statistics()["tokens"] < 3000
    assert sum(len(u.token_ids) for u in engine.submit([9], SamplingParams(max_tokens=2))) == 2


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("way", ["drop", "break", "close", "with"])
def test_whoever_stops_reading_a_blocking_stream_ends_the_request(way: str, in_process: bool) -> None:
    with BlockingEngine(make=FAKE, in_process=in_process, options={"step_s": 0.002}) as engine:
        if way == "break":
            for _ in engine.submit([5], LONG):
                break
        elif way == "with":
            with engine.submit([5], LONG) as stream:
                stream.get(2.0)
        else:
            stream = engine.submit([5], LONG)
            stream.get(2.0)
            if way == "close":
                stream.close()
            else:
                del stream
        rest(engine)
        if way in ("close", "with"):
            assert list(stream) == [] and stream.close() is None


def test_closing_wakes_a_reader_in_another_thread() -> None:
    with BlockingEngine(make=FAKE, in_process=True, options={"step_s": 0.3}) as engine:
        stream = engine.submit([5], LONG)
        got: list[object] = []
        thread = threading.Thread(target=lambda: got.append(list(stream)))
        thread.start()
        time.sleep(0.05)
        began_s = time.perf_counter()
        stream.close()
        thread.join(2.0)
        assert got == [[]] and time.perf_counter() - began_s < 0.2


def test_a_wait_in_vain_leaves_the_request_alone() -> None:
    with BlockingEngine(make=FAKE, in_process=True, options={"step_s": 0.05}) as engine:
        stream = engine.submit([5], SamplingParams(max_tokens=3))
        with pytest.raises(TimeoutError):
            stream.get(0.001)
        assert sum(len(update.token_ids) for update in stream) == 3
