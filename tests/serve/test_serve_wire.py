"""What clients do on the wire: half-closed, gone, pipelined, malformed. Nobody else notices it."""

import contextlib
import json
import socket
import time

import httpx
import pytest
from border_drive import JSON, answers, connect, everything, get, post, refusal, statistics
from serve_drive import Process

CLOSE = "connection: close\r\n"

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
    for headers in ("", "connection: keep-alive\r\n", "expect: 100-continue\r\n"):
        raw = everything(connect(border, post({**body, "stream": True}, headers, version="1.0")))
        head, _, stream = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower() and b"keep-alive" not in head.lower()
        *events, done, last = stream.split(b"\n\n")
        assert (done, last) == (b"data: [DONE]", b"")
        assert len(events) >= 2 and all(json.loads(event.removeprefix(b"data: "))["choices"] for event in events)
    assert b"transfer-encoding: chunked" in everything(connect(border, post({**body, "stream": True}, CLOSE))).lower()


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


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 0, 400), ("1.1", 1, 200), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 1, 200), ("1.0", 2, 400)],
)
def test_a_request_names_one_host(border: Process, version: str, hosts: int, status: int) -> None:
    head = f"GET /health HTTP/{version}\r\n{'host: localhost' + chr(13) + chr(10) if hosts else ''}"
    head += "Host: 127.0.0.1\r\n" * (hosts - 1) + "connection: close\r\n\r\n"
    raw = everything(connect(border, head))
    assert [found for found, _ in answers(raw)] == [status]
    if status == 400:
        assert refusal(raw) == (400, "invalid_http") and b"Host header" in raw
