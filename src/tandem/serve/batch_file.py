"""Input and output files of a batch. It knows lines and disks; it does not know who answers.

A line's ``id`` is made of its number in the input, so a run that was killed knows from the output what is done: a line
is either wholly there or not at all, and what is not there is done again.
"""

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tandem.errors import TandemError
from tandem.serve.nesting import MAX_DEPTH, depth_of

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class Line(NamedTuple):
    """One line of the input. fault: why it is no request, or None."""

    number: int
    custom_id: str | None
    url: str
    body: bytes
    fault: str | None

    @property
    def id(self) -> str:
        return f"batch_req_{self.number}"


def read_lines(path: Path) -> Iterator[Line]:
    """Lines one by one; empty ones are passed over. A custom_id that was there before is a fault."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                line = parse_line(number, raw)
                if line.custom_id is not None and line.custom_id in seen and line.fault is None:
                    line = line._replace(fault=f"custom_id {line.custom_id!r:.80} was given on an earlier line.")
                if line.custom_id is not None:
                    seen.add(line.custom_id)
                yield line


def parse_line(number: int, raw: bytes) -> Line:
    def bad(fault: str, custom_id: str | None = None) -> Line:
        return Line(number, custom_id, "", b"", fault)

    try:
        item = orjson.loads(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
    except orjson.JSONDecodeError as error:
        return bad(f"no JSON: {error}.")
    if not isinstance(item, dict):
        return bad("it must be an object.")
    name = item.get("custom_id")
    if not isinstance(name, str) or not name:
        return bad("custom_id must be a string that is not empty.")
    if item.get("method", "POST") != "POST":
        return bad(f"method is {item.get('method')!r:.80}; it must be POST.", name)
    url, body = item.get("url"), item.get("body")
    if url not in URLS:
        return bad(f"url is {url!r:.80}; it must be one of {', '.join(URLS)}.", name)
    if not isinstance(body, dict):
        return bad("body must be an object.", name)
    if depth_of(raw) > MAX_DEPTH + 1:
        return bad(f"body is nested too deep; the limit is {MAX_DEPTH} levels.", name)
    if body.get("stream"):
        return bad("body.stream must not be true in a batch.", name)
    return Line(number, name, url, orjson.dumps(body), None)


class Output:
    """The output file: whole lines only, synced to the disk, and nobody else's while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Opened without waiting for, or changing, what may be no file at all.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
        except OSError as error:
            raise TandemError(f"{path} cannot be written: {error.strerror}.") from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise TandemError(f"{path} is no regular file; answers must be read again.", hint="choose another -o.")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise TandemError(f"another run is writing {path}.", hint="wait for it, or choose another -o.") from None
        self.done: dict[str, str | None] = {}
        self._size = self._take_stock()
        self._unsynced = False

    def _take_stock(self) -> int:
        """Note what is done, and cut off a last line that is not whole. Raises TandemError for a foreign file."""
        size = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break
                try:
                    item = orjson.loads(raw)
                    known, name = item["id"], item["custom_id"]
                except (orjson.JSONDecodeError, KeyError, TypeError):
                    os.close(self._file)
                    raise TandemError(
                        f"{self.path}, line {number}, is no line of a batch's output.", hint="choose another -o."
                    ) from None
                self.done[known] = name
                size += len(raw)
        os.ftruncate(self._file, size)
        return size

    def add(self, line: dict[str, Any]) -> None:
        """Append one line, wholly or not at all. Raises TandemError if the disk does not take it."""
        data = orjson.dumps(line) + b"\n"
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._size + written)
        except OSError as error:
            self._fail(error)
        self._size += len(data)
        self._unsynced = True

    async def sync(self) -> None:
        """Have the disk keep what was added, without holding up the event loop."""
        if self._unsynced:
            self._unsynced = False
            try:
                await asyncio.to_thread(os.fsync, self._file)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._size)
        raise TandemError(
            f"{self.path} cannot be written: {error.strerror}.",
            hint="make room and run the same command again: it goes on where this one stopped.",
        ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)
