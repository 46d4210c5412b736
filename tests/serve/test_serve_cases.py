"""Promises that only whole servers keep: cases of routers and leavers, priority, salt, the cache's share of usage."""

import gc
import os
import re
import selectors
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from serve_drive import Served, serving
from test_serve_leaving import connect

from tandem.observe.requests import RequestLedger
from tandem.observe.timeline import Timeline
from tandem.serve.options import ServeOptions

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GROWTH_BYTES = 10_000  # a round, of 23 requests: half a kilobyte forgotten for each would be seen
NUM_ROUNDS = int(os.environ.get("TANDEM_LEAVING_ROUNDS", "40"))
TESTS = Path(__file__).parent.parent


def test_every_case_has_a_test_of_its_name() -> None:
    """The forty cases of real servers' faults that this project answers; C01 to C40."""
    names = {
        number for file in TESTS.rglob("test_*.py") for number in re.findall(r"def test_c(\d\d)_", file.read_text())
    }
    assert names == {f"{number:02}" for number in range(1, 41)}


@contextmanager
def router(served: Served) -> Iterator[int]:
    """A proxy as simple as can be: one connection to the server for each of a client's, closed when that closes."""
    host, port = served.url.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def relay(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port))) as server, selectors.DefaultSelector() as waits:
            waits.register(client, selectors.EVENT_READ, server)
            waits.register(server, selectors.EVENT_READ, client)
            while not stop.is_set():
                for key, _ in waits.select(0.1):
                    try:
                        data = key.fileobj.recv(65536)
                        if not data:
                            return
                        key.data.sendall(data)
                    except OSError:
                        return

    def accept() -> None:
        while not stop.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=relay, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        listener.close()


@pytest.mark.parametrize("stream", [False, True])
def test_c39_clients_of_a_router_leave(stream: bool) -> None:
    """One slot, as many places as clients: each that leaves gives its place back, however early it left."""
    options = ServeOptions(max_requests=20, client_reserve=0.0)  # behind a router all are one client
    with serving(options, max_num_seqs=1, max_model_len=4096, step_s=0.005) as served, router(served) as port:
        served.canary()
        url, served.url = served.url, f"http://127.0.0.1:{port}"
        body = {"prompt": [7, 8], "max_tokens": 2000, "ignore_eos": True, "stream": stream}
        clients = [connect(served, body) for _ in range(14)]
        for _ in range(6):  # their bodies are not all there
            early = socket.create_connection(("127.0.0.1", port))
            early.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                          b"content-length: 99\r\n\r\n{")  # fmt: skip
            clients.append(early)
        deadline_s = time.monotonic() + 3
        while served.statistics()["requests"] < 14:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        time.sleep(0.2)
        served.url = url
        bystander = {"prompt": [9, 9], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(served.post, COMPLETIONS, bystander)
            time.sleep(0.05)
            for client in clients:
                client.close()
            began_s = time.monotonic()
            assert other.result().status_code == 200, "who stays is served"
        assert time.monotonic() - began_s < 1.5
        assert served.at_rest(2.0)["requests"] == 0
        began_s = time.monotonic()
        with ThreadPoolExecutor(20) as pool:  # every place is free again
            answers = list(pool.map(lambda i: served.post(COMPLETIONS, {**bystander, "prompt": [9, i]}), range(20)))
        assert {answer.status_code for answer in answers} == {200} and time.monotonic() - began_s < 5
        served.canary()


def test_c10_rounds_of_leavers_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rounds, stream and whole, running, queued and in a prefill: maps are empty, memory flat behind them."""
    engine = {"max_num_seqs": 2, "max_model_len": 2048, "step_s": 0.002, "max_batch_tokens": 64, "prefix_cache": False}
    # what is kept on purpose, the newest so many of each, has its bound early
    monkeypatch.setattr(RequestLedger.__init__, "__defaults__", (64,))
    monkeypatch.setattr(Timeline.__init__, "__defaults__", (2, 64))
    monkeypatch.setattr("tandem.serve.measure.RECENT", 64)
    with serving(ServeOptions(keep_alive=0.05), **engine) as served:
        front, journeys = served.service.engine._front, served.service.journeys
        journeys._capacity = 64
        served.canary()
        sizes = []
        tracemalloc.start()
        try:
            for number in range(NUM_ROUNDS):
                stream = number % 2 == 0
                forever = {"prompt": [7, number], "max_tokens": 2000, "ignore_eos": True, "stream": stream}
                left = [connect(served, {**forever, "n": 1 + number % 2}) for _ in range(2)]
                left += [connect(served, {**forever, "prompt": [8, i] * 20}) for i in range(20)]
                left.append(connect(served, {**forever, "prompt": [3 + i % 250 for i in range(1900)]}))
                time.sleep(0.05)
                for connection in left:
                    connection.close()
                served.at_rest(3.0)
                assert not front._answers and not served.service.streams and not served.service.meter.live
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert len(journeys) == 64
        quarter = len(sizes) // 4  # the first half fills the newest so many of everything
        growth = (min(sizes[-quarter:]) - min(sizes[-2 * quarter : -quarter])) / quarter
        assert growth < GROWTH_BYTES, [size >> 10 for size in sizes]
        served.canary()


def wait_for(come: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not come():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def body_of(path: str, text: str, **fields) -> dict:
    if path == COMPLETIONS:
        return {"prompt": text, "max_tokens": 4, **fields}
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    return {"input": text, "max_output_tokens": 4, **fields}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_the_smaller_priority_goes_first(path: str) -> None:
    with serving(policy="priority", max_num_seqs=1, step_s=0.01, max_model_len=512) as served:
        body = {"prompt": "busy", "max_tokens": 100, "ignore_eos": True, "priority": -9}
        ended: list[int] = []

        def ask(priority: int) -> None:
            assert served.post(path, body_of(path, "hi", priority=priority)).status_code == 200
            ended.append(priority)

        with ThreadPoolExecutor(5) as pool:
            pool.submit(served.post, COMPLETIONS, body)
            wait_for(lambda: served.statistics()["requests"] == 1)  # else the first of the others may come before it
            for place, priority in enumerate((3, 2, -1, 7)):
                pool.submit(ask, priority)
                wait_for(lambda num=place + 2: served.statistics()["requests"] >= num)
        assert ended == [-1, 2, 3, 7]
        served.at_rest()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_salts_keep_the_cache_entries_of_users_apart(path: str) -> None:
    def cached(salt: str | None) -> int:
        usage = served.post(path, body_of(path, "the same text for all " * 5, cache_salt=salt)).json()["usage"]
        details = usage["input_tokens_details" if path == RESPONSES else "prompt_tokens_details"]
        return int(details["cached_tokens"])

    with serving(max_model_len=512) as served:
        assert [cached(None), cached("a"), cached("b")] == [0, 0, 0]
        assert cached("a") == cached("b") == cached(None) >= 96
        served.canary()


def test_usage_adds_up_what_was_cached_of_all_prompts() -> None:
    with serving(max_model_len=512) as served:
        prompts = [[3 + (i * step) % 250 for i in range(length)] for step, length in ((3, 48), (7, 80), (11, 40))]
        usage = served.complete(prompts[0], max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        usage = served.complete(prompts[:2], n=2, max_tokens=2, ignore_eos=True)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (128, 8)
        assert 32 <= usage["prompt_tokens_details"]["cached_tokens"] <= 47
        alone = [served.complete(p, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] for p in prompts]
        assert alone[0] >= 32 and alone[1] >= 64 and alone[2] == 0
        alone[2] = served.complete(prompts[2], max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for n in (1, 2):
            body = {"prompt": prompts, "n": n, "max_tokens": 3, "ignore_eos": True}
            whole = served.complete(**body)["usage"]
            events = served.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
            assert whole == events[-2]["usage"]
            assert whole["prompt_tokens_details"]["cached_tokens"] == sum(alone)
            assert whole["total_tokens"] == 168 + 9 * n
        served.canary()
