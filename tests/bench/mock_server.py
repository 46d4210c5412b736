"""A server that says exactly what a test wants, when it wants: raw HTTP over asyncio, no framework in between."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence

Event = tuple[float, object]
"""Milliseconds from the request on, and what to send: an object as an event, bytes as they are."""
SCRIPTS: dict = {}


def chat_chunk(delta: dict, finish: str | None = None, **more: object) -> dict:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        **more,
    }


def usage_chunk(completion: int, prompt: int = 5) -> dict:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"object": "chat.completion.chunk", "choices": [], "usage": usage}


class Mock:
    """script(body) gives (status, events); seen holds the bodies in order."""

    def __init__(self, script: Callable[[dict], tuple[int, Sequence[Event]]]) -> None:
        self.script = script
        self.seen: list[dict] = []
        self.num_connections = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            await self._requests(reader, writer)
        finally:
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")
                )
                raw = await reader.readexactly(length)
                if head.startswith("GET"):
                    self._answer(writer, 200, {"data": [{"id": "mock"}]})
                    continue
                body = json.loads(raw)
                self.seen.append(body)
                status, events = self.script(body)
                if status != 200:
                    self._answer(writer, status, dict(events[0][1]))  # type: ignore[call-overload]
                    continue
                if not await self._stream(writer, events):
                    break

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)

    async def _stream(self, writer: asyncio.StreamWriter, events: Sequence[Event]) -> bool:
        """False: the script cut the connection (None)."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for at_ms, what in events:
            await asyncio.sleep(max(0.0, began_s + at_ms / 1e3 - loop.time()))
            if what is None:
                return False
            data = what if isinstance(what, bytes) else b"data: " + json.dumps(what).encode() + b"\n\n"
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        writer.write(b"0\r\n\r\n")
        return True


@contextlib.asynccontextmanager
async def mocking(script: Callable[[dict], tuple[int, Sequence[Event]]]) -> AsyncIterator[tuple[Mock, str]]:
    mock = Mock(script)
    server = await asyncio.start_server(mock.serve, "127.0.0.1", 0)
    try:
        yield mock, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tuple(mock.tasks):
            task.cancel()
        await asyncio.gather(*mock.tasks, return_exceptions=True)
        await asyncio.sleep(0.01)
