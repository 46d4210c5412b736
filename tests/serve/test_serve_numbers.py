"""Numbers of things in one body: over a limit they are refused before anything goes over them."""

import time

import pytest
from serve_drive import Served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
PART = {"type": "text", "text": "a"}
MANY = f"[{','.join(['{}'] * 1_300_000)}]"


@pytest.mark.parametrize(
    ("path", "body", "param", "limit"),
    [
        (CHAT, {"messages": [{}] * 4097}, "messages", 4096),
        (CHAT, {"messages": [{"role": "user", "content": [PART] * 16385}]}, "messages", 16384),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * 16385}]}, "messages", 16384),
        ("/tokenize", {"messages": [{}] * 4097}, "messages", 4096),
        ("/detokenize", {"tokens": [1] * 65537}, "tokens", 65536),
        (RESPONSES, {"input": [{}] * 4097}, "input", 4096),
        (RESPONSES, {"input": [{"type": "reasoning", "content": [PART] * 16385}]}, "input", 16384),
        (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f"}] * 129}, "tools", 128),
        (CHAT, {"messages": HI, "logit_bias": {str(i): 0 for i in range(4097)}}, "logit_bias", 4096),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 4097}, "stop_token_ids", 4096),
        (CHAT, {"messages": HI, "chat_template_kwargs": {f"a{i}": 0 for i in range(65)}}, "chat_template_kwargs", 64),
        (CHAT, {"messages": HI, "user": "u" * 513}, "user", 512),
        (COMPLETIONS, {"prompt": "a", "user": "u" * 513}, "user", 512),
        (CHAT, {"messages": HI, "prompt_cache_key": "u" * 513}, "prompt_cache_key", 512),
        (RESPONSES, {"input": "a", "safety_identifier": "u" * 513}, "safety_identifier", 512),
        (RESPONSES, {"input": "a", "prompt_cache_key": "u" * 513}, "prompt_cache_key", 512),
        (RESPONSES, {"input": "a", "user": "u" * 513}, "user", 512),
        (CHAT, {"messages": HI, "n": 0}, "n", 16),
        (COMPLETIONS, {"prompt": "a", "n": 17}, "n", 16),
    ],
)  # fmt: skip
def test_too_many_are_refused_with_the_limit(null: Served, path: str, body: dict, param: str, limit: int) -> None:
    assert str(limit) in null.refused(path, body, param=param)["message"].split()[-1]


def test_what_the_limits_allow_is_served(null: Served) -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": ""}] * 16}] * 9
    null.chat(talk + HI, max_tokens=1, user="u" * 512, logit_bias={str(i): 0 for i in range(200)})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, f'{{"messages":{MANY}}}'),
        (RESPONSES, f'{{"input":{MANY}}}'),
    ],
    ids=["messages", "items"],
)  # fmt: skip
def test_refusing_a_large_body_takes_about_as_long_as_decoding_it(null: Served, path: str, body: str) -> None:
    began_s = time.perf_counter()
    answer = null.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and time.perf_counter() - began_s < 0.7, time.perf_counter() - began_s
