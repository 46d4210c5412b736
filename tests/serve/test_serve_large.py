"""Large answers: how large one may be, written in slices, what their parts are, and what of them is counted."""

import asyncio
import json

import orjson
import pytest
from serve_drive import Served, serving

from tandem.engine.contract import Update
from tandem.engine.text import Text
from tandem.request import SamplingParams
from tandem.serve import reply, shapes, written
from tandem.serve.failure import HttpError
from tandem.serve.items import ResponsesReply, echoed_of
from tandem.serve.options import ServeOptions
from tandem.serve.reply import Ask, Show
from tandem.serve.schema import ResponsesRequest

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
SHOWN = {"echo": True, "logprobs": 3, "prompt_logprobs": 2, "return_token_ids": True, "max_tokens": 5, "seed": 1}


@pytest.mark.parametrize(
    ("path", "body", "param", "number"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 256, "n": 3}, "n", "768"),
        (COMPLETIONS, {"prompt": ["a" * 300] * 20, "n": 10, "max_tokens": 1, "echo": True, "logprobs": 20}, "logprobs",
         str(200 * 301 * 21)),
        (COMPLETIONS, {"prompt": ["a" * 300] * 20, "n": 10, "max_tokens": 1, "prompt_logprobs": 20}, "prompt_logprobs",
         str(200 * 300 * 21)),
        (COMPLETIONS, {"prompt": ["a" * 300] * 9, "n": 10, "max_tokens": 1, "echo": True, "logprobs": 20,
                       "prompt_logprobs": 0}, "logprobs", str(90 * (600 + 1) * 21)),
    ],
)  # fmt: skip
def test_answers_that_would_be_too_large_are_refused(
    null: Served, path: str, body: dict, param: str, number: str
) -> None:
    assert number in null.refused(path, body, param=param)["message"]


def test_the_limits_on_answers_are_the_operators() -> None:
    options = ServeOptions(max_answers=3, max_answer_logprobs=100)
    with serving(options, max_model_len=256) as served:
        served.complete(["a", "a", "a"], max_tokens=1)
        served.refused(COMPLETIONS, {"prompt": ["a"] * 4}, param="prompt")
        served.refused(CHAT, {"messages": HI, "n": 4}, param="n")
        asked = {"max_tokens": 10, "logprobs": True}
        served.chat(**asked, top_logprobs=9)
        error = served.refused(CHAT, {"messages": HI, **asked, "top_logprobs": 10}, param="logprobs")
        assert "110" in error["message"] and "100" in error["message"]
        [choice] = served.chat(logprobs=True, top_logprobs=1, ignore_eos=True)["choices"]
        assert choice["finish_reason"] == "length", "without max_tokens it takes what the limit leaves"
        assert len(choice["logprobs"]["content"]) == 50
        assert served.events(CHAT, {"messages": HI, **asked, "top_logprobs": 10})[-1] == "[DONE]"
        body = {"input": "a", "max_output_tokens": 10, "top_logprobs": 10}
        for stream in (False, True):  # its last event is the whole answer
            served.refused(RESPONSES, {**body, "stream": stream}, param="top_logprobs")


def test_slices_and_pieces_change_no_answer(null: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        (COMPLETIONS, {"prompt": ["Hello ü", "Bye"], "n": 3, **SHOWN}),
        (COMPLETIONS, {"prompt": "Hello", **SHOWN, "max_tokens": 0}),
        (COMPLETIONS, {"prompt": "Hello", "logprobs": 2, "max_tokens": 5, "seed": 1}),
        (CHAT, {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 6, "seed": 1,
                "prompt_logprobs": 1}),
        (RESPONSES, {"input": "a", "top_logprobs": 2, "max_output_tokens": 6, "seed": 1}),
    ]  # fmt: skip

    def answers() -> list[dict]:
        found = [null.post(path, body) for path, body in asked]
        assert all(answer.status_code == 200 for answer in found), [answer.text[:300] for answer in found]
        assert all(int(answer.headers["content-length"]) == len(answer.content) for answer in found)
        return [plain(answer.json()) for answer in found]

    def plain(answer: dict) -> dict:
        for item in answer.get("output", ()):
            item.pop("id")
        usage = {name: value for name, value in answer["usage"].items() if "details" not in name}
        return {**answer, "usage": usage, "id": "", "created": 0, "created_at": 0}

    whole = answers()
    assert len(whole[0]["choices"]) == 6 and len(whole[0]["choices"][0]["logprobs"]["tokens"]) > 10
    assert whole[1]["choices"][0]["logprobs"]["top_logprobs"][0] is None
    monkeypatch.setattr(written, "SLICE", 4)
    monkeypatch.setattr(written, "PIECE_BYTES", 7)
    assert answers() == whole


def test_what_answers_to_a_prompt_share_is_written_once(null: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    num = 0
    plain = shapes.completion_lists

    def counting(tokens, entries, offsets):
        nonlocal num
        num += len(entries)
        return plain(tokens, entries, offsets)

    monkeypatch.setattr(shapes, "completion_lists", counting)
    null.complete(["a" * 100, "b" * 100], n=16, echo=True, logprobs=1, max_tokens=1)
    assert num == 2 * 100 + 32


def test_others_have_their_turn_while_lists_are_written() -> None:
    async def main() -> tuple[list, int]:
        over, num = False, 0

        async def other() -> None:
            nonlocal num
            while not over:
                await asyncio.sleep(0)
                num += 1

        task = asyncio.ensure_future(other())
        await asyncio.sleep(0)
        lists = await written.written_lists(
            lambda some: ([[i] * 20 for i in some],), range(10_000), 20, written.Turns()
        )  # fmt: skip
        over = True
        await task
        return json.loads(b"[" + b"".join(lists[0]) + b"]"), num

    values, num = asyncio.run(main())
    assert values == [[i] * 20 for i in range(10_000)] and num >= 200_000 // written.SLICE


@pytest.mark.parametrize(("num_streams", "size"), [(8, written.STREAM_SLICE), (6, None)])
def test_many_answers_share_the_slices_of_a_turn(num_streams: int, size: int | None) -> None:
    """Not a slice for each in every turn; all get on alike, and who leaves holds nobody up."""
    in_turns: list[int] = []
    order: list[int] = []

    async def write(number: int) -> None:
        turns, left = written.Turns(size), 12 * (size or written.SLICE)
        while left > 0:
            await turns.ready()
            in_turns[-1] += 256
            order.append(number)
            left -= 256
            await turns.done(256)

    async def main() -> None:
        in_turns.append(0)
        tasks = [asyncio.create_task(write(number)) for number in range(num_streams)]
        leaver = asyncio.create_task(write(-1))
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            in_turns.append(0)
            if len(in_turns) == 5:
                leaver.cancel()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert max(in_turns) <= written.MAX_IN_TURN + (size or written.SLICE)
    assert sum(map(bool, in_turns)) >= num_streams * 12 * (size or written.SLICE) // (
        written.MAX_IN_TURN + written.SLICE
    )
    half = order[: len(order) // 2]
    shares = [half.count(number) for number in range(num_streams)]
    assert max(shares) - min(shares) <= 2 * (size or written.SLICE) // 256, shares


def test_a_whole_answer_that_cannot_be_written_counts_as_failed(null: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(null.service.ended)
    monkeypatch.setattr(shapes.ChatReply, "answer", lambda self, choice: {"message": object()})
    null.refused(CHAT, {"messages": HI, "max_tokens": 1}, status=500, headers={"connection": "close"})
    assert null.service.ended["failed"] == before["failed"] + 1 and null.service.ended["done"] == before["done"]


def test_admission_counts_answers_and_their_tokens() -> None:
    options = ServeOptions(max_requests=20, max_queued_tokens=1000, max_answers=21, client_reserve=0.0)
    with serving(options, max_model_len=1024, step_s=0.002) as served:
        long = {"prompt": [[5, 6]] * 9, "n": 2, "max_tokens": 900, "ignore_eos": True}
        with served.http.stream("POST", COMPLETIONS, json={**long, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert "choices" in next(lines)
            now = served.statistics()
            assert (now["requests"], now["answers"], now["prompt_tokens"]) == (1, 18, 36)
            error = served.refused(COMPLETIONS, {"prompt": "a", "n": 3}, status=429)
            assert error["code"] == "queue_full" and "18" in error["message"] and "20" in error["message"]
            assert "1000" in served.refused(COMPLETIONS, {"prompt": [5] * 500, "n": 2}, status=429)["message"]
            served.complete("a", n=2, max_tokens=1)
        now = served.at_rest()
        assert (now["requests"], now["answers"], now["prompt_tokens"]) == (0, 0, 0)
        assert len(served.complete(["a"] * 21, max_tokens=1)["choices"]) == 21  # alone, it has room


LISTED = {"max_tokens": 4, "logprobs": 4, "ignore_eos": True}  # 5 values a token


def test_log_probabilities_are_counted_until_they_are_sent() -> None:
    """In all and for each client; a whole answer counts until its client has read it."""
    with serving(ServeOptions(max_logprobs=80, client_reserve=0.25), max_model_len=1024, step_s=0.05) as served:
        served.complete([5], **{**LISTED, "max_tokens": 17})  # it is alone
        served.at_rest()
        long = {"prompt": [5], **LISTED, "max_tokens": 11, "stream": True}
        with served.http.stream("POST", COMPLETIONS, json=long) as answer:
            lines = answer.iter_lines()
            assert "choices" in next(lines) and served.statistics()["logprobs"] == 55
            error = served.refused(COMPLETIONS, {"prompt": "a", **LISTED}, status=429)
            assert error["code"] == "queue_full" and "55 log-probabilities" in error["message"]
            served.complete("a", max_tokens=4)
        served.at_rest()
        assert not served.service.logprobs
        served.complete("a", **LISTED)


def test_a_whole_answer_holds_its_log_probabilities_while_it_is_sent() -> None:
    closed: list[bool] = []

    async def app(scope, receive, send) -> None:
        assert not closed
        raise OSError("the client has gone")

    async def main() -> None:
        await written.Closing(app, lambda: closed.append(True))({}, None, None)

    with pytest.raises(OSError, match="gone"):
        asyncio.run(main())
    assert closed == [True]


def test_a_stream_whose_reader_leaves_too_many_log_probabilities_is_ended(null: Served) -> None:
    service = null.service

    async def main() -> None:
        params = SamplingParams(max_tokens=200, logprobs=4, ignore_eos=True)
        ask = Ask(await service.engine.submit([5, 6], params), 1, params=params)
        updates = service.updates([ask], behind=8)
        with pytest.raises(HttpError, match="more than 8 tokens") as slow:
            async for _ in updates:
                while not ask.stream.inbox.has_news or (ask.stream.inbox.num_logprobs and len(service.streams)):
                    assert ask.stream.inbox.num_logprobs <= 8
                    await asyncio.sleep(0.001)
        assert slow.value.code == "reader_too_slow"

    null.run(main())
    null.at_rest()


def test_an_answer_that_is_not_shown_is_not_counted(null: Served) -> None:
    meter = null.service.meter
    before = meter.num_generated_tokens, meter.num_prompt_tokens
    usage = null.complete("abc", max_tokens=0, echo=True)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)
    assert (meter.num_generated_tokens, meter.num_prompt_tokens) == (before[0], before[1] + 3)
    meter.check()


def test_a_response_that_nobody_reads_on_closes_its_updates(null: Served) -> None:
    class Stream:
        prompt_token_ids = (1,)

    class Endless:
        closed = False

        def __aiter__(self):
            return self

        async def __anext__(self):
            return ask, Update(0, "a", [5])

        async def aclose(self) -> None:
            self.closed = True

    ask = Ask(Stream(), 1)
    tokens: Text = null.service.engine.text

    async def main() -> bool:
        updates = Endless()
        reply = ResponsesReply([ask], "m", tokens, Show(), echoed=echoed_of(ResponsesRequest(input="a")))
        chunks = reply.chunks(updates)
        first = await anext(chunks)
        assert orjson.loads(first.splitlines()[1].removeprefix(b"data: "))["type"] == "response.created"
        await chunks.aclose()
        return updates.closed

    assert asyncio.run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_many_log_probabilities_in_one_event_of_a_stream_are_written_in_slices(
    null: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same events; and the loop has its turn while one of thousands of values is written."""
    asked = {"max_tokens": 12, "seed": 1, "temperature": 1, "ignore_eos": True}
    asked |= {"messages": HI, "logprobs": True, "top_logprobs": 5} if path == CHAT else {"prompt": "a", "logprobs": 5}

    def shown() -> list:
        events = [event["choices"][0] for event in null.events(path, asked)[:-1]]
        names = ("content",) if path == CHAT else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return [[entry for event in events for entry in (event["logprobs"] or {}).get(name) or ()] for name in names]

    plain = shown()
    assert len(plain[0]) == 12
    num_large, large = 0, reply.Reply._large_event

    def counting(*what):
        nonlocal num_large
        num_large += 1
        return large(*what)

    monkeypatch.setattr(reply, "STREAM_SLICE", 20)
    monkeypatch.setattr(reply.Reply, "_large_event", counting)
    assert shown() == plain and num_large > 0
