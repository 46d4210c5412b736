"""Raw sockets against a server with tight limits: requests as bytes, answers taken apart."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

from serve_drive import Process

JSON = "content-type: application/json\r\n"
OPTIONS = {
    "header_timeout": 0.5, "body_timeout": 0.5, "max_body": 1 << 20, "max_bodies": 3 << 20, "max_connections": 40,
    "keep_alive": 0.5, "client_reserve": 0.0,
}  # fmt: skip

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


@contextlib.contextmanager
def at_rest_behind(process: Process) -> Iterator[Process]:
    """Behind the block the server is at rest and well, and no connection is left."""
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
