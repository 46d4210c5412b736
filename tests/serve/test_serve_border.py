"""What clients do on the wire: slow, silent, huge. Nobody else notices it."""

import contextlib
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from border_drive import JSON, OPTIONS, answers, connect, everything, get, one, post, refusal, statistics
from serve_drive import Process

# ---------------------------------------------------------------- time


@pytest.mark.parametrize("sent", ["", "GET /hea", "GET /health HTTP/1.1\r\nhost: localhost\r\nx", "\r\n\r\n"])
def test_a_head_must_come_in_time(border: Process, sent: str) -> None:
    began_s = time.monotonic()
    raw = everything(connect(border, sent))
    assert 0.4 < time.monotonic() - began_s < 3
    assert (refusal(raw) == (408, "request_timeout")) if sent.strip() else raw == b""


def test_a_head_may_not_come_drop_by_drop(border: Process) -> None:
    connection, began_s = connect(border, "GET / HTTP/1.1\r\n"), time.monotonic()
    with pytest.raises(OSError):
        for number in range(200):
            connection.sendall(f"x-{number}: 1\r\n".encode())
            time.sleep(0.05)
    assert time.monotonic() - began_s < 5
    connection.close()


@pytest.mark.parametrize("headers", ["content-length: 100\r\n", "transfer-encoding: chunked\r\n"])
def test_a_body_must_come_in_time(border: Process, headers: str) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{JSON}{headers}\r\n"
    begin = '{"prompt":' if "length" in headers else '3\r\n{"p\r\n'
    began_s = time.monotonic()
    assert refusal(everything(connect(border, head + begin))) == (408, "request_timeout")
    assert 0.4 < time.monotonic() - began_s < 3


def test_an_idle_connection_may_wait_and_a_second_head_may_not(border: Process) -> None:
    connection = connect(border, get())
    assert one(connection).startswith(b"HTTP/1.1 200")
    time.sleep(0.8)  # longer than a head may take
    connection.sendall(get().encode())
    assert one(connection).startswith(b"HTTP/1.1 200")
    connection.sendall(b"GET /")
    assert refusal(everything(connection)) == (408, "request_timeout")


def test_silent_connections_lock_nobody_out() -> None:
    """With 256 descriptors, 300 silent sockets: whoever asks is answered, and asks in vain for a second at most."""
    with Process(nofile=256, options={"header_timeout": 60.0}, max_model_len=512) as server:
        host, port = server.url.split("//")[1].split(":")
        silent = []
        for _ in range(300):
            with contextlib.suppress(OSError):
                silent.append(socket.create_connection((host, int(port)), timeout=2))
        with contextlib.suppress(OSError):
            early = everything(connect(server, get(headers="connection: close\r\n")))
            assert early == b"" or answers(early)[0][0] == 503
        time.sleep(1.1)
        for _ in range(5):
            assert httpx.get(server.url + "/health").status_code == 200
            answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert answer.status_code == 200
        border = statistics(server)["connections"]
        assert border["limit"] == 192 and border["open"] <= 194 and border["evicted"] >= 1 and border["refused"] >= 100
        for connection in silent:
            connection.close()
        assert not any("Traceback" in line or "Too many" in line for line in server.lines), server.lines


def test_a_full_house_says_so_and_idle_ones_go_first(border: Process) -> None:
    streams = [
        connect(border, post({"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}))
        for _ in range(OPTIONS["max_connections"])
    ]
    for stream in streams:
        assert stream.recv(100).startswith(b"HTTP/1.1 200")
    full = connect(border, get())
    raw = everything(full)
    assert refusal(raw) == (503, "overloaded") and b"retry-after: 1" in raw
    for stream in streams[:2]:
        stream.close()
    time.sleep(0.2)
    idle = connect(border, get())
    assert b"200 OK" in one(idle)
    idle_too = connect(border, get())
    assert b"200 OK" in one(idle_too)
    time.sleep(1.1)
    assert b"200 OK" in one(connect(border, get()))
    assert idle.recv(1) == b""  # the one that was idle longer went for it
    idle_too.sendall(get().encode())
    assert b"200 OK" in one(idle_too)
    for stream in streams[2:]:
        assert stream.recv(1)
        stream.close()


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    from serve_drive import serving

    with serving(max_model_len=32768, pieces=["x" * 4000] * 3000) as served:
        served.service.border.send_s = 0.3
        host, port = served.url.split("//")[1].split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(post(body))
        deadline_s = time.monotonic() + 10
        while not served.service.border.num_stuck:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        served.at_rest()
        connection.close()
        served.canary()


# ---------------------------------------------------------------- size


def test_a_header_is_cut_off_at_its_limit(border: Process) -> None:
    connection, sent, waits = connect(border, "GET /health HTTP/1.1\r\nhost: localhost\r\nx: "), 0, []
    with ThreadPoolExecutor(1) as pool:

        def poll() -> None:
            with httpx.Client(base_url=border.url, headers={"connection": "close"}) as http:
                for _ in range(20):
                    began_s = time.monotonic()
                    assert http.get("/health").status_code == 200
                    waits.append(time.monotonic() - began_s)

        polled = pool.submit(poll)
        with contextlib.suppress(OSError):
            for _ in range(20):
                connection.sendall(b"a" * (1 << 20))
                sent += 1
        polled.result()
    with contextlib.suppress(OSError):
        assert refusal(everything(connection)) == (431, "headers_too_large")
    assert sorted(waits)[-2] < 0.3, waits
    assert statistics(border)["connections"]["malformed"] >= 1
    shown = httpx.get(border.url + "/metrics").text
    assert re.search(r'http_connections_refused_total\{[^}]*reason="malformed"[^}]*\} [1-9]', shown)


@pytest.mark.parametrize("size, many, status", [(60_000, 1, 200), (70_000, 1, 431), (10, 20_000, 431)])
def test_the_limit_counts_the_whole_head(border: Process, size: int, many: int, status: int) -> None:
    headers = "".join(f"x-{number}: {'a' * size}\r\n" for number in range(many))
    connection = connect(border, get(headers=f"connection: close\r\n{headers}"))
    assert answers(everything(connection))[0][0] == status


def test_a_long_path_and_endless_trailers_have_the_limit_too(border: Process) -> None:
    assert refusal(everything(connect(border, get("/" + "a" * 70_000)))) == (431, "headers_too_large")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{JSON}transfer-encoding: chunked\r\n\r\n0\r\n"
    trailers = "".join(f"x-{number}: {'a' * 1000}\r\n" for number in range(200))
    assert refusal(everything(connect(border, head + trailers)))[0] == 431


def test_a_body_that_is_too_long_ends_the_connection(border: Process) -> None:
    """413 can be read although the client is still sending; then the connection is closed."""
    connection = connect(
        border, f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: {10**12}\r\n\r\n"
    )
    with contextlib.suppress(OSError):
        for _ in range(10):
            connection.sendall(b"a" * (1 << 16))
    assert refusal(everything(connection)) == (413, "request_too_large")
    began_s = time.monotonic()
    while statistics(border)["connections"]["open"] > 1:
        assert time.monotonic() - began_s < 3
        time.sleep(0.05)


@pytest.mark.parametrize("path, status", [("/nowhere", 404), ("/health", 405)])
def test_an_answer_before_the_body_ends_the_connection(border: Process, path: str, status: int) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 500000\r\n\r\n"
    connection = connect(border, head)
    time.sleep(0.05)
    connection.sendall(b"a" * 100_000)
    assert refusal(everything(connection))[0] == status


def test_bodies_share_one_budget(border: Process) -> None:
    """Three bodies of 1 MiB are being read; the fourth is refused by its length, a chunked one when it gets there."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{JSON}"
    size = (1 << 20) - 10
    slow = [connect(border, f"{head}content-length: {size}\r\n\r\n".encode() + b" " * (size - 1)) for _ in range(3)]
    deadline_s = time.monotonic() + 0.4
    while statistics(border)["bodies"]["bytes"] < 3 * (size - 1):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    raw = everything(connect(border, f"{head}content-length: {size}\r\n\r\n"))
    assert refusal(raw) == (503, "overloaded") and b"retry-after" in raw
    chunk = b"%x\r\n" % 5000 + b" " * 5000 + b"\r\n"
    assert refusal(everything(connect(border, f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunk))) == (
        503, "overloaded",
    )  # fmt: skip
    for connection in slow:
        assert refusal(everything(connection)) == (408, "request_timeout")
    found = statistics(border)["bodies"]
    assert found["refused"] >= 2 and found["late"] >= 3 and found["bytes"] == 0


def test_many_large_bodies_take_little_memory() -> None:
    """100 bodies of 4 MB at once, budget 16 MiB: the process grows by less than 150 MB; most get 429 or 503."""
    body = json.dumps({"prompt": "word " * 800_000, "max_tokens": 1}).encode()
    with Process(options={"max_bodies": 16 << 20}, max_model_len=512) as server, ThreadPoolExecutor(100) as pool:
        process = psutil.Process(server.process.pid)
        before, most = process.memory_info().rss, 0

        def send() -> int:
            headers = {"content-type": "application/json"}
            return httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=60).status_code

        sent = [pool.submit(send) for _ in range(100)]
        while not all(future.done() for future in sent):
            most = max(most, process.memory_info().rss)
            time.sleep(0.01)
        statuses = [future.result() for future in sent]
        refused = statuses.count(429) + statuses.count(503)
        assert set(statuses) <= {400, 429, 503} and refused > 20 and statuses.count(400) >= 1, statuses
        assert (most - before) / 1e6 < 150
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200 and statistics(server)["bodies"]["bytes"] == 0
