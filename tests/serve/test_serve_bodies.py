"""Large bodies, however hostile, leave the event loop its turn: what takes long to decode is refused before."""

import asyncio
import gc
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_drive import Served, serving

from tandem.errors import RequestError
from tandem.serve import nesting
from tandem.serve.conversation import _all_checked
from tandem.serve.decoded import decode
from tandem.serve.nesting import build_of, check_build, check_inner
from tandem.serve.schema import ChatRequest, CompletionRequest, FunctionTool, Generation, ResponsesRequest

MIB = 1 << 20
JSON = {"content-type": "application/json"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HEAD = '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
CALL = '{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f",'
TEXT = st.text('[]{}":,1\\a/é', max_size=6)
VALUES = st.recursive(
    TEXT | st.none() | st.integers(-(10**20), 10**20) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def filled(piece: str, head: str, tail: str) -> bytes:
    num = (4 * MIB - len(head) - len(tail) - 10) // (len(piece) + 1)
    return (head + ",".join([piece] * num) + tail).encode()


HOSTILE = {
    "unknown": (CHAT, filled("{}", f'{HEAD}"foo":[', "]}"), "arrays and objects"),
    "fields": (CHAT, filled('"x":null', HEAD, "}"), "fields"),
    "refused": (CHAT, filled('{"a":1}', f'{HEAD}"audio":[', "]}"), "arrays and objects"),
    "deep": (CHAT, f'{HEAD}"foo":{"[" * MIB}{"]" * MIB}}}'.encode(), "nested too deep"),
    "messages": (CHAT, filled("{}", '{"messages":[', "]}"), "arrays and objects"),
    "items": (RESPONSES, filled('{"type":"reasoning"}', '{"input":[', "]}"), "arrays and objects"),
    "tools": (CHAT, filled('{"type":"function"}', f'{HEAD}"tools":[', "]}"), "arrays and objects"),
    "schema": (CHAT, filled('"a"', f'{HEAD}"guided_json":{{"enum":[', "]}}"), "strings"),
    "bias": (CHAT, filled('"1234567":1', f'{HEAD}"logit_bias":{{', "}}"), "strings"),
    "ids": (COMPLETIONS, filled("1", '{"prompt":[', "]}"), "values"),
    "numbers": (CHAT, filled("1" * 4000, f'{HEAD}"foo":[', "]}"), "characters in a number"),
    "arguments": (CHAT, filled("{}", f'{{"messages":[{CALL}"arguments":"[', ']"}}]}]}'), "arguments has"),
    "one tool": (CHAT, filled("a" * 1000, f'{HEAD}"tools":[{{"type":"function","function":{{"name":"f","description":"',
                              '"}}]}'), "524288"),
    "text": (COMPLETIONS, filled("word", '{"prompt":"', '"}'), "context_length_exceeded"),
    "quotes": (COMPLETIONS, filled('[{\\"', '{"prompt":"', '"}'), "context_length_exceeded"),
}  # fmt: skip


def built(value: Any) -> tuple[int, int, int]:
    """Depth, containers and strings of a value."""
    if isinstance(value, str):
        return 0, 0, 1
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [built(item) for item in (value if isinstance(value, list) else [*value, *value.values()])]
    return (
        1 + max((depth for depth, _, _ in inner), default=0), 1 + sum(num for _, num, _ in inner),
        sum(num for _, _, num in inner),
    )  # fmt: skip


@given(VALUES, st.booleans(), st.integers(2, 9), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_text_is_measured_slice_by_slice(value: object, ascii_only: bool, size: int, wide: bool) -> None:
    raw = json.dumps({"x": value}, ensure_ascii=ascii_only, indent=1 if wide else None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "_SLICE_BYTES", size)
        small = build_of(raw)
    assert small == build_of(raw)
    assert (small.depth, small.containers, small.strings, small.fields) == (*built({"x": value}), 1)


@pytest.mark.parametrize(
    ("raw", "field", "number"),
    [
        ('{"a":1,"b":[1,2,{"c":3}],"d":"x,y"}', "fields", 3), ('{"a":[1,2,3],"b":0}', "values", 4),
        ("[1,-12.5e30,7]", "number", 8), ('["aaaaaaaaaaaaaaaa",12]', "number", 2), ("123456", "number", 6),
    ],
)  # fmt: skip
def test_what_is_counted(raw: str, field: str, number: int) -> None:
    for size in (2, 3, 5, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nesting, "_SLICE_BYTES", size)
            assert getattr(build_of(raw.encode()), field) == number


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_bodies_are_refused_for_what_they_are(null: Served, kind: str) -> None:
    path, raw, word = HOSTILE[kind]
    assert len(raw) <= 4 * MIB
    error = null.refused(path, None, content=raw, headers=JSON)
    assert word in f"{error['message']} {error['code']}", error
    assert len(error["message"]) < 500


@pytest.mark.parametrize("kind", ["refused", "messages", "bias", "numbers", "deep", "fields"])
def test_what_is_refused_for_its_build_is_not_decoded(kind: str) -> None:
    """In a tenth of the time that decoding it would take, or so: no object is made of it."""
    _, raw, _ = HOSTILE[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.serve.failure.msgspec.json.decode", lambda *what, **more: pytest.fail("decoded"))
        with pytest.raises(RequestError):
            decode(raw, ChatRequest)


def test_large_bodies_that_are_well_are_taken(null: Served) -> None:
    """Code full of brackets, quotes and commas as text; many messages; tools of half a megabyte."""
    code = 'x = {"a": [1, 2], "b": "\\\\"}; ' * 30_000
    body = decode(json.dumps({"prompt": code, "unknown": None}).encode(), CompletionRequest)
    assert body.prompt == code
    messages = [{"role": "user", "content": [{"type": "text", "text": "a" * 50}] * 4}] * 4000
    assert len(decode(json.dumps({"messages": messages}).encode(), ChatRequest).messages) == 4000
    null.refused(CHAT, {"messages": messages}, param="messages")  # longer than the context
    tool = {"type": "function", "function": {"name": "f", "description": "a" * (500 << 10)}}
    answer = null.chat(tools=[tool], tool_choice="none", max_tokens=1)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_arguments_that_are_long_and_well_are_taken() -> None:
    check_build(json.dumps([{"a": i} for i in range(60_000)]).encode(), max_fields=nesting.MAX_CONTAINERS)


def calls(arguments: str, num: int) -> list[dict]:
    function = {"name": "f", "arguments": arguments}
    made = [{"id": f"c{i}", "type": "function", "function": function} for i in range(num)]
    return [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": made}]


ARGUMENTS = {
    "arrays and objects": ('{"a":[' + "{}," * 20_000 + "{}]}", 67), "strings": ('{"a":[' + '"",' * 20_000 + '""]}', 40),
    "values": ('{"a":[' + "1," * 30_000 + "1]}", 60), "in few calls": ('{"a":[' + "[]," * 33_000 + "[]]}", 2),
    "in many": ('{"a":{},"b":[]}', 16_000), "cut short": ('{"a":[' + "{}," * 20_000, 60),
}  # fmt: skip


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_of_all_calls_together_are_measured_before_they_are_decoded(kind: str) -> None:
    messages = calls(*ARGUMENTS[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.engine.messages.json.loads", lambda *what, **more: pytest.fail("decoded"))
        began_s = time.thread_time()
        if kind == "in many":  # 48,000 in 16,000 calls
            _all_checked(messages)
            messages += calls('{"a":[' + "{}," * 17_600 + "{}]}", 1)
        with pytest.raises(RequestError, match=r"the limit is (65536|131072)") as refused:
            _all_checked(messages)
        assert time.thread_time() - began_s < 0.4
    assert refused.value.param == "messages" and refused.value.hint and "together" in refused.value.what


def test_text_in_arguments_counts_for_nothing() -> None:
    """A call that wrote a file of code, cut in its middle; escapes and quotes do not confuse."""
    text = json.dumps({"path": "a.py", "content": 'x = {"a": [[], {}], "b\\\\": "\\""}, ' * 1400})
    assert len(text) < nesting.SMALL_BYTES
    _all_checked(calls(text, 60))
    _all_checked(calls(text[:-30], 60))
    long = json.dumps({"content": '[{,"' * 200_000})
    _all_checked(calls(long, 3))


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_short_and_long_arguments_are_counted_alike(value: object) -> None:
    text = json.dumps({"x": value})
    _, containers, strings = built({"x": value})
    for size in (0, 1 << 16):
        for limit, most in (("MAX_CONTAINERS", containers), ("MAX_STRINGS", strings)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(nesting, "SMALL_BYTES", size)
                patch.setattr(nesting, limit, 2 * most)
                check_inner([text, text], "they have", "messages", "fewer.")
                patch.setattr(nesting, limit, 2 * most - 1)
                with pytest.raises(RequestError, match=f"they have {2 * most} "):
                    check_inner([text, text], "they have", "messages", "fewer.")


def test_every_route_that_takes_calls_refuses_too_much_in_them(null: Served) -> None:
    arguments = ARGUMENTS["arrays and objects"][0]
    messages = calls(arguments, 4)
    items = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": arguments} for i in range(4)]
    told = "the arguments of earlier tool calls have 80012 arrays and objects together; the limit is 65536."
    for path, body, param in (
        (CHAT, {"messages": messages}, "messages"), ("/tokenize", {"messages": messages}, "messages"),
        (RESPONSES, {"input": items}, "input"),
    ):  # fmt: skip
        error = null.refused(path, body, param=param)
        assert error["message"].startswith(told) and "hint: leave out earlier calls" in error["message"]


SENDER = """
import sys, threading, http.client
kinds = [line.rstrip("\\n").split(" ", 2) for line in sys.stdin]
def one(path, file):
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    connection.request("POST", path, open(file, "rb").read(), {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 400, answer.status
threads = [threading.Thread(target=one, args=kind) for kind in kinds]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_fifteen_hostile_bodies_at_once_leave_the_loop_its_turn(tmp_path) -> None:
    """Its delay while they come, sorted: the median of the worst ones, since the machine has other work, too."""
    files = []
    for number, (path, raw, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}").write_bytes(raw)
        files.append(f"{path} {tmp_path / f'{number}'}\n")

    async def watch(stop: asyncio.Event) -> list[float]:
        gaps, last_s = [], time.perf_counter()
        while not stop.is_set():
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            gaps.append(now_s - last_s)
            last_s = now_s
        return sorted(gaps)

    async def begin() -> tuple[asyncio.Event, asyncio.Task]:
        stop = asyncio.Event()
        return stop, asyncio.ensure_future(watch(stop))

    with serving(max_model_len=512, in_process=False) as served:
        stop, task = served.run(begin())
        port = served.url.rsplit(":", 1)[1]
        subprocess.run([sys.executable, "-c", SENDER, port], input="".join(files), text=True, check=True, timeout=60)
        served.loop.call_soon_threadsafe(stop.set)
        gaps = served.run(task)
        assert gaps[-5] < 0.06, f"{[round(gap * 1e3) for gap in gaps[-10:]]} ms"
        served.at_rest()


@pytest.fixture(scope="module")
def slow() -> Any:
    with serving(max_model_len=512, step_s=0.01) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_nobody_holds_a_body_while_it_is_answered(slow: Served, path: str, stream: bool) -> None:
    """Decoded it takes many times its bytes, and its bytes are counted no more."""
    said = '[{"role":"user","content":"a","mark of a body":1}]'
    function = '"name":"f","parameters":{"mark of a body":1}'
    fields = {
        CHAT: f'"messages":{said},"max_tokens":180,"tools":[{{"type":"function","function":{{{function}}}}}]',
        COMPLETIONS: '"prompt":"a","max_tokens":180,"guided_json":{"type":"string","minLength":300,"mark of a body":1}',
        RESPONSES: f'"input":{said},"max_output_tokens":180,"tools":[{{"type":"function",{function}}}]',
    }

    def held() -> list[Any]:
        """Types are asked for, not __class__, at which some libraries' objects warn or load themselves."""
        kinds = Generation, ResponsesRequest, FunctionTool
        return [
            found for found in gc.get_objects()
            if issubclass(type(found), kinds) or (type(found) is dict and "mark of a body" in found)
        ]  # fmt: skip

    with ThreadPoolExecutor(1) as pool:
        content = f'{{{fields[path]},"seed":4,"ignore_eos":true,"stream":{str(stream).lower()}}}'
        content = content.replace('"ignore_eos":true,', "") if path == RESPONSES else content
        answer = pool.submit(slow.http.post, path, content=content, headers=JSON)
        while not slow.service.streams and not answer.done():
            time.sleep(0.002)
        gc.collect()
        assert not held() and not answer.done(), answer.result().text
        assert answer.result().status_code == 200
    slow.at_rest()
