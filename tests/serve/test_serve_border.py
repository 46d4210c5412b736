"""What clients do on the wire: slow, silent, huge, half-closed, pipelined, malformed. Nobody else notices it."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from serve_drive import Process

JSON = "content-type: application/json\r\n"
OPTIONS = {
    "header_timeout": 0.5, "body_timeout": 0.5, "max_body": 1 << 20, "max_bodies": 3 << 20, "max_connections": 40,
    "keep_alive": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with Process(options=OPTIONS, step_s=0.02, max_model_len=2048) as server:
        yield server


@pytest.fixture
def border(process: Process) -> Iterator[Process]:
    """Behind each test the server is at rest and well, and no connection is left."""
    yield process
    while OPEN:
        OPEN.pop().close()
    deadline_s = time.monotonic() + 5
    while True:
        now = statistics(process)  # an error body as long as the connections that were just closed fill the house
        if "error" not in now:
            busy = now["requests"] or now["engine"]["open"] or now["bodies"]["bytes"]
            if not busy and now["connections"]["open"] <= 1:
                break
        assert time.monotonic() < deadline_s, now
        time.sleep(0.02)
    canary = post({"prompt": "a", "max_tokens": 1}, "connection: close\r\n")
    assert answers(everything(connect(process, canary)))[0][0] == 200
    assert not any("Traceback" in line or "never retrieved" in line for line in process.lines), process.lines


OPEN: list[socket.socket] = []


def connect(server: Process, data: bytes | str = b"") -> socket.socket:
    """A connection over which that is sent; closed behind the test at the latest."""
    host, port = server.url.split("//")[1].split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    OPEN.append(connection)
    connection.sendall(data if isinstance(data, bytes) else data.encode())
    return connection


def post(body: dict[str, Any] | bytes, headers: str = "", path: str = "/v1/completions", version: str = "1.1") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\n{JSON}{headers}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def get(path: str = "/health", headers: str = "", version: str = "1.1") -> str:
    return f"GET {path} HTTP/{version}\r\nhost: localhost\r\n{headers}\r\n"


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes; a reset counts as a failure."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    connection.close()
    return b"".join(parts)


def one(connection: socket.socket) -> bytes:
    """One answer on a connection that stays; a reset, or its end, gives b""."""
    raw = b""
    while not (b"\r\n\r\n" in raw and answers(raw)):
        if not (part := connection.recv(1 << 16)):
            return b""
        raw += part
    return raw


def answers(raw: bytes) -> list[tuple[int, bytes]]:
    """(status, body) of each answer with a Content-Length; interim ones are left out."""
    found = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 100:
            raw = rest
            continue
        length = int(re.search(rb"content-length: (\d+)", head.lower()).group(1))  # type: ignore[union-attr]
        if len(rest) < length:
            break
        found.append((status, rest[:length]))
        raw = rest[length:]
    return found


def refusal(raw: bytes) -> tuple[int, str]:
    """(status, code) of the one answer there is; it ends the connection."""
    assert b"connection: close" in raw.lower(), raw
    [(status, body)] = answers(raw)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["code"]


def statistics(server: Process) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        answers(everything(connect(server, get("/load", "connection: close\r\n"))))[0][1]
    )
    return found


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
    """100 bodies of 4 MB at once, with a budget of 16 MiB: the process grows by less than 150 MB; most get 503."""
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
        assert set(statuses) <= {400, 503} and statuses.count(503) > 20 and statuses.count(400) >= 1, statuses
        assert (most - before) / 1e6 < 150
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200 and statistics(server)["bodies"]["bytes"] == 0


# ---------------------------------------------------------------- half-closed connections, and gone ones


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_has_closed_its_side_is_answered(border: Process, version: str) -> None:
    connection = connect(border, get(version=version))
    connection.shutdown(socket.SHUT_WR)
    [(status, body)] = answers(everything(connection))
    assert status == 200 and json.loads(body) == {"status": "ok"}


def test_a_generation_too_whole_or_streamed(border: Process) -> None:
    body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}  # 0.4 s
    connection = connect(border, post(body))
    connection.shutdown(socket.SHUT_WR)
    [(status, answer)] = answers(everything(connection))
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 20
    connection = connect(border, post({**body, "stream": True, "stream_options": {"include_usage": True}}))
    connection.shutdown(socket.SHUT_WR)
    raw = everything(connection)
    assert b'"completion_tokens":20' in raw and b"data: [DONE]" in raw and raw.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_one_that_goes_is_noticed(border: Process, how: str, stream: bool) -> None:
    """Closed, closed behind a half-close, or reset: the request ends within a few steps."""
    connection = connect(border, post({"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": stream}))
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
    deadline_s = time.monotonic() + 5
    while not statistics(border)["requests"]:
        assert time.monotonic() < deadline_s
    time.sleep(0.1)
    assert statistics(border)["requests"] == 1
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    began_s = time.monotonic()
    while statistics(border)["requests"]:
        assert time.monotonic() - began_s < 1.5
        time.sleep(0.01)


def test_half_a_request_is_no_request(border: Process) -> None:
    connection = connect(border, post({"prompt": "a"})[:-3])
    connection.shutdown(socket.SHUT_WR)
    assert everything(connection) == b""


# ---------------------------------------------------------------- the protocol's corners


def test_pipelined_requests_are_answered_in_order(border: Process) -> None:
    ask = post({"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    raw = everything(
        connect(border, ask + get("/version").encode() + ask + get(headers="connection: close\r\n").encode())
    )
    found = answers(raw)
    assert [status for status, _ in found] == [200] * 4
    assert b"version" in found[1][1] and b"text_completion" in found[2][1]


def test_pipelined_requests_of_one_that_goes_never_run(border: Process) -> None:
    ask = post({"prompt": "a", "max_tokens": 2000, "ignore_eos": True})
    connection = connect(border, ask * 3)
    time.sleep(0.2)
    assert statistics(border)["requests"] == 1
    connection.close()
    time.sleep(0.5)
    assert statistics(border)["requests"] == 0


GARBAGE = [b"\x16\x03garbage\r\n", b"x: 1\r\n\r\n", post(b"{}", "transfer-encoding: chunked\r\n")]
BROKEN = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n{JSON}transfer-encoding: chunked\r\n\r\n".encode() + b"zz\r\n"


@pytest.mark.parametrize("num_asked", [1, 3])
@pytest.mark.parametrize("garbage", [*GARBAGE, BROKEN])
def test_garbage_behind_requests_takes_no_answer_away(border: Process, garbage: bytes, num_asked: int) -> None:
    ask = post({"prompt": "a", "max_tokens": 20, "ignore_eos": True})  # 0.4 s
    connection = connect(border, ask * num_asked + garbage)
    time.sleep(0.05)
    with contextlib.suppress(OSError):
        connection.sendall(ask)  # behind garbage nothing is a request
    found = answers(raw := everything(connection))
    assert [status for status, _ in found] == [200] * num_asked + [400], raw
    assert json.loads(found[-1][1])["error"]["code"] == "invalid_http" and raw.count(b"connection: close") == 1
    assert all(json.loads(body)["usage"]["completion_tokens"] == 20 for _, body in found[:-1])


def test_a_client_may_close_its_side_behind_garbage(border: Process) -> None:
    ask = post({"prompt": "a", "max_tokens": 20, "ignore_eos": True})
    connection = connect(border, ask + GARBAGE[0])
    connection.shutdown(socket.SHUT_WR)
    assert [status for status, _ in answers(everything(connection))] == [200, 400]


def test_a_stream_ends_before_the_garbage_is_refused(border: Process) -> None:
    ask = post({"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": True})
    raw = everything(connect(border, ask + GARBAGE[0]))
    whole, _, rest = raw.partition(b"data: [DONE]")
    assert whole.startswith(b"HTTP/1.1 200") and rest.partition(b"0\r\n\r\n")[2].startswith(b"HTTP/1.1 400")


def test_one_that_leaves_behind_garbage_is_noticed(border: Process) -> None:
    ask = post({"prompt": "a", "max_tokens": 2000, "ignore_eos": True})
    connection = connect(border, ask + GARBAGE[0])
    time.sleep(0.1)
    assert statistics(border)["requests"] == 1
    connection.close()
    began_s = time.monotonic()
    while statistics(border)["requests"]:
        assert time.monotonic() - began_s < 1.5
        time.sleep(0.01)


@pytest.mark.parametrize("sent", [
    "hello\r\n\r\n", "\x16\x03\x01\x02", "GET /health HTTP/9.9\r\n\r\n", "GET  HTTP/1.1\r\n\r\n",
    "CONNECT a:1 HTTP/1.1\r\n\r\n", "GET /\r\n\r\n", "GET /health\r\nhost: localhost\r\n\r\n",
    "GET /health HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n", "GET http://h HTTP/1.1\r\nhost: localhost\r\n\r\n",
    f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 5\r\ncontent-length: 6\r\n\r\n{{}}",
    f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: -1\r\n\r\n",
    f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 4\r\n"
    "transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{JSON}transfer-encoding: chunked\r\n\r\nzz\r\n",
])  # fmt: skip
def test_what_is_no_http_gets_an_error_body(border: Process, sent: str) -> None:
    """Both Content-Length and chunked (request smuggling) among it."""
    assert refusal(everything(connect(border, sent.encode("latin-1")))) == (400, "invalid_http")


def test_expect_continue(border: Process) -> None:
    data = post({"prompt": "a", "max_tokens": 1}, "expect: 100-continue\r\nconnection: close\r\n")
    head, _, body = data.partition(b"\r\n\r\n")
    connection = connect(border, head + b"\r\n\r\n")
    assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert answers(everything(connection))[0][0] == 200
    refused = head.replace(b"/v1/completions", b"/v1/nothing")
    assert everything(connect(border, refused + b"\r\n\r\n")).startswith(b"HTTP/1.1 404")


def test_http_1_0(border: Process) -> None:
    """Whole and streamed: no chunks are made, the end of the connection is the end."""
    body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
    assert answers(everything(connect(border, post(body, version="1.0"))))[0][0] == 200
    raw = everything(connect(border, post({**body, "stream": True}, version="1.0")))
    assert b"[DONE]" in raw


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_other_protocols_are_not_taken_up(border: Process, upgrade: str) -> None:
    """As Java's clients offer h2c with every request that is not encrypted: body and all it is answered in HTTP/1.1."""
    offer = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {upgrade}\r\nhttp2-settings: AAMAAABkAAQ\r\n"
    sent = get(headers=offer).encode() + post({"prompt": "abc", "max_tokens": 2}, offer)
    connection = connect(border, sent[:-5])
    time.sleep(0.05)
    connection.sendall(sent[-5:] + get(headers="connection: close\r\n").encode())
    found = answers(everything(connection))
    assert [status for status, _ in found] == [200] * 3
    assert json.loads(found[1][1])["usage"]["prompt_tokens"] == 3
    both = post({"prompt": "a", "max_tokens": 2}, f"upgrade: {upgrade}\r\nconnection: upgrade, close\r\n")
    assert answers(everything(connect(border, both)))[0][0] == 200


def test_head_and_options(border: Process) -> None:
    for path in ("/health", "/v1/models", "/", "/metrics"):
        answer = httpx.head(border.url + path)
        assert answer.status_code == 200 and not answer.content, path
    for path in ("/v1/chat/completions", "/health"):
        answer = httpx.options(
            border.url + path, headers={"origin": "http://x", "access-control-request-method": "POST"}
        )
        assert answer.status_code == 405 and "allow" in answer.headers, path
        assert not any(name.startswith("access-control") for name in answer.headers)


# ---------------------------------------------------------------- names and kinds


def test_no_redirects(border: Process) -> None:
    for method, path in (("POST", "/v1/completions/"), ("GET", "/health/"), ("GET", "/metrics/"), ("GET", "/page")):
        answer = httpx.request(method, border.url + path, json={} if method == "POST" else None)
        assert answer.status_code == 404 and "location" not in answer.headers, path


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "127.0.0.1", "127.9.9.9:1", "[::1]:8000", "x.localhost.", "[::ffff:127.0.0.1]:1"],
)
def test_local_names_are_ours(border: Process, host: str) -> None:
    assert httpx.get(border.url + "/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", [
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost:evil.example",
    "localhost:80@evil.example", "evil.example@localhost", "[::1]evil.example", "[::ffff:10.0.0.1]", "localhost:80:80",
])  # fmt: skip
def test_other_names_are_not(border: Process, host: str) -> None:
    """DNS rebinding: a page whose name resolves to 127.0.0.1 must not get at a server that asks for no key."""
    for path in ("/health", "/", "/v1/models"):
        raw = everything(connect(border, f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"))
        assert refusal(raw) == (421, "misdirected_request"), path


@pytest.mark.parametrize("name, status", [
    ("evil.example", 421), ("localhost@evil.example", 421), ("localhost", 200), ("127.0.0.1:80", 200),
])  # fmt: skip
def test_a_target_that_names_its_host_counts_for_the_header(border: Process, name: str, status: int) -> None:
    for host in ("localhost", "evil.example"):
        sent = f"GET http://{name}/health?a=1 HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        assert answers(everything(connect(border, sent)))[0][0] == status, host


def test_a_name_may_be_allowed_and_keys_make_the_check_needless() -> None:
    from tandem.serve.options import ServeOptions
    from tandem.serve.server import _hosts

    assert _hosts(ServeOptions(), ()) == () and _hosts(ServeOptions(host="::1"), ()) == ()
    assert _hosts(ServeOptions(), ("key",)) is None and _hosts(ServeOptions(host="0.0.0.0"), ()) is None
    with Process(options={"allowed_host": ["Chat.Example:443"]}, max_model_len=512) as server:
        statuses = [
            httpx.get(server.url + "/health", headers={"host": host}).status_code
            for host in ("chat.example", "chat.example:8443", "localhost", "example")
        ]
        assert statuses == [200, 200, 200, 421]


@pytest.mark.parametrize("headers, word", [
    ({"content-encoding": "gzip"}, "gzip"), ({"content-encoding": "br, gzip"}, "br, gzip"),
    ({"content-type": "application/json; charset=latin-1"}, "latin-1"),
    ({"content-type": 'application/json; charset="utf-16"'}, "utf-16"), ({"content-type": "text/plain"}, "text/plain"),
])  # fmt: skip
def test_bodies_of_another_kind_are_named(border: Process, headers: dict[str, str], word: str) -> None:
    sent = {"content-type": "application/json", **headers}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
        answer = httpx.post(border.url + path, content=b"{}", headers=sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (415, "unsupported_media_type") and word in error["message"]


@pytest.mark.parametrize("more, word", [
    ("content-encoding: identity\r\ncontent-encoding: gzip\r\n", "gzip"),
    ("content-type: text/plain\r\n", "text/plain"), (JSON, "2 Content-Types"),
])  # fmt: skip
def test_a_header_given_twice_counts_twice(border: Process, more: str, word: str) -> None:
    [(status, body)] = answers(everything(connect(border, post(b"{}", f"{more}connection: close\r\n"))))
    assert status == 415 and word in json.loads(body)["error"]["message"]


def test_a_compressed_transfer_is_named(border: Process) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n{JSON}transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
    raw = one(connect(border, head))
    assert answers(raw)[0][0] == 415 and b"gzip" in raw


def test_plain_kinds_are_read(border: Process) -> None:
    for kind in (
        "application/json; charset=UTF-8",
        "Application/JSON;charset=utf8",
        'application/json; charset="utf-8"',
    ):
        headers = {"content-type": kind, "content-encoding": "identity"}
        answer = httpx.post(
            border.url + "/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers
        )
        assert answer.status_code == 200, kind
