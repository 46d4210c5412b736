"""Updates of many streams come in order, merged where nobody reads, and their events are the same by either way."""

import asyncio
import gc
import json
import weakref

import pytest
from front_drive import serving

from tandem.engine.contract import Update
from tandem.engine.streams import AsyncInbox
from tandem.errors import RequestError, TandemError
from tandem.serve.reply import Ask, Show
from tandem.serve.shapes import ChatReply, CompletionReply
from tandem.serve.updates import Updates

NASTY = ("plain", 'a "quote" and \\', "\n\t\x00\x1f", "ü é 語 😀", "\N{REPLACEMENT CHARACTER}", "</script>", "x" * 5000)
OVER, WAITED = TandemError("over"), TandemError("waited")


class FakeStream:
    def __init__(self, num_prompt: int = 3) -> None:
        self.inbox, self.prompt_token_ids, self.aborted = AsyncInbox(), list(range(num_prompt)), 0

    def abort(self) -> None:
        self.aborted += 1

    def end(self, error: TandemError | None) -> None:
        self.inbox.end(error)


class Watching:
    """A tap that is its own watcher."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.left: list[str | None] = []

    def watch(self, asks):
        return self

    def saw(self, ask, update) -> None:
        self.seen.append(update.text)

    def close(self, left) -> None:
        self.left.append(left)


def updates_of(asks, taps=(), limit_s=10.0, wait_s=None, ended_by=lambda: None, naming=None) -> Updates:
    wait = None if wait_s is None else (wait_s, WAITED)
    return Updates(asks, taps, (limit_s, OVER), wait, set(), ended_by, naming)


def asks_of(count: int) -> list[Ask]:
    return [Ask(FakeStream(), 1, index) for index in range(count)]


async def until_asleep() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_not_read_is_merged_also_with_several_prompts() -> None:
    asks = asks_of(3)
    updates = updates_of(asks)
    asks[1].stream.inbox.feed(Update(0, "0", [0]))
    assert (await anext(updates))[0] is asks[1]
    for number in range(1000):
        for ask in asks:
            ask.stream.inbox.feed(Update(0, "ab", [number]))
    for ask in asks:
        ask.stream.inbox.end(None)
    found = [(ask.first_index, update.text, len(update.token_ids)) async for ask, update in updates]
    assert sorted(found) == [(index, "ab" * 1000, 1000) for index in range(3)]
    assert all(ask.stream.aborted and ask.stream.inbox.on_news is None for ask in asks)


async def test_thousands_of_answers_at_once_leave_the_loop_to_others() -> None:
    asks = asks_of(2000)
    for ask in asks:
        ask.stream.inbox.feed(Update(0, "a", [1]))
        ask.stream.inbox.end(None)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(others())
    found = [ask.first_index async for ask, _ in updates_of(asks)]
    other.cancel()
    assert found == list(range(2000)) and turns >= 2000 // 64


async def test_a_reader_that_waits_is_woken_once_for_each_piece_of_news() -> None:
    (ask,) = asks_of(1)
    tap, found = Watching(), []

    async def read() -> None:
        async for _, update in updates_of([ask], [tap]):
            found.append(update.text)

    reading = asyncio.ensure_future(read())
    for number in range(5):
        await until_asleep()
        assert len(found) == number
        ask.stream.inbox.feed(Update(0, str(number), [number]))
    ask.stream.inbox.end(None)
    await asyncio.wait_for(reading, 1)
    assert found == tap.seen == list("01234") and tap.left == [None]


async def test_an_error_comes_behind_what_came_before_it_and_names_its_field() -> None:
    (ask,) = asks_of(1)
    tap = Watching()
    updates = updates_of([ask], [tap], naming="response_format")
    ask.stream.inbox.feed(Update(0, "a", [1]))
    ask.stream.inbox.end(RequestError("no such grammar", code="invalid_value"))
    assert (await anext(updates))[1].text == "a"
    with pytest.raises(RequestError) as error:
        await anext(updates)
    assert error.value.param == "response_format" and tap.left == ["failed"] and ask.stream.aborted
    with pytest.raises(StopAsyncIteration):
        await anext(updates)


async def test_leaving_and_cancelling_abort_every_stream() -> None:
    for leave in (True, False):
        asks, tap = asks_of(2), Watching()
        updates = updates_of(asks, [tap])
        reading = asyncio.ensure_future(anext(updates))
        await until_asleep()
        if leave:
            asks[0].stream.inbox.feed(Update(0, "a", [1]))
            await reading
            await updates.aclose()
        else:
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        await updates.aclose()
        assert tap.left == ["aborted"] and all(ask.stream.aborted == 1 for ask in asks)


async def test_times_are_over() -> None:
    (ask,) = asks_of(1)
    with pytest.raises(TandemError, match="waited"):
        await anext(updates_of([ask], wait_s=0.01))
    (ask,) = asks_of(1)
    updates = updates_of([ask], limit_s=0.05, wait_s=0.02)
    ask.stream.inbox.feed(Update(0, "a", [1]))
    assert (await anext(updates))[1].text == "a"
    with pytest.raises(TandemError, match="over"):
        await anext(updates)


async def test_an_answer_that_the_server_ended_says_why() -> None:
    (ask,) = asks_of(1)
    updates = updates_of([ask], ended_by=lambda: OVER)
    ask.stream.inbox.feed(Update(0, finish="abort"))
    with pytest.raises(TandemError, match="over"):
        await anext(updates)


async def test_updates_that_nobody_reads_keep_no_stream_alive() -> None:
    (ask,) = asks_of(1)
    inbox, stream = ask.stream.inbox, weakref.ref(ask.stream)
    updates = updates_of([ask])
    del updates, ask
    gc.collect()
    assert stream() is None and inbox.on_news is None


@pytest.mark.parametrize("make", [ChatReply, CompletionReply])
@pytest.mark.parametrize("model", ["null", 'odd "\N{REPLACEMENT CHARACTER}" name'])
async def test_events_that_show_text_alone_are_what_the_general_way_gives(make, model, monkeypatch) -> None:
    async def events(parts: tuple[tuple[str, str | None], ...]) -> list[bytes]:
        asks = [Ask(FakeStream(), 1, 0, "echo"), Ask(FakeStream(), 1, 1, "echo")]
        reply = make(asks, model, None, Show(usage_chunk=True))
        reply.id, reply.created = "id", 1
        found, chunks = [], reply.chunks(updates_of(asks))
        for text, finish in parts:
            for ask in asks:
                ask.stream.inbox.feed(Update(0, text, [1], finish=finish))
            found += [await anext(chunks) for _ in asks]
        for ask in asks:
            ask.stream.inbox.end(None)
        return found + [event async for event in chunks]

    parts = (*((text, None) for text in NASTY), ("last", "length"))
    quick = await events(parts)
    monkeypatch.setattr(make, "_plain", lambda self, choice: None)
    assert quick == await events(parts) and len(quick) == 2 * len(parts) + 2


async def test_a_streamed_answer_leaves_nothing_for_the_collector() -> None:
    """The server collects rarely; rings left by every request would add up between."""
    body = json.dumps({"prompt": "count", "max_tokens": 5, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
    async with serving(max_model_len=512) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))

        async def ask(times: int) -> None:
            for _ in range(times):
                writer.write(b"%b%d\r\n\r\n%b" % (head, len(body), body))
                await reader.readuntil(b"\r\n0\r\n\r\n")

        await ask(5)
        gc.collect()
        gc.disable()
        try:
            await ask(30)
            assert gc.collect() < 30
        finally:
            gc.enable()
        writer.close()
        await writer.wait_closed()
