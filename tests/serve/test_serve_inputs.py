"""What clients may send wrongly: fields out of bounds, odd bodies, a table of nasty ones; the engine is unharmed."""

import json
import socket

import pytest
from serve_drive import Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}
V = 259


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": 1e9}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": -0.1}, "min_p"), ({"min_p": 1.5}, "min_p"),
        ({"top_k": 1.5}, "top_k"),
    ],
)  # fmt: skip
def test_c17_sampling_out_of_range(null: Served, body: dict, param: str) -> None:
    null.refused(COMPLETIONS, {"prompt": "a", **body}, param=param)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "nan"])
def test_c17_not_numbers_are_no_json(null: Served, literal: str) -> None:
    for name in ("temperature", "top_p", "min_p"):
        null.refused(COMPLETIONS, None, content=f'{{"prompt":"a","{name}":{literal}}}', headers=JSON)


def test_c17_tiny_values_answer(null: Served) -> None:
    greedy = null.complete("abc", temperature=0, max_tokens=4, ignore_eos=True, return_token_ids=True)
    for extra in ({"temperature": 1e-6}, {"top_p": 1e-6}, {"top_k": 1}, {"top_k": V}, {"top_k": 10**9}, {"min_p": 1.0}):
        answer = null.complete("abc", max_tokens=4, ignore_eos=True, return_token_ids=True, **extra)
        assert answer["choices"][0]["token_ids"] == greedy["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"), ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": -1}, "repetition_penalty"),
    ],
)  # fmt: skip
def test_c19_penalties_out_of_range(null: Served, body: dict, param: str) -> None:
    null.refused(COMPLETIONS, {"prompt": "x x x x", **body}, param=param)
    null.complete("x x x x", presence_penalty=2, frequency_penalty=2, repetition_penalty=1.5, max_tokens=2)


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [[5], []], ["a", 5], [[5], "a"]])
def test_c20_empty_prompts(null: Served, prompt) -> None:
    before = null.at_rest()["engine"]["tokens"]
    null.refused(COMPLETIONS, {"prompt": prompt}, param="prompt")
    assert null.at_rest()["engine"]["tokens"] == before, "nothing of a mixed list runs"


def test_c20_numbers_of_tokens(null: Served) -> None:
    null.refused(CHAT, {"messages": []}, param="messages")
    for value in (-1, 1.5, 10**12, "5", True):
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
            null.refused(path, {**body, "max_tokens": value}, param="max_tokens")
    null.refused(CHAT, {"messages": HI, "max_completion_tokens": -1}, param="max_completion_tokens")
    null.refused(COMPLETIONS, {"prompt": "a", "max_tokens": 0}, param="max_tokens")
    default = null.complete("a", max_tokens=None, ignore_eos=True)
    assert default["usage"]["completion_tokens"] == 16
    rest = null.chat(max_tokens=None, ignore_eos=True)["usage"]
    assert rest["total_tokens"] == 512


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [0, V, 1]}, "prompt"), ({"prompt": [0, -1]}, "prompt"), ({"prompt": [2**63]}, "prompt"),
        ({"logit_bias": {str(V): 5}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"stop_token_ids": [V, -7], "min_tokens": 1}, "stop_token_ids"), ({"stop_token_ids": [-7]}, "stop_token_ids"),
        ({"seed": 2**63}, "seed"), ({"seed": 2**64}, "seed"), ({"seed": -(2**63) - 1}, "seed"), ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": 10**9}, "n"), ({"priority": 2**40}, "priority"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"min_tokens": -1}, "min_tokens"),
    ],
)  # fmt: skip
def test_c21_out_of_the_vocabulary_and_of_64_bits(null: Served, body: dict, param: str) -> None:
    null.refused(COMPLETIONS, {"prompt": "a", **body}, param=param)


def test_c21_the_bounds_themselves_pass(null: Served) -> None:
    for extra in ({"prompt": [V - 1]}, {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"logit_bias": {str(V - 1): 100}}):
        null.complete(**{"prompt": "a", "max_tokens": 2, **extra})


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"content": b'{"prompt":"a"}'}, 415),
        ({"content": b'{"prompt":"a"}', "headers": {"content-type": "text/plain"}}, 415),
        ({"content": b'{"prompt":"a"', "headers": JSON}, 400),
        ({"content": b"", "headers": JSON}, 400),
        ({"content": b"[1]", "headers": JSON}, 400),
        ({"content": b'"a"', "headers": JSON}, 400),
        ({"content": b"[" * 100_000, "headers": JSON}, 400),
        ({"content": b'{"a":' * 100_000, "headers": JSON}, 400),
        ({"content": b'{"prompt":"' + b"x" * (5 << 20) + b'"}', "headers": JSON}, 413),
        ({"content": b'{"prompt":"a","model":"\xff"}', "headers": JSON}, 400),
        ({"content": b'{"prompt":"\\ud800"}', "headers": JSON}, 400),
        ({"content": b'{"prompt":"a\x01"}', "headers": JSON}, 400),
    ],
)  # fmt: skip
def test_c22_bodies_that_are_no_request(null: Served, request_: dict, status: int) -> None:
    null.refused(COMPLETIONS, None, status, **request_)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hi"}, "messages"), ({"messages": [{"role": "boss", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"), ({"messages": ["x"]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"), ({"messages": [{}]}, "messages"),
        ({"messages": HI, "stream": "yes"}, "stream"), ({"messages": HI, "audio": {}}, "audio"), ({}, "messages"),
        ({"messages": HI, "functions": []}, "functions"), ({"messages": HI, "store": True}, "store"),
        ({"messages": HI, "modalities": ["audio"]}, "modalities"), ({"messages": HI, "echo": True}, "echo"),
        ({"messages": HI, "service_tier": "flex"}, "service_tier"), ({"messages": HI, "verbosity": "low"}, "verbosity"),
        ({"messages": HI, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": HI, "chat_template": "x"}, "chat_template"),
        ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"messages": HI, "stop": [""]}, "stop"), ({"messages": HI, "stop": ["x"] * 17}, "stop"),
        ({"messages": HI, "stop": "x" * 2000}, "stop"), ({"messages": HI, "stop": [1]}, "stop"),
        ({"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": HI, "cache_salt": ""}, "cache_salt"), ({"messages": HI, "logit_bias": {"5": "x"}}, "logit_bias"),
    ],
)  # fmt: skip
def test_c22_chat_fields(null: Served, body: dict, param: str) -> None:
    null.refused(CHAT, body, param=param)


def test_c22_parts_are_joined_and_the_unknown_is_refused(null: Served) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    options = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
    split, plain = null.chat([{"role": "user", "content": parts}], **options), null.chat("hi", **options)
    assert split["prompt_token_ids"] == plain["prompt_token_ids"]
    null.chat([{"role": "user", "content": "x"}, {"role": "assistant", "content": None}, *HI], max_tokens=1)
    null.refused(CHAT, {"messages": HI, "unheard_of": {"x": [1]}}, param="unheard_of")
    assert null.refused(COMPLETIONS, {"prompt": "a", "suffix": "b"}, param="suffix")["code"] == "unsupported_value"
    null.refused(COMPLETIONS, {"prompt": "a", "best_of": 3}, param="best_of")


def test_c22_routes_and_methods(null: Served) -> None:
    for path, status, code in ((COMPLETIONS, 405, "method_not_allowed"), ("/v1/nothing", 404, "not_found")):
        answer = null.http.get(path)
        assert answer.status_code == status and answer.json()["error"]["code"] == code
    assert null.http.get(COMPLETIONS).headers["allow"]


def test_c23_too_long_is_refused_and_never_cut(null: Served) -> None:
    error = null.refused(COMPLETIONS, {"prompt": "x" * 712})
    assert error["code"] == "context_length_exceeded" and "712" in error["message"] and "512" in error["message"]
    error = null.refused(COMPLETIONS, {"prompt": "x" * 508, "max_tokens": 16})
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    overhead = null.post("/tokenize", {"messages": [{"role": "user", "content": ""}]}).json()["count"]
    answer = null.chat("x" * (508 - overhead), ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4 and answer["usage"]["prompt_tokens"] == 508
    again = null.chat("x" * (508 - overhead), ignore_eos=True)
    assert again["usage"]["prompt_tokens"] == 508
    assert null.refused(COMPLETIONS, {"prompt": [5] * 100_000})["code"] == "context_length_exceeded"


NASTY_VALUES = [
    None, True, False, 0, -1, 1e308, -1e308, 2**31, 2**63, 2**64, 10**40, 1e-320, "", " ", "\x00", "\u202e",
    "\ufffd" * 50, "💥", "{{ 7*7 }}", "<|im_end|>", "%s%n", "../../etc/passwd", [], [[]], [None], {}, {"": None},
    {"a": {"b": [1, {}]}}, [1, "a", None, [], {}], "9" * 5000, list(range(600)), {str(i): i for i in range(300)},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/tokenize", "/detokenize"])
def test_nasty_values_in_every_field(null: Served, path: str) -> None:
    """Only 2xx and 4xx, each with a body, and never a hurt engine."""
    document = null.http.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][schema.rsplit("/", 1)[1]]["properties"]
    base = {"messages": HI, "prompt": "a", "input": "a", "max_tokens": 1, "tokens": [5], "max_output_tokens": 1}
    base = {name: value for name, value in base.items() if name in fields}
    if path == "/tokenize":
        del base["messages"]
    for name in fields:
        if name == "stream":
            continue
        for value in NASTY_VALUES:
            body = {**base, name: value}
            if path == "/tokenize" and name == "messages":
                del body["prompt"]
            answer = null.post(path, body)
            allowed = (504,) if name == "timeout_s" else ()  # a time that is over before anything could happen
            assert answer.status_code in (200, *range(400, 500), *allowed), (name, value, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, (name, value)


def raw(null: Served, request: bytes, *, shut: bool = False) -> bytes:
    host, port = null.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(request)
        if shut:
            return b""
        received = b""
        while b"\r\n\r\n" not in received:
            more = connection.recv(65536)
            if not more:
                break
            received += more
        return received


def test_odd_transport(null: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    chunked = b"transfer-encoding: chunked\r\n\r\n" + b"".join(
        b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:])
    )
    assert raw(null, head + chunked + b"0\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert raw(null, head + b"content-length: 0\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(null, head + b"content-length: 99999999999\r\n\r\n").startswith(b"HTTP/1.1 413")
    raw(null, head + b"content-length: 500\r\n\r\n" + body, shut=True)  # leaves in the middle of its body
    assert raw(null, head + b"content-length: x\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(null, head + b"content-length: 5\r\n\r\n" + body[:5]).startswith(b"HTTP/1.1 400")
    assert raw(null, b"\x16\x03\x01 nonsense\r\n\r\n").startswith((b"HTTP/1.1 400", b""))
    twice = b'{"prompt": "a", "prompt": "b", "max_tokens": 1, "max_tokens": 2, "echo": true, "ignore_eos": true}'
    answer = null.http.post(COMPLETIONS, content=twice, headers=JSON).json()
    assert answer["choices"][0]["text"].startswith("b") and answer["usage"]["completion_tokens"] == 2
