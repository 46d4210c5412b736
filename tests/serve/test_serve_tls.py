"""HTTPS with a certificate of our own: whole and streamed answers, and clients that do not finish their handshake."""

import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serve_drive import Process, Served, events_of

from tandem.cli import main

OPTIONS = {"header_timeout": 0.5, "max_connections": 20}


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificate.pem and key.pem, for localhost and 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def https(trust: Path) -> Iterator[Process]:
    options = {"tls_certificate": str(trust / "certificate.pem"), "tls_key": str(trust / "key.pem"), **OPTIONS}
    with Process(options=options, step_s=0.01, max_model_len=1024) as server:
        assert server.url.startswith("https://")
        yield server
        assert not any("Traceback" in line or "never retrieved" in line for line in server.lines), server.lines


@pytest.fixture
def client(https: Process, trust: Path) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(trust / "certificate.pem"))
    with httpx.Client(base_url=https.url, verify=context, timeout=10) as http:
        yield http


def plain(server: Process, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=5)
    connection.sendall(data)
    return connection


def test_whole_and_streamed(client: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        events = list(events_of(answer.iter_lines()))
    assert events[-1] == "[DONE]" and "".join(e["choices"][0]["text"] for e in events[:-1]) == whole
    long = client.post("/v1/completions", json={"prompt": "word " * 100_000})
    assert long.status_code == 400


def test_an_unknown_certificate_is_not_trusted(https: Process) -> None:
    with pytest.raises(httpx.ConnectError):
        httpx.get(https.url + "/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(https.url.replace("https", "http") + "/health", timeout=5)


def test_our_own_clients_trust_whom_they_are_told_to(
    https: Process, trust: Path, tmp_path: Path, client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, empty = tmp_path / "in.jsonl", tmp_path / "empty.pem"
    lines.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n')
    empty.write_text("nothing\n")
    name = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["id"]

    def commands(url: str, *more: str) -> Iterator[list[str]]:
        load = ["--requests", "2", "--concurrency", "2", "--warm-up", "0", "--new", "2", "--prompt", "3"]
        yield ["explain", name, "--url", url, *more]
        yield ["bench", "serve", "--base-url", url, *load, *more]
        yield ["bench", "serve", "--base-url", url, "--model", "null", *load, *more]
        yield ["batch", str(lines), "-o", str(tmp_path / "out.jsonl"), "--base-url", url, *more]

    certificate = str(trust / "certificate.pem")
    for command in commands(https.url):
        assert main(command) == 1
        told = capsys.readouterr().err
        assert "is not trusted: self-signed certificate" in told and "--cacert" in told, (command, told)
    for command in commands(https.url.replace("127.0.0.1", "127.1"), "--cacert", certificate):
        assert main(command) == 1
        told = capsys.readouterr().err
        assert "not valid for '127.1'" in told and "a name or address that" in told, (command, told)
    for command in commands(https.url, "--cacert", str(empty)):
        assert main(command) == 2 and "holds no certificate" in capsys.readouterr().err
    for command in commands(https.url, "--cacert", str(empty) + "x"):
        assert main(command) == 2 and "cannot be read: No such file" in capsys.readouterr().err
    for command in commands(https.url.replace("https", "http"), "--cacert", certificate):
        assert main(command) == 2 and "https://" in capsys.readouterr().err
    assert main(["explain", name, "--url", https.url.replace("https", "http")]) == 1
    assert "hint: a server with a certificate has https://" in capsys.readouterr().err
    for command in commands(https.url, "--cacert", certificate):
        assert main(command) == 0, capsys.readouterr().err
    assert main(["batch", str(lines), "-o", str(tmp_path / "other.jsonl"), "--cacert", certificate]) == 2
    assert "--base-url" in capsys.readouterr().err


def test_a_server_without_tls_is_said_to_have_none(null: Served, capsys: pytest.CaptureFixture[str]) -> None:
    url = null.url.replace("http://", "https://")
    for command in (["explain", "x", "--url", url], ["bench", "serve", "--base-url", url]):
        assert main(command) == 1
        told = capsys.readouterr().err
        assert "no TLS connection with" in told and "has http:// in its URL" in told, told


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100]
)
def test_a_handshake_must_be_finished_in_time(https: Process, client: httpx.Client, sent: bytes) -> None:
    began_s = time.monotonic()
    connection = plain(https, sent)
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    connection.close()
    assert time.monotonic() - began_s < 3
    assert client.get("/health").status_code == 200


def test_a_head_must_come_in_time_here_too(https: Process, trust: Path) -> None:
    context = ssl.create_default_context(cafile=str(trust / "certificate.pem"))
    with context.wrap_socket(plain(https), server_hostname="localhost") as connection:
        connection.sendall(b"GET / HTT")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_one_that_goes_is_noticed(https: Process, client: httpx.Client, trust: Path) -> None:
    """Its close_notify is its end: half-closed connections are for plain HTTP."""
    context = ssl.create_default_context(cafile=str(trust / "certificate.pem"))
    body = b'{"prompt": "a", "max_tokens": 1000, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n"
    with context.wrap_socket(plain(https), server_hostname="localhost") as connection:
        connection.sendall(head % len(body) + body)
        while not client.get("/load").json()["requests"]:
            time.sleep(0.01)
    began_s = time.monotonic()
    while client.get("/load").json()["requests"]:
        assert time.monotonic() - began_s < 1.5
        time.sleep(0.01)


def test_unfinished_handshakes_count_and_make_room(https: Process, client: httpx.Client, trust: Path) -> None:
    """With a limit on heads of 60 s, 30 silent ones take all 20 places; one that asks gets in within two seconds."""
    options = {"tls_certificate": str(trust / "certificate.pem"), "tls_key": str(trust / "key.pem"), **OPTIONS}
    with Process(options={**options, "header_timeout": 60.0}, max_model_len=512) as server:
        silent = [plain(server) for _ in range(30)]
        time.sleep(1.1)
        context = ssl.create_default_context(cafile=str(trust / "certificate.pem"))
        with httpx.Client(base_url=server.url, verify=context, timeout=10) as http:
            border = http.get("/load").json()["connections"]
        assert border["open"] <= 21 and border["refused"] >= 10 and border["evicted"] >= 1
        for connection in silent:
            connection.close()


def test_a_silent_client_holds_nobody_up(trust: Path) -> None:
    """An idle connection goes at once for a new one or at the end, although its client says no goodbye."""
    options = {"tls_certificate": str(trust / "certificate.pem"), "tls_key": str(trust / "key.pem"), **OPTIONS}
    context = ssl.create_default_context(cafile=str(trust / "certificate.pem"))
    get = b"GET /load HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with Process(options={**options, "max_connections": 8}, max_model_len=512) as server:
        silent = [context.wrap_socket(plain(server), server_hostname="localhost") for _ in range(8)]
        for connection in silent:
            connection.sendall(get)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(1.1)
        for _ in range(4):
            silent.append(context.wrap_socket(plain(server), server_hostname="localhost"))
            silent[-1].sendall(get)
            assert silent[-1].recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(0.3)
        with httpx.Client(base_url=server.url, verify=context, timeout=10) as http:
            border = http.get("/load").json()["connections"]
            assert border["open"] <= 9 and border["evicted"] >= 4, border
            began_s = time.monotonic()
            server.process.terminate()
            assert server.wait() == 0 and time.monotonic() - began_s < 0.9
        for connection in silent:
            connection.close()
