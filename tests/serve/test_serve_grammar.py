"""Structured output over HTTP: each kind holds, wrong ones are refused before scheduling, and nobody else waits."""

import contextlib
import json
import re
import threading
import time
from itertools import pairwise

import httpx
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
for _ in range(80):
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


SAYS = "ab" * 450
"""What the made-up model says, where its answer must not come to an end by chance."""
BURNING = 'start: s\ns: s s | s s s | s s s s | "a" | "b" | ""'


def pattern(text: str) -> dict:
    return {"response_format": {"type": "regex", "regex": text}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (pattern("((a{1,1000}){1,1000}){1,1000}"), "response_format", "too complex"),
        ({"guided_regex": "a{1000000}"}, "guided_regex", "too complex"),
        ({"guided_grammar": 'start: "a" start'}, "guided_grammar", "Too many items"),
        ({"guided_grammar": 'start: start "a"'}, "guided_grammar", "nothing can fulfil it"),
        (schema({"enum": []}), "response_format", "nsatisfiable"),
        (schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
         "response_format", "nothing can fulfil it"),
        (schema({"type": "string", "format": "nonsense"}), "response_format", "nonsense"),
        (schema({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}), "response_format",
         "x-guidance"),
    ],
)  # fmt: skip
def test_c26_grammars_that_explode_are_400_before_anything_runs(null: Served, fields, param, words) -> None:
    for stream in (False, True):
        error = null.refused(CHAT, {"messages": HI, "stream": stream, "max_tokens": 99, **fields}, param=param)
        assert words in error["message"] and "Error" not in error["message"] and "<" not in error["message"], error


def test_c26_a_burning_grammar_ends_alone_and_is_told_of_its_limit() -> None:
    """Ambiguous rules: each mask takes longer than the one before. The stream beside them keeps its pace."""
    with serving(step_s=0.01, max_model_len=1024, in_process=False, script=SAYS) as served:
        body = {"prompt": "go", "max_tokens": 400, "ignore_eos": True, "stream": True}
        bound = {"messages": HI, "max_tokens": 900, "guided_grammar": BURNING}
        served.chat(guided_regex="[a-c]{1,900}", max_tokens=9)  # the processes have started
        answers: list = []

        def burn(seed: int) -> None:
            answers.append(served.post(CHAT, {**bound, "seed": seed}))

        threads = [threading.Thread(target=burn, args=(seed,)) for seed in range(2)]
        with served.http.stream("POST", COMPLETIONS, json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            for thread in threads:
                thread.start()
            times = [time.monotonic() for _ in pieces]
        gaps = sorted(b - a for a, b in pairwise(times))
        assert gaps[-4] < 0.06, gaps[-8:]
        for thread in threads:
            thread.join()
        for one in answers:
            error = one.json()["error"]
            assert one.status_code == 400 and error["param"] == "guided_grammar" and error["code"] == "grammar_failed"
            assert "10 ms a token" in error["message"] and "simpler" in error["message"], error
        served.at_rest(5)


def test_a_stream_whose_grammar_fails_ends_with_an_error_event() -> None:
    with serving(max_model_len=1024, script=SAYS) as served:
        body = {"messages": HI, "guided_grammar": BURNING, "max_tokens": 900}
        events = served.events(CHAT, body)
        error = events[-1]["error"] if events[-1] != "[DONE]" else events[-2]["error"]
        assert error["param"] == "guided_grammar" and "limit is 0.5 s" in error["message"], error
        assert len(events) > 5 and not any(
            c["finish_reason"] for e in events for c in getattr(e, "get", dict)("choices", [])
        )
        served.canary()


def test_grammars_of_clients_that_left_hold_nobody_up() -> None:
    """24 grammars, of which each takes as long as it may, and nobody who waits for them."""
    parts = " & ".join(rf"/(.|\n)*[a-z]{{{length}}}.*/" for length in range(3, 33))
    with serving(max_model_len=512) as served:
        served.chat(guided_regex="[ab]{3}", max_tokens=9)  # the processes have started
        for number in range(24):
            bad = {"prompt": "a", "guided_grammar": f"start: T\nT: {parts} & /(.|\\n)*q{number}.*/"}
            with pytest.raises(httpx.ReadTimeout):
                served.http.post(COMPLETIONS, json=bad, timeout=httpx.Timeout(5, read=0.05))
        began_s = time.monotonic()
        assert json.loads(served.chat(**schema({"enum": [17]}))["choices"][0]["message"]["content"]) == 17
        assert time.monotonic() - began_s < 4, "it took 38 s"
        deadline_s = time.monotonic() + 3
        while (engine := served.http.get("/load").json()["engine"])["trials"] or engine["compiling"]:
            assert time.monotonic() < deadline_s, engine
            time.sleep(0.05)
        served.at_rest(5)


def test_new_grammars_beyond_the_line_are_refused_at_once_and_known_ones_are_not() -> None:
    parts = " & ".join(rf"/(.|\n)*[a-z]{{{length}}}.*/" for length in range(3, 33))
    answers: list[httpx.Response] = []
    with serving(max_model_len=512, max_new_grammars=1) as served:
        served.chat(guided_regex="[ab]{3}", max_tokens=9)

        def ask(number: int) -> None:
            bad = {"prompt": "a", "guided_grammar": f"start: T\nT: {parts} & /(.|\\n)*q{number}.*/"}
            with contextlib.suppress(httpx.ReadTimeout):  # the others are left
                answers.append(served.post(COMPLETIONS, bad, timeout=2))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        served.chat(guided_regex="[ab]{3}", max_tokens=9)
        for thread in threads:
            thread.join()
        late = [answer for answer in answers if answer.status_code == 503]
        assert late, "16 at once, one at work and one in line"
        for answer in late:
            assert answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == "overloaded"
        messages = [answer.json()["error"]["message"] for answer in late]
        assert any("the limit is 1 for this client.\nhint: try again" in message for message in messages)
        served.at_rest(5)


def test_bound_requests_take_turns() -> None:
    """More burning grammars than there are workers: a cheap one beside them gets its masks."""
    with serving(step_s=0.005, max_model_len=1024, in_process=False, script=SAYS) as served:
        served.chat(guided_regex="[a-c]{1,900}", max_tokens=9)
        bodies = [{"messages": HI, "guided_grammar": BURNING, "max_tokens": 900, "seed": seed}
                  for seed in range(3)]  # fmt: skip
        threads = [threading.Thread(target=served.post, args=(CHAT, body)) for body in bodies]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        began_s = time.monotonic()
        answer = served.chat(guided_regex="[ab]{100}", max_tokens=100)["choices"][0]
        took_s = time.monotonic() - began_s
        assert any(thread.is_alive() for thread in threads), "nothing burnt any more"
        assert answer["message"]["content"] == SAYS[:100]
        assert took_s < 6, took_s
        for thread in threads:
            thread.join(60)
        served.at_rest(5)


def test_it_stops_where_the_grammar_ends_and_is_cut_where_max_tokens_says(null: Served) -> None:
    def choice(**fields) -> tuple[str, str]:
        answer = null.chat(**{"max_tokens": 60, "temperature": 0, **fields})["choices"][0]
        return answer["message"]["content"], answer["finish_reason"]

    assert choice(guided_choice=["yes"]) == ("yes", "stop")
    assert choice(guided_choice=["yes"], ignore_eos=True) == ("yes", "stop")
    assert choice(guided_choice=["yes"], min_tokens=20) == ("yes", "stop")
    assert choice(guided_choice=[""]) == ("", "stop")
    assert choice(guided_regex="") == ("", "stop")
    assert choice(guided_regex="a{50}", max_tokens=9) == ("a" * 9, "length")
    assert choice(guided_choice=['<|im_end|> "q" \\ .*\n\x00é😀']) == ('<|im_end|> "q" \\ .*\n\x00é😀', "stop")
    unending = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    text, why = choice(**schema(unending))
    assert why == "length" and text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "fields",
    [
        schema({"enum": list(range(10_000))}),
        schema({"enum": [{"a": i} for i in range(3000)]}),
        {"guided_choice": [f"option number {i}" for i in range(1000)]},
        schema({"type": "integer", "multipleOf": 7919, "minimum": -(10**15), "maximum": 10**15}),
        schema({"type": "string", "maxLength": 1_000_000}), schema({"type": "string", "minLength": 1_000_000}),
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
        schema({"type": "object", "patternProperties": {"^a[0-9]+$": {"type": "integer"}},
                "additionalProperties": False}),
        schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}),
        schema({"type": "object", "properties": {"e": {"type": "string", "format": "email"},
                                                 "i": {"type": "string", "format": "ipv6"}}}),
        {"guided_regex": r"[\p{L}]{1,500}"}, {"guided_regex": r"(\p{L}|\p{N}){1,50}[^\p{Lu}]{3,30}"},
    ],
    ids=lambda fields: json.dumps(fields)[-60:],
)  # fmt: skip
def test_large_grammars_are_followed(null: Served, fields: dict) -> None:
    answer = null.chat(max_tokens=100, temperature=1, seed=3, **fields)["choices"][0]
    assert answer["finish_reason"] in ("stop", "length")
    if answer["finish_reason"] == "stop" and "response_format" in fields:
        json.loads(answer["message"]["content"])


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
