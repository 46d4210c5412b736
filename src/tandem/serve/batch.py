"""Files of requests in the OpenAI batch format, answered line by line. It knows files; it does not know who answers.

    in.jsonl    {"custom_id", "method": "POST", "url": "/v1/…", "body"}                       one request a line
    out.jsonl   {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}   in order of completion

A line that is no request becomes a line with an ``error``; a request that is refused has its status and error body as
the ``response``. What may be better in a while (a full queue, a lost connection) is tried again; when nobody answers
any more the run stops, and those lines are left for the next one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from tandem.errors import TandemError
from tandem.serve.batch_file import Line, Output, read_lines
from tandem.serve.nesting import MAX_DEPTH, depth_of

SYNC_S = 0.25
NUM_TRIES = 6
FIRST_PAUSE_S = 0.5
TRY_AGAIN = (408, 429, 502, 503, 504)
OWN_FAULTS = ("deadline_exceeded",)
ENGINE_GONE = "engine_dead"
LEVELS_AROUND = 20  # of an answer that gives the request's fields back, as the Responses API does

Send = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""(url, body) → (status, body of the answer). Raises OSError or ConnectionError where there is no answer."""


@dataclass(slots=True)
class Tally:
    """How far a run is. earlier: lines that an earlier run had done; failed: answered, but not with status 200."""

    total: int = 0
    earlier: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0


async def run_batch(
    source: Path,
    target: Path,
    send: Send,
    *,
    concurrency: int,
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Answer every line of source that target has no answer for yet.

    Raises TandemError if a file cannot be read or written, if target belongs to another source, or if nobody answers
    any more; what is done until then stays, and the same call goes on from there.
    """
    try:
        total = sum(1 for _ in read_lines(source))
    except OSError as error:
        raise TandemError(f"{source} cannot be read: {error.strerror}.") from error
    if target.exists() and source.samefile(target):
        raise TandemError(f"{source} is both input and output.", hint="choose another -o.")
    output = Output(target)
    tally = Tally(total)
    try:
        lines = _left(source, target, output.done, tally)
        on_progress(tally)
        await _work(lines, output, send, concurrency, tally, on_progress)
        await output.sync()
    finally:
        output.close()
    return tally


def _left(source: Path, target: Path, done: dict[str, str | None], tally: Tally) -> Iterator[Line]:
    """Lines that are still to do; checks that those done are this source's."""
    known = dict(done)
    for line in read_lines(source):
        if line.id in known and known[line.id] != line.custom_id:
            raise TandemError(
                f"{target} has {known[line.id]!r:.80} for line {line.number}, where {source} has "
                f"{line.custom_id!r:.80}: it belongs to another input.",
                hint="choose another -o.",
            )
    tally.earlier = tally.done = len(known)
    return (line for line in read_lines(source) if line.id not in known)


async def _work(
    lines: Iterator[Line], output: Output, send: Send, concurrency: int, tally: Tally,
    on_progress: Callable[[Tally], None],
) -> None:  # fmt: skip
    async def work() -> None:
        for line in lines:
            answer = _error_line(line) if line.fault is not None else await _ask(line, send)
            output.add(answer)
            _count(answer, tally)
            on_progress(tally)

    async def keep_syncing() -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            await output.sync()

    try:
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work()) for _ in range(max(1, concurrency))]
            syncing = group.create_task(keep_syncing())
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            syncing.cancel()
    except BaseExceptionGroup as errors:
        found = next((error for error in errors.exceptions if isinstance(error, TandemError)), errors.exceptions[0])
        raise found from None


def _count(answer: dict[str, Any], tally: Tally) -> None:
    tally.done += 1
    response = answer["response"]
    if response is None or response["status_code"] != 200:
        tally.failed += 1
        return
    usage = response["body"].get("usage") or {}
    tally.output_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0


def _error_line(line: Line) -> dict[str, Any]:
    error = {"code": "invalid_line", "message": f"line {line.number}: {line.fault}"}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}


async def _ask(line: Line, send: Send) -> dict[str, Any]:
    """One answer; what may be better in a while is tried again. Raises TandemError when nobody answers any more."""
    pause_s = FIRST_PAUSE_S
    for trial in range(NUM_TRIES):
        try:
            status, raw = await send(line.url, line.body)
            body = _answer_of(raw)
            reason = f"HTTP {status}"
        except (OSError, ValueError) as error:
            status, body, reason = 502, {}, f"{type(error).__name__}: {error}"
        fault = body.get("error") if isinstance(body, dict) else None
        code = fault.get("code") if isinstance(fault, dict) else None
        if status not in TRY_AGAIN or code in OWN_FAULTS:
            request_id = body.get("id") if isinstance(body, dict) else None
            response = {"status_code": status, "request_id": request_id or line.id, "body": body}
            return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}
        if isinstance(fault, dict):
            reason = str(fault.get("message") or reason)
        if code == ENGINE_GONE:
            break
        if trial + 1 < NUM_TRIES:
            await asyncio.sleep(pause_s)
            pause_s *= 2
    raise TandemError(
        f"line {line.number} got no answer: {reason}",
        hint="run the same command again: it goes on where this one stopped.",
    )


def _answer_of(raw: bytes) -> Any:
    """Raises ValueError for what is no JSON, as a proxy's page, and for what could not be written again."""
    body = orjson.loads(raw)
    if depth_of(raw) > MAX_DEPTH + LEVELS_AROUND:
        raise ValueError("the answer is nested too deep")
    return body


def sender_of(app: ASGIApp) -> Send:
    """Asks an application in this process, without a socket in between."""

    async def send_in(url: str, body: bytes) -> tuple[int, bytes]:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "", "client": None, "server": None,
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        }  # fmt: skip
        asked, never = False, asyncio.Event()
        status, parts = 500, []

        async def receive() -> Message:
            nonlocal asked
            if asked:
                await never.wait()
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            await app(scope, receive, send)
        except Exception:
            if not parts:  # a failure that was answered is raised all the same, for the log of an HTTP server
                raise
        return status, b"".join(parts)

    return send_in


class Speed:
    """Tokens a second since it was made."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def of(self, tally: Tally) -> float:
        return tally.output_tokens / max(1e-9, time.perf_counter() - self._began_s)
