"""Structured output over HTTP: each kind holds, wrong ones are refused before scheduling, and nobody else waits."""

import json
import re
import threading
import time
from itertools import pairwise

import pytest
from serve_drive import Served, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
PLAIN = {"prompt": [9, 8, 7, 6], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def schema(value: object) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": value}}}


AGE = {"type": "integer", "maximum": 150}
PERSON = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": AGE},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


def test_every_kind_holds(null: Served) -> None:
    def content(**fields) -> str:
        answer = null.chat(max_tokens=200, temperature=0, **fields)
        events = null.events(CHAT, {"messages": HI, "max_tokens": 200, "temperature": 0, **fields})
        text = answer["choices"][0]["message"]["content"]
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1]) == text
        return text

    for person in (content(**schema(PERSON)), content(guided_json=PERSON), content(guided_json=json.dumps(PERSON))):
        assert re.match(r'\{\s*"name"\s*:\s*"', person)
    assert content(response_format={"type": "regex", "regex": "[0-9]{3}-[a-f]{2}"})[3] == "-"
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", content(guided_regex="[0-9]{3}-[a-f]{2}"))
    assert content(response_format={"type": "choice", "choice": ["yes", "no"]}) in ("yes", "no")
    assert content(guided_choice=["ä", "öö"]) in ("ä", "öö")
    assert content(guided_grammar='start: "a" NUM\nNUM: /[0-9]{2}/').startswith("a")
    assert content(response_format={"type": "json_object"}).lstrip().startswith("{")
    assert null.chat(response_format={"type": "text"}, max_tokens=1)


def test_forced_tools_are_called() -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("one", "two")]
    asked = (("required", ("one", "two")), ({"type": "function", "function": {"name": "two"}}, ("two",)))
    with serving(max_model_len=2048) as served:
        for choice, names in asked:
            answer = served.chat(tools=tools, tool_choice=choice, max_tokens=300)["choices"][0]
            assert answer["finish_reason"] == "tool_calls"
            [call] = answer["message"]["tool_calls"]
            assert call["function"]["name"] in names and json.loads(call["function"]["arguments"])["n"] in (1, 2)


DEEP: dict = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (schema({"type": "objekt"}), "response_format"),
        (schema({"type": "string", "pattern": "(["}), "response_format"),
        (schema({"$ref": "#/nowhere"}), "response_format"), (schema(DEEP), "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"), (schema(None), "response_format"),
        ({"response_format": {"type": "regex", "regex": "(["}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "choice"}}, "response_format"),
        ({"response_format": {"type": "choice", "choice": []}}, "response_format"),
        ({"guided_json": "{"}, "guided_json"), ({"guided_json": "[" * 500 + "]" * 500}, "guided_json"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"), ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)  # fmt: skip
def test_c26_malformed_is_refused_and_the_others_are_unchanged(null: Served, fields: dict, param: str) -> None:
    plain = null.post(COMPLETIONS, PLAIN).json()["choices"]
    answers: list = []
    threads = [threading.Thread(target=lambda: answers.append(null.post(COMPLETIONS, PLAIN).json())) for _ in range(4)]
    for thread in threads:
        thread.start()
    before = null.statistics()["engine"]["planner"]["num_steps"]
    for stream in (False, True):
        error = null.refused(CHAT, {"messages": HI, "stream": stream, **fields})
        assert error["param"] == param, error
    for thread in threads:
        thread.join()
    assert [answer["choices"] for answer in answers] == [plain] * 4 and before >= 0


def test_c26_nesting_of_5000_and_large_maximum_and_self_reference(null: Served) -> None:
    nested = '{"items":' * 5000 + "{}" + "}" * 5000
    body = '{"messages":[{"role":"user","content":"x"}],"guided_json":' + nested + "}"
    null.refused(CHAT, None, content=body.encode(), headers={"content-type": "application/json"})
    assert null.chat(max_tokens=10, **schema({"type": "integer", "maximum": 20000000000}))
    loop = {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
    answer = null.post(CHAT, {"messages": HI, "max_tokens": 5, **schema(loop)})
    assert answer.status_code in (200, 400)
    null.refused(CHAT, {"messages": HI, **schema({"$ref": "#"})})


def test_c26_grammars_and_masks_that_take_long_delay_nobody() -> None:
    """A stream goes on, step by step, while grammars are compiled for a second and each mask takes 0.1 s."""
    with serving(step_s=0.01, max_model_len=512, in_process=False, compile_s=1.0, mask_s=0.1) as served:
        bound = {"messages": HI, "max_tokens": 4, "guided_regex": "[0-9]{4}"}
        body = {"prompt": "go", "max_tokens": 200, "ignore_eos": True, "stream": True}
        times, answers = [], []
        threads = [threading.Thread(target=lambda: answers.append(served.post(CHAT, bound))) for _ in range(3)]
        with served.http.stream("POST", COMPLETIONS, json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            for thread in threads:
                thread.start()
            times = [time.monotonic() for _ in pieces]
            for thread in threads:
                thread.join()
        gaps = sorted(b - a for a, b in pairwise(times))
        assert times[-1] - times[0] > 1.5 and gaps[-3] < 0.08, gaps[-5:]
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        assert len(texts) == 3 and all(re.fullmatch("[0-9]{4}", text) for text in texts)
        served.at_rest(5)


def test_without_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    with serving(max_model_len=256) as served:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        error = served.refused(
            CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, param="response_format"
        )
        assert "llguidance" in error["message"]
        served.canary()


def test_the_engine_reports_what_it_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report with the last step must not be the last: the row of a bound request leaves behind it."""
    monkeypatch.setattr("tandem.engine.loop.REPORT_S", 0.0)
    with serving(max_model_len=256) as served:
        served.chat(guided_choice=["yes", "no"], max_tokens=9)
        assert served.at_rest()["engine"]["planner"]["num_running"] == 0
