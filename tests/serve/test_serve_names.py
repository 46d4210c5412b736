"""What requests say of themselves: hosts, encodings, charsets. What is not ours is refused by name."""

import json

import httpx
import pytest
from border_drive import JSON, answers, connect, everything, one, post, refusal
from serve_drive import Process

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
