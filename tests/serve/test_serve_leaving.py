"""Clients that leave, clients that share an id, slow readers, many at once: nobody else notices, nothing is left."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from serve_drive import Served, serving

from tandem.serve.options import ServeOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def connect(served: Served, body: dict, path: str = COMPLETIONS, headers: str = "") -> socket.socket:
    """Send a request and leave the connection open."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    data = json.dumps(body).encode()
    headers += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode() + data)
    return connection


def test_c03_two_requests_of_one_client_id(null: Served) -> None:
    """A client's X-Request-Id is not read: each answer has an id of its own, and ending one leaves the other."""
    bodies = [
        {"prompt": [9, i], "max_tokens": 200, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        for i in (1, 2)
    ]
    alone = [null.complete(**body)["choices"][0]["token_ids"] for body in bodies]
    first = connect(null, {**bodies[0], "stream": True}, headers="x-request-id: same\r\n")
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(null.post, COMPLETIONS, body, headers={"x-request-id": "same"}) for body in bodies]
        first.close()
        answers = [future.result().json() for future in both]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == alone
    assert answers[0]["id"] != answers[1]["id"]
    long = null.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "i" * (1 << 20)})
    assert long.status_code in (200, 400, 431)


def test_c07_many_at_once_and_a_huge_prompt_stall_nobody() -> None:
    with serving(step_s=0.005, max_model_len=4096, in_process=False) as served:
        kinds = [
            (
                COMPLETIONS,
                {"prompt": f"text number {i} " * (i % 40 + 1), "max_tokens": 3, "temperature": 0, "stop": ["zq"]},
            )
            for i in range(32)
        ]
        kinds += [
            (CHAT, {"messages": [{"role": "user", "content": f"hé {i} " * 20}], "max_tokens": 3, "temperature": 0})
            for i in range(16)
        ]
        kinds += [("/tokenize", {"prompt": f"naïve 日本 {i}" * 50}) for i in range(16)]

        def answer(kind: tuple[str, dict]) -> object:
            got = served.post(*kind)
            assert got.status_code == 200, got.text
            body = got.json()
            return body.get("tokens") or [
                c["text"] if "text" in c else c["message"]["content"] for c in body["choices"]
            ]

        series = [answer(kind) for kind in kinds]
        waits: list[float] = []
        stop = threading.Event()

        def poll() -> None:
            while not stop.wait(0.03):
                began_s = time.monotonic()
                assert served.http.get("/health").status_code == 200
                waits.append(time.monotonic() - began_s)

        poller = threading.Thread(target=poll)
        poller.start()
        with ThreadPoolExecutor(24) as pool:
            huge = pool.submit(served.post, COMPLETIONS, {"prompt": "word " * 400_000})
            at_once = list(pool.map(answer, kinds))
            refused = huge.result()
        stop.set()
        poller.join()
        assert at_once == series
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        # Encoding 2 MB takes seconds; the bound leaves room for two busy cores.
        assert sorted(waits)[int(len(waits) * 0.9)] < 1.0, waits
        served.canary()


def test_c10_the_clients_have_gone() -> None:
    options = {"max_num_seqs": 2, "max_model_len": 2048, "step_s": 0.01, "max_batch_tokens": 64}
    with serving(ServeOptions(keep_alive=0.05), **options) as served:
        served.canary()
        engine, meter = served.service.engine, served.service.meter
        for number in range(12):
            prompts = meter.num_prompt_tokens
            aborted = meter.num_aborted
            forever = {"prompt": [7, number], "max_tokens": 2000, "ignore_eos": True}
            running = [
                connect(served, {**forever, "stream": number % 2 == 0, "n": 1 + number % 2})
                for _ in range(2 - number % 2)
            ]
            deadline_s = time.monotonic() + 2
            while engine.statistics()["planner"]["num_running"] < 2 or meter.num_prompt_tokens - prompts < 2:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            ran = meter.num_prompt_tokens
            queued = [connect(served, {"prompt": [8, i] * 20, "max_tokens": 2000}) for i in range(20)]
            queued.append(connect(served, {"prompt": [3 + i % 250 for i in range(1900)], "stream": True}))
            time.sleep(0.1)
            for connection in running + queued:
                connection.close()
            served.at_rest(2.0)
            assert meter.num_prompt_tokens == ran, "what was queued has run"
            assert meter.num_aborted > aborted and not meter.live
        assert not engine._front._answers and not served.service.streams and not served.service.num_requests
        served.canary()


def test_c10_leaving_in_a_long_prefill_and_before_the_body() -> None:
    with serving(max_model_len=4096, step_s=0.05, max_batch_tokens=64, max_num_seqs=4) as served:
        for stream in (True, False):
            connection = connect(served, {"prompt": [3 + i % 250 for i in range(4000)], "stream": stream})
            time.sleep(0.3)
            assert served.statistics()["engine"]["open"] == 1
            connection.close()
            began_s = time.monotonic()
            served.at_rest(1.5)
            assert time.monotonic() - began_s < 1.0
        host, port = served.url.removeprefix("http://").split(":")
        half = socket.create_connection((host, int(port)))
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        time.sleep(0.1)
        half.close()
        served.canary()


def test_a_reader_that_does_not_read_delays_nobody() -> None:
    with serving(max_model_len=8192, step_s=0.001) as served:
        body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True, "logprobs": 5}
        asleep = [connect(served, body) for _ in range(4)]
        began_s = time.monotonic()
        for _ in range(5):
            served.complete(max_tokens=20, ignore_eos=True)
        assert time.monotonic() - began_s < 3.0
        for connection in asleep:
            connection.close()
        served.at_rest(3.0)


def test_many_streams_lose_and_double_nothing() -> None:
    """100 streams over the process border: each token once, in order."""
    with serving(max_model_len=512, max_num_seqs=256, step_s=0.02, in_process=False) as served:

        def one(number: int) -> bool:
            body = {
                "prompt": [5, number],
                "max_tokens": 30,
                "ignore_eos": True,
                "temperature": 0,
                "return_token_ids": True,
            }
            events = served.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
            tokens = [t for e in events[:-1] for c in e["choices"] for t in c["token_ids"]]
            assert events[-2]["usage"]["completion_tokens"] == len(tokens) == 30
            return tokens == served.complete(**body)["choices"][0]["token_ids"]

        with ThreadPoolExecutor(50) as pool:
            assert all(pool.map(one, range(100)))
        served.at_rest()
