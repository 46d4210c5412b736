"""The program as a process: what it writes where, signals, pipes, letters and exit statuses."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

NULL = ["--device", "null"]


def tandem_process(*words: str, text: str | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", **environment}
    return subprocess.run(
        [sys.executable, "-m", "tandem", *words], input=text or "", capture_output=True, text=True, env=environment,
        timeout=100,
    )  # fmt: skip


def test_run_streams_one_answer_to_stdout() -> None:
    done = tandem_process("run", *NULL, "--ignore-eos", "--max-tokens", "12", "-v", "hello")
    assert done.returncode == 0, done.stderr
    again = tandem_process("run", *NULL, "--ignore-eos", "--max-tokens", "12", "--depth", "1", "hello")
    assert done.stdout == again.stdout and len(done.stdout) > 1 and done.stdout.endswith("\n")
    assert "12 tokens" in done.stderr and "max_num_seqs" in done.stderr and not again.stderr
    raw = tandem_process("run", *NULL, "--ignore-eos", "--max-tokens", "12", "--raw", "hello")
    assert raw.returncode == 0 and raw.stdout != done.stdout, "the chat template makes a difference"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["run", *NULL, "--max-tokens", "5", "hello"], ["info", *NULL]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_told_as_such(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "tandem", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("error: the output cannot be written: No space left on device.\n")
    assert "internal" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_server_whose_log_cannot_be_written_serves() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "tandem", "serve", *NULL, "--port", str(port)]
    with open("/dev/full", "w") as full, subprocess.Popen(words, stderr=full) as server:
        try:
            deadline_s = time.monotonic() + 60
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer:
                        assert answer.status == 200
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < deadline_s
                    time.sleep(0.05)
            server.terminate()
            assert server.wait(20) == 0
        finally:
            server.kill()


def test_what_is_piped_in_stands_behind_the_prompt() -> None:
    both = tandem_process("run", *NULL, "--ignore-eos", "--max-tokens", "8", "--raw", "one\ntwo")
    piped = tandem_process("run", *NULL, "--ignore-eos", "--max-tokens", "8", "--raw", "one", text="two\n")
    alone = tandem_process("run", *NULL, "--ignore-eos", "--max-tokens", "8", "--raw", text="one\ntwo\n")
    assert both.stdout == piped.stdout == alone.stdout


@pytest.mark.parametrize("text", [b"caf\xe9", b"\xff\xfe"])
def test_piped_text_that_is_not_utf8_is_explained(text: bytes) -> None:
    words = [sys.executable, "-m", "tandem", "run", *NULL, "hello"]
    for locale in ("C", "C.UTF-8"):  # Python reads stdin in another way under each
        environment = {**os.environ, "LC_ALL": locale}
        done = subprocess.run(words, input=text, capture_output=True, env=environment, timeout=60)
        assert done.returncode == 2 and b"not UTF-8" in done.stderr and b"Traceback" not in done.stderr


def test_letters_that_the_terminal_lacks_are_no_error() -> None:
    done = tandem_process("bench", "host", "--help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "examples:" in done.stdout and not done.stderr


SLOW_LOAD = """
import sys, threading
import torch
import tandem.engine.build as build

def load(settings, mailbox, on_phase):
    print("loading", flush=True)
    weights_VH = torch.zeros(1200, 1200)
    while True:
        weights_VH @ weights_VH  # native code, now and then with the interpreter

build.make_loop = load
from tandem.__main__ import program
sys.argv = ["tandem", "run", "hello"]
sys.exit(program())
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.3])
def test_interrupt_while_the_model_loads_ends_with_130(wait_s: float) -> None:
    words = [sys.executable, "-c", SLOW_LOAD]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(7) == b"loading"
    time.sleep(wait_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and not err.strip()


def test_interrupt_ends_with_130() -> None:
    words = [sys.executable, "-m", "tandem", "run", *NULL, "--max-tokens", "20000", "--ignore-eos", "hello"]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err


def test_a_reader_who_leaves_is_no_traceback() -> None:
    words = f"{sys.executable} -m tandem run --device null --max-tokens 20000 --ignore-eos hello"
    done = subprocess.run(
        f"{words} | head -c 10", shell=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    assert len(done.stdout) == 10 and b"Traceback" not in done.stderr and b"Exception" not in done.stderr


def test_start_is_quick() -> None:
    """Help and wrong usage must not wait for torch."""
    words = ["run", *NULL, "--max-tokens", "2", "x"]
    code = f"import sys; from tandem.cli import main; main({words}); print(*sys.modules)"
    began_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"torch", "transformers", "matplotlib", "rich", "numpy", "starlette"}
    assert time.perf_counter() - began_s < 30
