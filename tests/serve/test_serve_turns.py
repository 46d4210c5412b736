"""Large bodies: clients take turns, none may fill the line or the memory, and nobody keeps a turn for nothing."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_drive import Served, serving
from starlette.requests import ClientDisconnect, Request

from tandem.serve import bodies as bodies_module
from tandem.serve.bodies import Bodies, BodyClaims
from tandem.serve.failure import HttpError
from tandem.serve.options import ServeOptions

JSON = {"content-type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BIG, SMALL = 4 << 20, 80_000


class Asking:
    """A request of a client whose body has been read. left: its client closes the connection."""

    def __init__(self, bodies: Bodies, client: str, num_bytes: int) -> None:
        self.bodies, self.left = bodies, asyncio.Event()
        self.scope: dict[str, Any] = {"type": "http", "tandem.client": client}
        bodies.claim(self.scope, num_bytes)
        self.task = asyncio.ensure_future(bodies.take_turn(Request(self.scope, self._receive)))

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    def end(self) -> None:
        self.bodies.release(self.scope)
        self.bodies.check()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@asynccontextmanager
async def in_line(bodies: Bodies, *whom: tuple[str, int]) -> AsyncIterator[list[Asking]]:
    asking = [Asking(bodies, *who) for who in whom]
    await settle()
    bodies.check()
    yield asking
    for one in asking:
        one.task.cancel()
        one.end()
    await asyncio.gather(*(one.task for one in asking), return_exceptions=True)
    assert bodies.turn is None and not bodies.num_bytes and not bodies.held and not bodies.waiting


async def order_of(asking: list[Asking]) -> list[int]:
    """In which order they have their turns, each ended before the next."""
    order: list[int] = []
    while len(order) < len(asking):
        (now,) = [number for number, one in enumerate(asking) if one.task.done() and number not in order]
        order.append(now)
        asking[now].end()
        await settle()
    return order


def test_clients_take_turns() -> None:
    async def test() -> None:
        whom = [("a", BIG)] * 5 + [("b", SMALL), ("c", BIG), ("b", SMALL)]
        async with in_line(Bodies(), *whom) as asking:
            assert await order_of(asking) == [0, 5, 6, 1, 7, 2, 3, 4]

    run(test())


def test_a_smaller_body_of_the_same_client_waits_for_one_larger_one_alone() -> None:
    """Behind one address there may be many users."""

    async def test() -> None:
        async with in_line(Bodies(), *[("a", BIG)] * 5, ("a", SMALL), ("a", SMALL)) as asking:
            assert await order_of(asking) == [0, 5, 1, 6, 2, 3, 4]

    run(test())


def test_a_client_has_no_more_turns_for_having_bodies_of_many_sizes() -> None:
    async def test() -> None:
        whom = [("a", SMALL << size) for size in range(6)] + [("b", SMALL), ("b", SMALL)]
        async with in_line(Bodies(), *whom) as asking:
            assert await order_of(asking) == [0, 6, 1, 7, 2, 3, 4, 5]

    run(test())


def test_who_leaves_or_is_cancelled_is_in_nobody_s_way() -> None:
    async def test() -> None:
        async with in_line(Bodies(), *[("a", BIG)] * 4) as asking:
            asking[1].left.set()
            asking[2].task.cancel()
            await settle()
            with pytest.raises(ClientDisconnect):
                await asking[1].task
            for one in asking[1:3]:
                one.end()
            asking[0].end()
            await settle()
            assert asking[3].task.done()

    run(test())


def test_a_turn_that_comes_as_its_client_leaves_goes_on_to_the_next() -> None:
    async def test() -> None:
        async with in_line(Bodies(), *[("a", BIG)] * 3) as asking:
            asking[1].left.set()
            asking[0].end()  # its turn comes in the same moment
            await settle()
            await asyncio.gather(asking[1].task, return_exceptions=True)
            asking[1].end()
            await settle()
            assert asking[2].task.done() and asking[2].task.exception() is None

    run(test())


def test_no_turn_within_the_time_is_503() -> None:
    async def test() -> None:
        async with in_line(Bodies(wait_s=0.02), ("a", BIG), ("b", BIG)) as asking:
            with pytest.raises(HttpError, match="no turn") as refused:
                await asking[1].task
            assert refused.value.code == "overloaded" and refused.value.headers["Retry-After"] == "1"

    run(test())


def test_one_client_leaves_others_an_eighth_of_the_line_and_of_the_memory() -> None:
    async def test() -> None:
        async with in_line(Bodies(max_waiting=16), *[("a", SMALL)] * 16) as asking:
            with pytest.raises(HttpError, match="14 large bodies are in the server, 14 of them this client's") as full:
                await asking[15].task
            assert full.value.code == "queue_full" and "Retry-After" in full.value.headers
        async with in_line(Bodies(8 * SMALL, max_waiting=16), *[("a", SMALL)] * 6, ("b", SMALL)) as asking:
            bodies = asking[0].bodies
            with pytest.raises(HttpError, match=r"560000 bytes of bodies .* 480000 of them this client's") as full:
                bodies.check_room(asking[0].scope, SMALL)
            assert full.value.code == "queue_full"
            bodies.check_room({"tandem.client": "c"}, SMALL)
            with pytest.raises(HttpError, match="640000 would be passed") as full:
                bodies.check_room({"tandem.client": "c"}, SMALL + 1)
            assert full.value.code == "overloaded" and bodies.num_refused == 2

    run(test())


def test_a_body_that_is_alone_has_room() -> None:
    bodies, scope = Bodies(100), {"tandem.client": "a"}
    for _ in range(3):
        bodies.claim(scope, 100)
    bodies.release(scope)
    bodies.release(scope)
    bodies.check()
    assert not bodies.num_bytes and ServeOptions(client_reserve=0.25).bodies.reserve == 0.25


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["come", "leave", "cancel", "end"]), st.sampled_from("abc"), st.integers(0, 20)),
    max_size=40,
)


@given(ACTIONS)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_somebody_has_the_turn(actions: list[tuple[str, str, int]]) -> None:
    async def test() -> None:
        bodies, asking = Bodies(), list[Asking]()
        for what, client, number in actions:
            if what == "come":
                asking.append(Asking(bodies, client, SMALL << number % 6))
            elif asking:
                one = asking[number % len(asking)]
                if what == "leave":
                    one.left.set()
                elif what == "cancel":
                    one.task.cancel()
                if what == "end" or not one.task.done():
                    await settle()
                if one.task.done() and (what == "end" or one.task.cancelled() or one.task.exception()):
                    one.end()
                    asking.remove(one)
            bodies.check()
        while asking:  # everybody has a turn, once those before have ended
            await settle()
            done = [one for one in asking if one.task.done()]
            assert done, "everybody waits"
            for one in done:
                await asyncio.gather(one.task, return_exceptions=True)
                one.end()
                asking.remove(one)
        assert bodies.turn is None and not bodies.held and not bodies.waiting

    run(test())


def test_a_client_that_does_not_read_its_answer_gives_its_turn_back() -> None:
    async def test() -> None:
        async with in_line(Bodies(), ("a", BIG), ("b", BIG)) as asking:
            stuck = asyncio.Event()

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await send({"type": "http.response.start", "status": 400})

            async def send(message: Any) -> None:
                await stuck.wait()

            task = asyncio.ensure_future(BodyClaims(app, asking[0].bodies)(asking[0].scope, None, send))
            await settle()
            assert asking[1].task.done()
            stuck.set()
            await task

    run(test())


def filled(client: str, **more: Any) -> bytes:
    tool = {"type": "function", "function": {"name": "f", "description": client + " " * SMALL}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "none", "max_tokens": 1}
    return json.dumps({**body, **more}).encode()


@pytest.fixture
def keyed() -> Any:
    with serving(keys=("first", "other"), max_model_len=256, step_s=0.01) as served:
        yield served


def test_an_honest_body_waits_for_one_of_twelve_connections(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    decode = bodies_module.decode

    def slow(raw: bytes, kind: Any) -> Any:
        decoded.append(raw)
        time.sleep(0.05)
        return decode(raw, kind)

    monkeypatch.setattr(bodies_module, "decode", slow)
    with ThreadPoolExecutor(12) as pool:
        crowd = [pool.submit(keyed.post, CHAT, content=filled("crowd"), headers=JSON) for _ in range(12)]
        while keyed.statistics()["bodies"]["waiting"] < 8:
            time.sleep(0.005)
        before = len(decoded)
        answer = keyed.post(CHAT, content=filled("honest"), headers={**JSON, "authorization": "Bearer other"})
        passed = next(place for place, raw in enumerate(decoded) if b"honest" in raw) - before
        assert answer.status_code == 200 and passed <= 2, f"{passed} bodies had their turn before"
        assert {future.result().status_code for future in crowd} == {200}
    keyed.at_rest()


def test_a_turn_ends_before_the_answer_begins(keyed: Served) -> None:
    with keyed.http.stream("POST", CHAT, content=filled("a", stream=True, max_tokens=150), headers=JSON) as answer:
        assert answer.status_code == 200
        assert keyed.post(CHAT, content=filled("b"), headers=JSON).status_code == 200
        assert keyed.statistics()["requests"] == 1, "the first is being answered still"
    keyed.at_rest()


def test_a_small_body_of_many_objects_stands_in_line_too(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the loop as long as a large one, byte for byte."""
    threads: list[str] = []
    decode = bodies_module.decode

    def noted(raw: bytes, kind: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decode(raw, kind)

    monkeypatch.setattr(bodies_module, "decode", noted)
    for piece, num in (("{},", 100), ("{},", 200), ("\\u007B,", 200), ("\\u004b,", 200)):
        raw = f'{{"prompt":"{piece * num}{" " * 400}"}}'.encode()
        keyed.refused(COMPLETIONS, None, param="prompt", content=raw, headers=JSON)
    assert ["tandem-bodies" in name for name in threads] == [False, True, True, False]
    keyed.at_rest()


def test_no_two_quick_bodies_are_rendered_at_once(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds the interpreter: with many threads the event loop would hardly have its turn."""
    front = keyed.service.engine._front
    render, num, most = front.render, 0, 0

    def slow(*what: Any, **options: Any) -> str:
        nonlocal num, most
        num += 1
        most = max(most, num)
        time.sleep(0.01)
        text = render(*what, **options)
        num -= 1
        return text

    monkeypatch.setattr(front, "render", slow)
    quick = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: keyed.post(CHAT, quick), range(16)))
    assert {answer.status_code for answer in answers} == {200} and most == 1
