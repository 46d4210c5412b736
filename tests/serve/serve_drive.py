"""Servers for tests: over the null device with scripts, faults and pacing, in this process or in one of its own."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tandem.engine.engine import AsyncEngine
from tandem.serve.app import create_app
from tandem.serve.options import ServeOptions
from tandem.serve.server import bind, http_server
from tandem.serve.service import Service

MAKE = "serve_drive:make_null"
HERE = Path(__file__).parent


def tokenizer_with(pieces: list[str]) -> tuple[str, list[int], int]:
    """(tokenizer.json, ids of the pieces, size): bytes as ever, and each piece one token behind them."""
    from tandem.engine.null_model import byte_tokenizer_json
    from tandem.engine.text import _byte_of_character

    letters = {byte: letter for letter, byte in _byte_of_character().items()}
    layout = json.loads(byte_tokenizer_json())
    vocabulary = layout["model"]["vocab"]
    ids = []
    for piece in pieces:
        raw = "".join(letters[byte] for byte in piece.encode())
        ids.append(vocabulary.setdefault(raw, len(vocabulary)))
    return json.dumps(layout), ids, len(vocabulary)


def make_null(options: dict, mailbox: Any, on_phase: Callable[[str], None] = lambda text: None):
    """As build.make_loop on the null device.

    options   settings of the engine, and: script (text that every request says), pieces (the same, a token each),
              echo (each request says its own prompt), step_s, raise_at, hang_at, fail_at_prompt (a request whose prompt
              begins with that id fails at its first step), arm_at_prompt (id, fault, steps: that request brings an
              engine's fault about), source (fields of ModelSource), slow_start_s, compile_s and mask_s (how long
              grammars and their masks take).
    """
    from tandem.engine import build
    from tandem.engine.null_model import byte_tokenizer_json
    from tandem.engine.text import Text
    from tandem.runner.null import Faults

    options = dict(options)
    own = {
        name: options.pop(name, None)
        for name in ("script", "pieces", "echo", "step_s", "raise_at", "hang_at", "fail_at_prompt", "source",
                     "slow_start_s", "arm_at_prompt", "compile_s", "mask_s")
    }  # fmt: skip
    tokenizer, script, size = tokenizer_with(own["pieces"] or [])
    source = {"tokenizer_json": tokenizer, **(own["source"] or {})}
    locate = build._locate

    def located(settings, device, on_phase):
        found = locate(settings, device, on_phase)
        config = {**found.config, "vocab_size": max(size, found.config["vocab_size"])}
        return dataclasses.replace(found, **{"config": config, **source})

    build._locate = located
    try:
        loop, card = build.make_loop({"device": "null", **options}, mailbox, on_phase)
    finally:
        build._locate = locate
    runner: Any = loop.runner
    time.sleep(own["slow_start_s"] or 0.0)
    runner._step_time = own["step_s"] or 0.0
    if own["script"] is not None:
        script = Text(byte_tokenizer_json()).encode(own["script"])
    if own["echo"]:
        runner._script = lambda arrival: list(arrival.tokens)
    elif script:
        runner._script = script
    if own["compile_s"]:
        compile_mask = loop._admission._compile_mask
        loop._admission._compile_mask = lambda request: _later(own["compile_s"], compile_mask(request))
    if own["mask_s"]:
        from tandem.sampling import grammar_process

        grammar_process.BOOTSTRAP = (
            "import time; from tandem.sampling.grammar_follow import Follower; step = Follower.step; "
            f"Follower.step = lambda *what: (time.sleep({own['mask_s']}), step(*what))[1]; {grammar_process.BOOTSTRAP}"
        )
    fail, arm = own["fail_at_prompt"], own["arm_at_prompt"]

    def failing(arrival) -> str | None:
        if arm is not None and arrival.tokens[0] == arm[0]:  # the engine's fault comes so many steps later
            runner._faults = Faults(**{arm[1]: runner.num_steps + arm[2], "fail": failing})
        return "it was told to fail." if arrival.tokens[0] == fail else None

    runner._faults = Faults(raise_at=own["raise_at"], hang_at=own["hang_at"], fail=failing)
    return loop, card


def _later(seconds: float, future: Future) -> Future:
    """The same result, so much later; waiting holds a thread."""
    delayed: Future = Future()

    def wait() -> None:
        time.sleep(seconds)
        delayed.set_result(future.result())

    threading.Thread(target=wait, daemon=True).start()
    return delayed


@dataclasses.dataclass
class Served:
    """A server that runs on a thread of this process."""

    url: str
    service: Service
    http: httpx.Client
    loop: asyncio.AbstractEventLoop
    first: dict[str, Any] = dataclasses.field(default_factory=dict)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, text: str | list = "hi", **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        answer = self.post("/v1/chat/completions", {"messages": messages, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Data of the events of a streamed answer, decoded; "[DONE]" as it stands."""
        with self.http.stream("POST", path, json={"stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-cache"
            return list(events_of(answer.iter_lines()))

    def refused(self, path: str, body: Any, status: int = 400, param: str | None = None, **options: Any) -> dict:
        """Post what must be refused; the error of the body."""
        answer = self.http.post(path, **({"json": body} if body is not None else {}), **options)
        assert answer.status_code == status, (answer.status_code, answer.text[:500], body)
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert "Traceback" not in error["message"]
        if param is not None:
            assert error["param"] == param, error
        return error

    def statistics(self) -> dict[str, Any]:
        return self.http.get("/load").json()

    def at_rest(self, timeout_s: float = 2.0) -> dict[str, Any]:
        """Wait until nothing runs or waits anywhere; then every KV block is free or cached."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            now = self.statistics()
            engine = now["engine"]
            planner = engine["planner"]
            busy = planner["kv"]["num_owned"] or planner["num_running"] or planner["num_waiting"] or engine["live"]
            if not (busy or now["requests"] or now["logprobs"] or engine["open"] or self.service.streams):
                break
            assert time.monotonic() < deadline_s, f"it never came to rest: {now}"
            time.sleep(0.02)
        self.run(self.service.engine.call("check"))
        self.run(self._check_bodies())
        return now

    async def _check_bodies(self) -> None:
        self.service.bodies.check()

    def run(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(20)

    def canary(self) -> None:
        """A plain greedy request gives what it gave before, and everything is at rest behind it."""
        body = {"prompt": [9, 8, 7, 6], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        tokens = answer.json()["choices"][0]["token_ids"]
        assert tokens == self.first.setdefault("tokens", tokens) and len(tokens) == 6
        self.at_rest()


def events_of(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        assert line == "" or line.startswith(("data: ", "event: ", ":")), line
        if line.startswith("data: "):
            assert line != "data: "
            yield "[DONE]" if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))


@contextmanager
def serving(
    options: ServeOptions | None = None, *, keys: tuple[str, ...] = (), make: str = MAKE, in_process: bool = True,
    **engine: Any,
) -> Iterator[Served]:  # fmt: skip
    """A server on a thread. engine: see make_null."""
    options = options or ServeOptions()
    started: Any = {}
    ready = threading.Event()

    async def main() -> None:
        loop = started["loop"] = asyncio.get_running_loop()
        stop = started["stop"] = asyncio.Event()
        async with await AsyncEngine.start(make=make, in_process=in_process, options=engine) as running:
            names = options.served_model_name or (running.card.name,)
            service = Service(
                running, names, options.limits, options.queue, options.keep_alive, options.stall_timeout
            )  # fmt: skip
            service.bodies = options.bodies
            app = create_app(service, keys=keys, origins=options.cors_origin)
            listener = bind(dataclasses.replace(options, port=0))
            server = http_server(service, app, options, listener)
            task = loop.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            port = listener.getsockname()[1]
            started["served"] = (f"http://127.0.0.1:{port}", service)
            ready.set()
            await stop.wait()
            server.should_exit = True
            await task

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            started["error"] = error
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="served", daemon=True)
    thread.start()
    ready.wait(60)
    if "served" not in started:
        raise started.get("error") or AssertionError("the server did not start")
    url, service = started["served"]
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    with httpx.Client(base_url=url, timeout=20, headers=headers) as http:
        try:
            yield Served(url, service, http, started["loop"])
        finally:
            started["loop"].call_soon_threadsafe(started["stop"].set)
            thread.join(15)
            assert not thread.is_alive(), "the server did not stop"


class Process:
    """A whole server in a process of its own, as ``tandem serve`` runs it, with the null device of make_null."""

    def __init__(
        self, *, options: dict[str, Any] | None = None, wait: bool = True, nofile: int | None = None,
        keys: tuple[str, ...] = (), **engine: Any,
    ) -> None:  # fmt: skip
        """nofile: its limit on descriptors."""
        start = {"options": {"port": 0, **(options or {})}, "engine": engine, "keys": keys}
        limit = [] if nofile is None else ["sh", "-c", f'ulimit -n {nofile}; exec "$@"', "sh"]
        self.process = subprocess.Popen(
            [*limit, sys.executable, str(HERE / "serve_process.py"), json.dumps(start)], stderr=subprocess.PIPE,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait and not (self._ready.wait(60) and self.url):
            self.__exit__()
            raise AssertionError("\n".join(self.lines))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ready on "):
                self.url = line.split()[-1]
                self._ready.set()
        self._ready.set()

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not any(text in line for line in self.lines):
            assert time.monotonic() < deadline_s, f"{text!r} never came: {self.lines}"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 15.0) -> int:
        """The exit status; everything it said is in ``lines``."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()
