"""tandem batch: a line for a line, through kills, full disks, bad lines and servers that refuse."""

import asyncio
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from front_drive import serving

from tandem.cli import main
from tandem.errors import TandemError
from tandem.serve import batch, batch_file
from tandem.serve.batch import Tally, run_batch

NULL = ["--device", "null"]


def request(name: str, url: str = "/v1/completions", **body: object) -> dict:
    body = {"prompt": f"say {name}", "max_tokens": 3, "ignore_eos": True, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict]:
    """Lines by id; every id once, every line whole."""
    raw = path.read_bytes()
    assert raw.endswith(b"\n")
    lines = [json.loads(line) for line in raw.splitlines()]
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines), "a line is there twice"
    return found


async def echo(url: str, body: bytes) -> tuple[int, bytes]:
    await asyncio.sleep(0)
    return 200, json.dumps({"id": "r", "echo": json.loads(body)["prompt"], "usage": {"completion_tokens": 2}}).encode()


def test_every_kind_of_line_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [
        request("text", model="mine"),
        request("chat", "/v1/chat/completions", prompt=None, messages=[{"role": "user", "content": "hi"}]),
        "{broken",
        "",
        {"method": "POST", "url": "/v1/completions", "body": {}},
        request("text"),
        request("odd", "/v1/odd"),
        request("stream", stream=True),
        request("wrong", temperature=-3),
        request("nobody", model="gpt-99"),
        request("late", timeout_s=1e-9),
        request("embed", "/v1/embeddings", input="x"),
        {**request("get"), "method": "GET"},
        '["a list"]',
    ])  # fmt: skip
    target = tmp_path / "out.jsonl"
    assert main(["batch", str(source), "-o", str(target), "--served-model-name", "mine", *NULL]) == 0
    found = read(target)
    assert set(found) == {f"batch_req_{n}" for n in (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)}
    for number, name in ((1, "text"), (2, "chat")):
        line = found[f"batch_req_{number}"]
        assert line["custom_id"] == name and line["error"] is None and line["response"]["status_code"] == 200
        assert line["response"]["body"]["usage"]["completion_tokens"] == 3
        assert line["response"]["request_id"] == line["response"]["body"]["id"]
    for number, name, word in (
        (3, None, "JSON"), (5, None, "custom_id"), (6, "text", "earlier"), (7, "odd", "url"), (8, "stream", "stream"),
        (13, "get", "method"), (14, None, "object"),
    ):  # fmt: skip
        line = found[f"batch_req_{number}"]
        assert line["custom_id"] == name and line["response"] is None and line["error"]["code"] == "invalid_line"
        assert word in line["error"]["message"] and f"line {number}" in line["error"]["message"]
    for number, status in ((9, 400), (10, 404), (11, 504), (12, 400)):
        response = found[f"batch_req_{number}"]["response"]
        assert response["status_code"] == status and response["body"]["error"]["message"]
    assert "13 lines answered; 11 with an error now" in capsys.readouterr().err


def test_killed_again_and_again_it_loses_and_doubles_nothing(tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(400)]
    source, target = write(tmp_path / "in.jsonl", [request(name) for name in names]), tmp_path / "out.jsonl"
    script = tmp_path / "slow.py"
    script.write_text(
        "import asyncio, json, pathlib, sys\n"
        "from tandem.serve.batch import run_batch\n"
        "async def send(url, body):\n"
        "    await asyncio.sleep(0.02)\n"
        "    return 200, json.dumps({'id': 'r', 'echo': json.loads(body)['prompt'], 'pad': 'x' * 3000}).encode()\n"
        "asyncio.run(run_batch(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), send, concurrency=8))\n"
    )
    kills = 0
    while True:
        process = subprocess.Popen([sys.executable, str(script), str(source), str(target)])
        deadline_s = time.monotonic() + 20
        begun = target.stat().st_size if target.exists() else 0
        while kills < 3 and process.poll() is None and time.monotonic() < deadline_s:
            if target.exists() and target.stat().st_size > begun + 100_000:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        if process.wait(20) == 0:
            break
        with target.open("ab") as file:  # what a kill in the middle of a write leaves behind
            file.write(b'{"id": "batch_req_399", "custom_id": "n398", "resp')
    assert kills == 3
    found = read(target)
    assert {line["custom_id"] for line in found.values()} == set(names)
    for number, name in enumerate(names, 1):
        line = found[f"batch_req_{number}"]
        assert line["custom_id"] == name and line["response"]["body"]["echo"] == f"say {name}"


async def test_what_is_done_is_not_asked_again(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request(f"n{i}") for i in range(20)]), tmp_path / "out.jsonl"
    asked: list[str] = []

    async def failing(url: str, body: bytes) -> tuple[int, bytes]:
        asked.append(json.loads(body)["prompt"])
        if len(asked) == 9:
            return 503, json.dumps({"error": {"code": "engine_dead", "message": "the engine has stopped."}}).encode()
        return await echo(url, body)

    with pytest.raises(TandemError, match="the engine has stopped"):
        await run_batch(source, target, failing, concurrency=1)
    assert len(read(target)) == 8
    tallies: list[tuple[int, int, int]] = []
    tally = await run_batch(
        source, target, failing, concurrency=4, on_progress=lambda t: tallies.append((t.total, t.earlier, t.done))
    )
    assert (tally.total, tally.earlier, tally.done, tally.failed) == (20, 8, 20, 0) and tally.output_tokens == 24
    assert tallies[0] == (20, 8, 8) and tallies[-1] == (20, 8, 20)
    assert len(read(target)) == 20 and len(asked) == 9 + 12
    assert (await run_batch(source, target, failing, concurrency=4)).earlier == 20 and len(asked) == 21


@pytest.mark.parametrize("written", [0, 10])
async def test_a_full_disk_leaves_whole_lines_and_says_so(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes some bytes of a line, then no more."""
    source, target = write(tmp_path / "in.jsonl", [request(f"n{i}") for i in range(9)]), tmp_path / "out.jsonl"
    numbers, real = itertools.count(), os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        number = next(numbers)
        if number < 4:
            return real(file, data, offset)
        if number == 4 and written:
            return real(file, data[:written], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(batch_file.os, "pwrite", full)
    with pytest.raises(TandemError, match="No space left") as caught:
        await run_batch(source, target, echo, concurrency=2)
    assert "goes on where" in (caught.value.hint or "") and len(read(target)) == 4
    monkeypatch.setattr(batch_file.os, "pwrite", real)
    await run_batch(source, target, echo, concurrency=2)
    assert len(read(target)) == 9


def test_a_real_full_disk_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that may write no file beyond 2 kB stands for a disk that is full."""
    source, target = write(tmp_path / "in.jsonl", [request(f"n{i}") for i in range(40)]), tmp_path / "out.jsonl"
    code = (
        "import resource, signal, sys\nfrom tandem.cli import main\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        f"sys.exit(main(['batch', {str(source)!r}, '-o', {str(target)!r}, '--device', 'null']))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and "cannot be written: File too large" in found.stderr
    assert "Traceback" not in found.stderr and 0 < len(read(target)) < 40
    assert main(["batch", str(source), "-o", str(target), *NULL]) == 0
    assert len(read(target)) == 40


async def test_a_full_queue_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "FIRST_PAUSE_S", 0.001)
    source, target = write(tmp_path / "in.jsonl", [request(f"n{i}") for i in range(6)]), tmp_path / "out.jsonl"
    numbers = itertools.count()

    async def moody(url: str, body: bytes) -> tuple[int, bytes]:
        number = next(numbers)
        if number % 3 == 0:
            return 429, b'{"error": {"code": "queue_full", "message": "full"}}'
        if number % 3 == 1:
            raise ConnectionError("reset")
        return await echo(url, body)

    assert (await run_batch(source, target, moody, concurrency=1)).failed == 0
    assert len(read(target)) == 6

    async def gone(url: str, body: bytes) -> tuple[int, bytes]:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(TandemError, match="nobody listens"):
        await run_batch(source, tmp_path / "other.jsonl", gone, concurrency=2)


async def test_a_server_is_asked_over_http(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request(f"n{i}") for i in range(30)]), tmp_path / "out.jsonl"
    async with serving() as (service, url):
        assert await asyncio.to_thread(main, ["batch", str(source), "-o", str(target), "--base-url", url]) == 0
        assert service.meter.num_finished["length"] == 30
    assert all(line["response"]["status_code"] == 200 for line in read(target).values())


def test_wrong_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl"

    def refused(source: Path, target: Path, *more: str) -> str:
        assert main(["batch", str(source), "-o", str(target), "--base-url", "http://127.0.0.1:1", *more]) in (1, 2)
        return capsys.readouterr().err

    assert "cannot be read" in refused(tmp_path / "none.jsonl", target)
    assert "cannot be written" in refused(source, tmp_path / "none" / "out.jsonl")
    assert "both input and output" in refused(source, source) and source.read_text()
    for device in ("/dev/full", "/dev/zero"):  # the former can be read for ever
        assert "no regular file" in refused(source, Path(device))
    os.mkfifo(tmp_path / "fifo")
    assert "no regular file" in refused(source, tmp_path / "fifo")
    write(target, ["something else"])
    assert "no line of a batch's output" in refused(source, target) and target.read_text() == "something else\n"
    write(target, [{"id": "batch_req_1", "custom_id": "b", "response": None, "error": None}])
    assert "belongs to another input" in refused(source, target)
    assert "concurrency" in refused(source, target, "--concurrency", "0")
    assert "--base-url" in refused(source, target, "--depth", "1")
    target.unlink()
    holder = batch_file.Output(target)
    assert "another run is writing" in refused(source, target)
    holder.close()


def test_speed_and_tally_begin_at_nothing() -> None:
    assert batch.Speed().of(Tally()) == 0.0
