"""Put the server under load for minutes, on a device of made-up tokens at 50 steps a second, and see whether it bends.

    python scripts/soak.py streams [--streams 500] [--seconds 120]      many streams at once, begun anew
    python scripts/soak.py overload [--seconds 30]                    three times the capacity, then normal load again

streams   no token is lost or doubled; the gaps that are added to the device's 20 ms; memory of both server processes;
          the time of a step beside that of as many requests in an engine without a server.
overload  throughput before, and in the first seconds behind, an overload that is refused with 429.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from soak_client import SCRIPT, Listener, Tally, gap_s

from tandem.bench.load_http import HttpClient
from tandem.bench.load_stream import Outcome, stream
from tandem.bench.report import write_json

STEP_S = 0.02


def make_paced_loop(options: dict[str, Any], mailbox: Any, on_phase: Callable[[str], None] = lambda text: None) -> Any:
    """As engine.build.make_loop on the null device, at STEP_S a step; every request counts aloud."""
    from tandem.engine.build import make_loop
    from tandem.engine.null_model import byte_tokenizer_json
    from tandem.engine.text import Text

    loop, card = make_loop({"device": "null", **options}, mailbox, on_phase)
    runner: Any = loop.runner
    script = Text(byte_tokenizer_json()).encode(SCRIPT)
    runner._step_time, runner._script = STEP_S, script
    return loop, card


def serve(arguments: argparse.Namespace) -> int:
    """The server, in a process of its own."""
    from tandem.config import Settings
    from tandem.serve.options import ServeOptions
    from tandem.serve.server import serve as run

    options = ServeOptions(port=arguments.port, max_requests=arguments.limit)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(Settings(device="null"), options, start=paced(arguments.rows)))


def paced(rows: int) -> dict[str, Any]:
    """Arguments of AsyncEngine.start for the loop above."""
    engine = {"max_num_seqs": rows, "kv_cache_memory": 8 << 30, "prefix_cache": False}
    return {"make": "soak:make_paced_loop", "options": engine}


async def step_alone_ms(rows: int, num_requests: int, tokens: int, seconds: float) -> float:
    """The time of a step of the same engine under as many requests, in a process of its own but without a server."""
    from tandem import AsyncEngine, SamplingParams
    from tandem.config import Settings

    async def totals() -> tuple[float, float]:
        timeline = await engine.call("timeline")
        idle_s = sum(s for cause, s in timeline["idle_s"].items() if cause != "nothing")
        return timeline["device_active_s"] + idle_s, timeline["num_steps"]

    async def one() -> None:
        while time.perf_counter() < end_s:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            async for _ in await engine.submit("count", params):
                pass

    async with await AsyncEngine.start(Settings(device="null"), **paced(rows)) as engine:
        end_s = time.perf_counter() + seconds
        asked = asyncio.gather(*(one() for _ in range(num_requests)))
        await asyncio.sleep(seconds / 4)
        before = await totals()
        await asyncio.sleep(seconds / 2)
        after = await totals()
        await asked
    return (after[0] - before[0]) / (after[1] - before[1]) * 1e3


class Server:
    """A server process of this script, and its engine's; their figures."""

    def __init__(self, rows: int, limit: int, port: int = 8765) -> None:
        self.url, self.port = f"http://127.0.0.1:{port}", port
        command = [sys.executable, __file__, "serve", "--rows", str(rows), "--limit", str(limit), "--port", str(port)]
        self.process = subprocess.Popen(command)

    async def ready(self) -> HttpClient:
        client = HttpClient(self.url)
        for _ in range(200):
            try:
                if await client.request("GET", "/ready", b"", lambda data, now_s: None) == 200:
                    return client
            except OSError:
                pass
            await asyncio.sleep(0.1)
        raise SystemExit("the server did not get ready")

    def pids(self) -> list[int]:
        """The HTTP process and its engine's."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [self.process.pid, *(int(pid) for task in tasks for pid in (task / "children").read_text().split())]

    def memory_mb(self) -> tuple[float, float]:
        """Resident memory of the HTTP process and of its engine."""
        sizes = [_resident_mb(pid) for pid in self.pids()]
        return sizes[0], sum(sizes[1:])

    def processor_s(self) -> tuple[float, ...]:
        """Processor time used so far: by the HTTP process, its engine, and this client."""
        used = [_processor_s(pid) for pid in self.pids()]
        return used[0], sum(used[1:]), time.process_time()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _processor_s(pid: int) -> float:
    """User and system time (proc(5), stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def timeline_of(client: HttpClient) -> dict[str, float]:
    """Counters of the engine, by /metrics."""
    parts: list[bytes] = []
    await client.request("GET", "/metrics", b"", lambda data, now_s: parts.append(data))
    found: dict[str, float] = {}
    for line in b"".join(parts).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.replace('model_name="null"', "").replace("{}", "")] = float(value)
    return found


async def _ask(client: HttpClient, tokens: int) -> Outcome:
    body = {"prompt": "count", "max_tokens": tokens, "ignore_eos": True}
    return await stream(client, "/v1/completions", body, 3600.0)


async def streams(arguments: argparse.Namespace) -> dict[str, Any]:
    rows, tally, loop = max(512, arguments.streams), Tally(), asyncio.get_running_loop()
    alone_ms = await step_alone_ms(rows, arguments.streams, arguments.tokens, 12.0)
    server = Server(rows, limit=100_000)
    try:
        client = await server.ready()
        began_s = time.perf_counter()
        before, used = await timeline_of(client), server.processor_s()
        make = partial(Listener, tally, arguments.tokens, began_s + arguments.seconds)
        listeners = [
            (await loop.create_connection(make, "127.0.0.1", server.port))[1] for _ in range(arguments.streams)
        ]
        done, memory, windows = asyncio.gather(*(listener.done for listener in listeners)), [], []
        heard = list(tally.gaps)
        while not done.done():
            await asyncio.wait([done], timeout=5.0)
            memory.append((round(time.perf_counter() - began_s, 1), *server.memory_mb()))
            since, heard = list(map(int.__sub__, tally.gaps, heard)), list(tally.gaps)
            windows.append((round((gap_s(since, 0.99) - STEP_S) * 1e3, 1), os.getloadavg()[0]))
            print(
                f"  memory {memory[-1][1]:.1f} + {memory[-1][2]:.1f} MB, added p99 {windows[-1][0]} ms", file=sys.stderr
            )
        seconds = time.perf_counter() - began_s
        used = tuple(now - then for now, then in zip(server.processor_s(), used, strict=True))
        after = await timeline_of(client)
    finally:
        server.stop()

    def grown(*words: str, without: str = "-") -> float:
        return sum(
            value - before[name]
            for name, value in after.items()
            if any(word in name for word in words) and without not in name
        )

    num_steps = max(1.0, grown("tandem:steps_total"))
    on_device_s = grown("device_active_seconds_total", "device_idle_seconds_total", without='cause="nothing"')
    half = len(memory) // 2
    return {
        "streams": arguments.streams, "tokens_each": arguments.tokens, "errors": sorted(tally.errors),
        "requests": tally.num_requests, "tokens": tally.num_tokens,
        "gap_ms": {f"p{100 * share:g}": gap_s(tally.gaps, share) * 1e3 for share in (0.5, 0.9, 0.99, 0.999)},
        "added_p99_ms": (gap_s(tally.gaps, 0.99) - STEP_S) * 1e3, "chunks_per_s": tally.num_chunks / seconds,
        "tokens_per_chunk": tally.num_tokens / max(1, tally.num_chunks),
        "windows_added_p99_ms_and_load": windows, "memory_mb": memory, "memory_first_half_mb": _mean(memory[:half]),
        "memory_second_half_mb": _mean(memory[half:]),
        "steps": num_steps, "step_ms": on_device_s / num_steps * 1e3, "step_without_server_ms": alone_ms,
        "host_ms_a_step": grown("host_seconds_total", without='part="wait"') / num_steps * 1e3,
        "processor_us_a_chunk": dict(zip(("http", "engine", "client"),
        (round(seconds / max(1, tally.num_chunks) * 1e6, 1) for seconds in used), strict=True)),
        "processor_share": [round(each / seconds, 3) for each in used], "load": os.getloadavg(),
    }  # fmt: skip


def _mean(memory: list[tuple[float, float, float]]) -> list[float]:
    return [round(sum(sizes) / max(1, len(sizes)), 1) for sizes in list(zip(*memory, strict=True))[1:]]


async def overload(arguments: argparse.Namespace) -> dict[str, Any]:
    """Capacity: rows of 50 tokens/s each. Requests of 100 tokens take 2 s, so 32 rows serve 16 a second."""
    rows, tokens = 32, 100
    server = Server(rows=rows, limit=2 * rows)
    counts: list[tuple[float, int]] = []
    refused = 0

    async def one(client: HttpClient) -> None:
        nonlocal refused
        outcome = await _ask(client, tokens)
        if outcome.error:
            refused += 1
        else:
            counts.append((outcome.end_s, outcome.num_tokens))

    async def phase(client: HttpClient, rate: float, seconds: float) -> list[asyncio.Task[None]]:
        began_s, tasks = time.perf_counter(), list[asyncio.Task[None]]()
        while (now_s := time.perf_counter() - began_s) < seconds:
            while len(tasks) < now_s * rate:
                tasks.append(asyncio.ensure_future(one(client)))
            await asyncio.sleep(0.01)
        return tasks

    try:
        client = await server.ready()
        normal = 0.9 * rows / (tokens * STEP_S)
        tasks = await phase(client, normal, 10.0)
        over_s = time.perf_counter()
        tasks += await phase(client, 3 * rows / (tokens * STEP_S), arguments.seconds)
        normal_s, num_refused = time.perf_counter(), refused
        tasks += await phase(client, normal, 10.0)
        await asyncio.gather(*tasks)
    finally:
        server.stop()

    def speed(from_s: float, to_s: float) -> float:
        return sum(count for when_s, count in counts if from_s <= when_s < to_s) / (to_s - from_s)

    before = speed(over_s - 6.0, over_s)
    return {
        "before_tokens_per_s": before, "overload_tokens_per_s": speed(over_s + 2.0, normal_s), "refused": num_refused,
        "refused_behind": refused - num_refused, "behind_tokens_per_s": speed(normal_s + 5.0, normal_s + 10.0),
        "first_5_s_tokens_per_s": speed(normal_s, normal_s + 5.0),
        "recovered_share": speed(normal_s + 5.0, normal_s + 10.0) / before if before else 0.0,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("streams", "overload", "serve"))
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", help="write the figures there")
    for name in ("rows", "limit", "port"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "serve":
        return serve(arguments)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run({"streams": streams, "overload": overload}[arguments.what](arguments))
    print(json.dumps({name: value for name, value in found.items() if name != "memory_mb"}, indent=1))
    if arguments.json:
        write_json(arguments.json, "python scripts/soak.py " + " ".join(sys.argv[1:]), found, vars(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
