"""News of an engine that is faster than its event loop: everything comes, in order, and everybody else has his turn."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.engine import relay as relays
from tandem.engine.relay import MAX_WAITING, Relay
from tandem.errors import EngineDeadError, TandemError
from tandem.request import Change


class SlowFront:
    """Takes so long for each step's news."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.heard: list[int] = []
        self.ended: list[TandemError | None] = []

    def news(self, changes: Sequence[Change]) -> None:
        end_s = time.perf_counter() + self.step_s
        while time.perf_counter() < end_s:
            pass
        self.heard.append(changes[0].tokens[0])

    def stopped(self, error: TandemError | None) -> None:
        self.ended.append(error)


def news(number: int, count: int = 64) -> list[Change]:
    return [Change("1", tokens=(number,))] * count


def relay_to(front: Any) -> Relay:
    relay = Relay(asyncio.get_running_loop())
    relay.front = front
    return relay


async def test_a_flood_leaves_the_loop_to_others_and_is_slowed_down() -> None:
    """300 ms of work come at once; a callback each few ms is still called, and what waits stays short."""
    front = SlowFront(0.0005)
    relay = relay_to(front)
    most = 0

    def flood() -> None:
        nonlocal most
        for number in range(600):
            relay.news(news(number))
            most = max(most, relay._num_waiting)
        relay.stopped(EngineDeadError("over"))

    thread = threading.Thread(target=flood)
    thread.start()
    gaps, last_s = [], time.perf_counter()
    while not front.ended:
        await asyncio.sleep(0)
        gaps.append(time.perf_counter() - last_s)
        last_s = time.perf_counter()
    thread.join()
    assert front.heard == list(range(600)) and isinstance(front.ended[0], EngineDeadError)
    assert MAX_WAITING / 2 < most < MAX_WAITING + 64
    assert sorted(gaps)[int(len(gaps) * 0.9)] < 0.05 and len(gaps) > 20, gaps


async def test_a_loop_that_stands_still_does_not_hold_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "PATIENCE_S", 0.05)
    front = SlowFront()
    relay = relay_to(front)
    thread = threading.Thread(target=lambda: [relay.news(news(number)) for number in range(1000)])
    thread.start()
    thread.join(5)  # on the event loop's own thread: nothing is taken meanwhile
    assert not thread.is_alive() and not front.heard
    while len(front.heard) < 1000:
        await asyncio.sleep(0)
    assert front.heard == list(range(1000)) and not relay._stands_still


async def test_one_that_fails_does_not_stop_the_rest() -> None:
    class Failing(SlowFront):
        def news(self, changes: Sequence[Change]) -> None:
            super().news(changes)
            if changes[0].tokens[0] == 1:
                raise RuntimeError("a reader's fault")

    front, told = Failing(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    relay = relay_to(front)
    for number in range(3):
        relay.news(news(number))
    while len(front.heard) < 3:
        await asyncio.sleep(0)
    assert [str(error) for error in told] == ["a reader's fault"]
