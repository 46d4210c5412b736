"""GET routes: however many ask, the event loop has its turns; scrapes that come together are written once."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from serve_drive import Served
from starlette.requests import Request

from tandem.serve import export
from tandem.serve.app import create_app
from tandem.serve.asking import LoopTurns


class Clock:
    """Counts turns of the event loop while it is open."""

    def __init__(self) -> None:
        self.turn = 0
        self._handle: asyncio.Handle | None = None

    def __enter__(self) -> "Clock":
        self._tick()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._handle is not None
        self._handle.cancel()

    def _tick(self) -> None:
        self.turn += 1
        self._handle = asyncio.get_running_loop().call_soon(self._tick)


async def test_so_many_pass_in_a_turn_in_the_order_of_coming_and_who_left_is_passed_over() -> None:
    turns, passed = LoopTurns(3), list[tuple[int, int]]()

    async def ask(number: int) -> None:
        await turns.wait()
        passed.append((number, clock.turn))

    with Clock() as clock:
        tasks = [asyncio.ensure_future(ask(number)) for number in range(20)]
        await asyncio.sleep(0)
        for number in (5, 6, 7, 19):
            tasks[number].cancel()
        late = asyncio.ensure_future(ask(20))
        await asyncio.gather(*tasks, late, return_exceptions=True)
        assert [number for number, _ in passed] == [*range(5), *range(8, 19), 20]
        assert max(Counter(turn for _, turn in passed).values()) == 3
        for _ in range(5):
            await asyncio.sleep(0)
        before = clock.turn
        await ask(21)
        assert passed[-1] == (21, before), "nobody waits without need"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/openapi.json", "/load", "/none"])
async def test_each_turn_of_the_loop_answers_a_few_who_ask(null: Served, path: str) -> None:
    app, answered = create_app(null.service), list[int]()

    async def ask() -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answered.append(clock.turn)

        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http",
            "http_version": "1.1", "root_path": "",
        }  # fmt: skip
        await app(scope, asyncio.Event().wait, send)

    with Clock() as clock:
        await asyncio.gather(*(ask() for _ in range(40)))
    assert len(answered) == 40 and max(Counter(answered).values()) <= 4


async def test_scrapes_that_wait_for_the_same_reading_share_what_is_written(
    null: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none gets what was written before it asked."""
    written: list[int] = []
    plain = export.plain_text
    monkeypatch.setattr(export, "plain_text", lambda *what, **how: written.append(1) or plain(*what, **how))
    come = asyncio.Event()

    async def call(name: str) -> None:
        await come.wait()

    readings = export.Readings(call)
    monkeypatch.setattr(null.service, "readings", readings)
    request = Request({"type": "http", "app": create_app(null.service), "headers": []})

    async def scrape(num: int) -> list[bytes]:
        asked = [asyncio.ensure_future(export.metrics(request)) for _ in range(num)]
        await asyncio.sleep(0.01)
        come.set()
        return [bytes((await one).body) for one in asked]

    first = await scrape(20)
    assert len(written) == 1 and len(set(first)) == 1
    come.clear()
    monkeypatch.setattr(null.service.meter, "num_aborted", null.service.meter.num_aborted + 7)
    [later] = await scrape(1)
    assert len(written) == 2 and later != first[0]
    come.clear()
    monkeypatch.setattr(export.Readings.refresh, "__defaults__", (0.0, 0.01))
    monkeypatch.setattr(null.service.meter, "num_aborted", null.service.meter.num_aborted + 7)
    late = bytes((await export.metrics(request)).body)
    assert len(written) == 3 and late != later, "an engine that does not answer is not waited for, and figures go on"
    come.set()
    await readings._task
