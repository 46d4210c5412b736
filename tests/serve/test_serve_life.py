"""Ends of a server: signals in every phase, an engine that dies, hangs or is killed, a server that is killed.

Each server here is a process of its own, as ``tandem serve`` runs it.
"""

import json
import os
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from serve_drive import Process, events_of, serving

from tandem.weights.pull import pull

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "go", "max_tokens": 2000, "ignore_eos": True}


def child_of(server: Process) -> psutil.Process:
    [child] = psutil.Process(server.process.pid).children()
    return child


def stream(server: Process, body: dict, begun: threading.Event | None = None) -> list:
    """All events of a stream; begun is set with the first."""
    events = []
    with httpx.stream("POST", server.url + COMPLETIONS, json={**body, "stream": True}, timeout=30) as answer:
        if answer.status_code != 200:
            return [answer.status_code, json.loads(answer.read())]
        for event in events_of(answer.iter_lines()):
            events.append(event)
            if begun is not None:
                begun.set()
    return events


def post(server: Process, body: dict) -> httpx.Response:
    return httpx.post(server.url + COMPLETIONS, json=body, timeout=30)


def quiet(server: Process) -> None:
    """No traceback, no prompt in the log."""
    text = "\n".join(server.lines)
    assert "Traceback" not in text and "never retrieved" not in text, text


def port_is_free(server: Process) -> None:
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))


@pytest.mark.parametrize("fault", ["raise", "hang", "kill"])
def test_c08_the_engine_dies_or_hangs(fault: str) -> None:
    """Every answer ends with an error, health says 503 in time, new posts get 503 at once, the exit status is 1."""
    arm = {} if fault == "kill" else {"arm_at_prompt": [70, f"{fault}_at", 20]}
    options = {"stall_timeout": 0.5, "linger": 1.0}
    with Process(options=options, step_s=0.02, max_model_len=4096, **arm) as server, ThreadPoolExecutor(3) as pool:
        begun = threading.Event()
        child = child_of(server)
        whole = pool.submit(post, server, LONG)
        streamed = pool.submit(stream, server, {**LONG, "prompt": [70, 70]}, begun)
        assert begun.wait(10)
        if fault == "kill":
            child.kill()
        events, answer = streamed.result(10), whole.result(10)
        assert "[DONE]" not in events and events[-1]["error"]["code"] == "engine_dead", events[-1]
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "engine_dead"
        began_s = time.monotonic()
        assert post(server, LONG).status_code == 503 and time.monotonic() - began_s < 0.5
        assert server.wait() == 1
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert any("engine" in line for line in server.lines)


def test_a_stopped_engine_is_ended_behind_the_linger() -> None:
    """SIGSTOP: its step is overdue, so it is dead; the server does not wait for it to end by itself."""
    with Process(options={"stall_timeout": 0.5, "linger": 0.5}, step_s=0.02, max_model_len=4096) as server:
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            streamed = pool.submit(stream, server, LONG, begun)
            assert begun.wait(10)
            child = child_of(server)
            began_s = time.monotonic()
            child.suspend()
            assert streamed.result(10)[-1]["error"]["code"] == "engine_dead"
        assert server.wait() == 1 and 1.0 <= time.monotonic() - began_s < 3.5
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_c08_one_bad_request_is_no_death() -> None:
    with Process(fail_at_prompt=70, max_model_len=512) as server:
        assert post(server, {"prompt": [70]}).status_code == 500
        assert post(server, {"prompt": "a"}).status_code == 200 and httpx.get(server.url + "/health").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_c33_idle_and_loading(number: int) -> None:
    with Process(max_model_len=512) as server:
        assert post(server, {"prompt": "a"}).status_code == 200
        child = child_of(server)
        began_s = time.monotonic()
        server.signal(number)
        assert server.wait() == 0 and time.monotonic() - began_s < 1.5
        assert not child.is_running()
        quiet(server)
        port_is_free(server)


def test_c33_while_loading() -> None:
    with Process(slow_start_s=30.0, wait=False) as server:
        server.wait_for("loading null on null")
        child = child_of(server)
        began_s = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.wait() == 0 and time.monotonic() - began_s < 5
        assert not child.is_running()
        quiet(server)


def test_c33_in_mid_stream() -> None:
    """One SIGINT drains; behind the drain's time the stream ends with an error, and all is given back."""
    with (
        Process(options={"drain_timeout": 0.3}, step_s=0.02, max_model_len=4096) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        begun = threading.Event()
        streamed = pool.submit(stream, server, LONG, begun)
        assert begun.wait(10)
        child = child_of(server)
        server.signal(signal.SIGINT)
        assert streamed.result(10)[-1]["error"]["code"] == "draining"
        assert server.wait() == 0 and not child.is_running()
        quiet(server)
        port_is_free(server)


def test_c34_sigterm_drains() -> None:
    """8 streams half done and 8 queued all finish; new posts and readiness get 503; metrics can be read."""
    with Process(step_s=0.02, max_num_seqs=8, max_model_len=512) as server, ThreadPoolExecutor(20) as pool:
        body = {"prompt": "go", "max_tokens": 200, "ignore_eos": True}
        begun = [threading.Event() for _ in range(8)]
        streams = [pool.submit(stream, server, body, event) for event in begun]
        assert all(event.wait(10) for event in begun)
        queued = [pool.submit(post, server, {**body, "max_tokens": 10}) for _ in range(8)]
        while httpx.get(server.url + "/load").json()["requests"] < 16:
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        while httpx.get(server.url + "/ready").status_code == 200:
            time.sleep(0.01)
        refused = post(server, body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert "retry-after" in refused.headers
        assert httpx.get(server.url + "/health").status_code == 200
        assert "tandem" in httpx.get(server.url + "/metrics").text
        for streamed in streams:
            events = streamed.result(15)
            assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        assert all(answer.result(15).status_code == 200 for answer in queued)
        assert server.wait() == 0
        quiet(server)


def test_c34_the_drain_has_a_limit_and_a_second_signal_ends_it() -> None:
    for options, signals in (({"drain_timeout": 0.4}, 1), ({"drain_timeout": 60.0}, 2)):
        with Process(options=options, step_s=0.02, max_model_len=4096) as server, ThreadPoolExecutor(2) as pool:
            begun = threading.Event()
            streamed, whole = pool.submit(stream, server, LONG, begun), pool.submit(post, server, LONG)
            assert begun.wait(10)
            began_s = time.monotonic()
            for _ in range(signals):
                server.signal(signal.SIGTERM)
                time.sleep(0.1)
            events = streamed.result(10)
            assert events[-1]["error"]["code"] == "draining" and "[DONE]" not in events
            assert whole.result(10).status_code == 503
            assert server.wait() == 0 and time.monotonic() - began_s < 5
            quiet(server)


def test_a_killed_server_leaves_no_engine() -> None:
    with Process(step_s=0.02, max_model_len=4096) as server:
        child = child_of(server)
        server.signal(signal.SIGKILL)
        server.wait()
        deadline_s = time.monotonic() + 3
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, "the engine's process outlived its server"
            time.sleep(0.02)


def test_an_address_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Process(options={"port": port}, wait=False, slow_start_s=30.0) as server:
            assert server.wait() == 1  # the script's own traceback; the command line says it in two lines
            assert any(f"port {port}" in line for line in server.lines)
            assert not any("loading" in line for line in server.lines)


def test_a_model_file_that_is_truncated_harms_no_running_server_and_starts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandem.cli import main

    source, model = pull(), tmp_path / "model.gguf"
    (shutil.copytree if source.is_dir() else shutil.copy)(source, model)
    file = model / "model.safetensors" if model.is_dir() else model
    with serving(make="tandem.engine.build:make_loop", model=str(model), max_num_seqs=2, max_model_len=256) as served:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        before = served.chat(messages, max_tokens=12, temperature=0)["choices"]
        os.truncate(file, 50 << 20)
        assert "Paris" in before[0]["message"]["content"]
        assert served.chat(messages, max_tokens=12, temperature=0)["choices"] == before
    assert main(["serve", "--model", str(model), "--port", "0"]) == 1
    assert "truncated" in capsys.readouterr().err


def test_the_command_explains_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli import main

    for words, text in (
        (["--port", "70000"], "port is 70000"), (["--api-key-file", os.devnull], "holds no key"),
        (["--tls-certificate", os.devnull], "certificate"), (["--tls-key", "x"], "no certificate"),
        (["--max-body", "many"], "no size"), (["--allowed-host", "http://x"], "must be a name"),
        (["--depth", "9"], "depth is 9"),
    ):  # fmt: skip
        assert main(["serve", *words]) == 2
        assert text in capsys.readouterr().err
