"""BlockingEngine: one reader a request, in threads (C06), and memory that stays flat."""

import gc
import threading
import time
import tracemalloc

import pytest
from engine_fakes import made_up

from tandem import SamplingParams
from tandem.engine.blocking import BlockingEngine
from tandem.errors import EngineDeadError, ModelError, RequestError

FAKE = "engine_fakes:make_fake_loop"
NULL = "engine_fakes:make_null_loop"


def start(make: str = FAKE, in_process: bool = True, **options) -> BlockingEngine:
    return BlockingEngine(make=make, in_process=in_process, options=options)


@pytest.mark.parametrize("in_process", [True, False])
def test_c06_fifty_readers_half_of_them_slow(in_process: bool) -> None:
    """Every second reader sleeps 0.1 s at each item; request 7 wants one token. What a slow reader misses is merged."""
    with start(in_process=in_process, step_s=0.004) as engine:
        got: dict[int, list[int]] = {}
        ended_s: dict[int, float] = {}
        began_s = time.perf_counter()

        def consume(number: int) -> None:
            stream = engine.submit([10 + number], SamplingParams(max_tokens=1 if number == 7 else 40))
            tokens: list[int] = []
            finishes = []
            for update in stream:
                assert not finishes, "an item behind the one with the finish"
                tokens += update.token_ids
                finishes += [update.finish] if update.finish else []
                if number % 2:
                    time.sleep(0.1)
            got[number], ended_s[number] = tokens, time.perf_counter() - began_s
            assert finishes == ["length"]

        threads = [threading.Thread(target=consume, args=(number,)) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        for number in range(50):
            assert got[number] == [made_up([10 + number], i) for i in range(1 if number == 7 else 40)]
        assert max(ended_s[number] for number in range(0, 50, 2)) < 1.5, "quick readers waited for slow ones"
        assert ended_s[7] < 1.0


def test_c06_a_wait_with_a_limit_keeps_it() -> None:
    with start(hang_at_step=2, in_process=False) as engine:
        stream = engine.submit([5], SamplingParams(max_tokens=9))
        assert stream.get(5.0).token_ids
        for _ in range(2):
            began_s = time.perf_counter()
            with pytest.raises(TimeoutError):
                stream.get(0.2)
            assert 0.19 < time.perf_counter() - began_s < 0.5
        engine._host._process.kill()
        with pytest.raises(EngineDeadError):
            stream.get(2.0)


def test_c06_engine_stop_raises_in_waiting_iterators() -> None:
    engine = start(step_s=0.01)
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            list(engine.submit([5], SamplingParams(max_tokens=4000)))
        except EngineDeadError as error:
            errors.append(error)

    threads = [threading.Thread(target=consume) for _ in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    engine.close()
    for thread in threads:
        thread.join(2)
    assert len(errors) == 5
    with pytest.raises(EngineDeadError):
        engine.submit([5])
    engine.close()


def test_errors_aborts_and_new_weights() -> None:
    with start() as engine:
        with pytest.raises(RequestError):
            engine.submit([])
        stream = engine.submit([5], SamplingParams(max_tokens=4000))
        stream.get(2.0)
        stream.abort()
        assert [update.finish for update in stream if update.finish] == ["abort"]
        engine.update_weights("second")
        with pytest.raises(ModelError):
            engine.update_weights("bad")
        assert engine.call("weights") == "second"
    with pytest.raises(ModelError):
        start(start="error")


def test_memory_stays_flat_over_many_requests() -> None:
    with start(NULL, verify=False, num_rows=64, budget=512) as engine:

        def round_of(count: int) -> None:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            streams = [engine.submit([3 + number % 200] * 5, params) for number in range(count)]
            for number, stream in enumerate(streams):
                if number % 10 == 0:
                    stream.abort()
                list(stream)
            engine.call("check")

        round_of(500)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3):
            round_of(500)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 500_000, f"{after - before} bytes more after 1,500 requests"
        assert not engine._front._answers
