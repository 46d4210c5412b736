"""Tool calls that a grammar governs: strict tools under auto, in each family; beside a schema; forced and cut short."""

import json
import re

import pytest
from serve_drive import Served, serving
from test_serve_text import tool_answers

from tandem.serve.call_grammar import CallGrammar
from tandem.serve.calls import HERMES, LLAMA, MISTRAL, Calls
from tandem.serve.schema import FunctionTool

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
STRICT = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}]
OSLO = {"hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
        "mistral by name": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
        "llama": '{"name": "weather", "parameters": {"city": "Oslo"}}'}  # fmt: skip
TEMPLATES = {"hermes": "<tool_call>{{ tools }}x", "mistral": "[TOOL_CALLS]{{ tools }}x",
             "mistral by name": "[TOOL_CALLS]{{ tools }}[ARGS]x", "llama": "{{ tools }}x"}  # fmt: skip


@pytest.mark.parametrize("family", OSLO)
def test_strict_tools_under_auto_are_called_by_their_schema(family: str) -> None:
    """The script says a city that the schema forbids; it may say so only without strict."""
    before = "" if family == "llama" else "Let me see. "
    source = {"chat_template": TEMPLATES[family]}
    with serving(script=before + OSLO[family], source=source, max_model_len=2048) as served:
        lax = [{"type": "function", "function": {**STRICT[0]["function"], "strict": False}}]
        choice, _ = tool_answers(served, tools=lax)
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
        choice, _ = tool_answers(served, tools=STRICT)
        for call in choice["message"]["tool_calls"]:
            assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Paris")
        assert choice["message"]["content"] == (before.strip() or None) and choice["finish_reason"] == "tool_calls"
        served.at_rest(5)


def test_strict_tools_leave_text_and_thoughts_alone() -> None:
    script = "Hm. 1 < 2.</think>It is <b>so</b>."
    with serving(script=script, source={"chat_template": "{{ tools }}<tool_call><think>"}, max_model_len=512) as served:
        choice, _ = tool_answers(served, tools=STRICT)
        assert choice["message"]["content"] == "It is <b>so</b>." and choice["finish_reason"] == "stop"
        assert choice["message"]["reasoning_content"] == "Hm. 1 < 2."


def test_one_strict_tool_beside_one_that_is_not() -> None:
    other = {"type": "function", "function": {"name": "free"}}
    script = '<tool_call>{"name": "free", "arguments": {"x": 1}}</tool_call>' + OSLO["hermes"]
    with serving(script=script, max_model_len=2048) as served:
        choice, _ = tool_answers(served, tools=[*STRICT, other], max_tokens=400)
        first, second = (call["function"] for call in choice["message"]["tool_calls"])
        assert first == {"name": "free", "arguments": '{"x": 1}'}
        assert json.loads(second["arguments"])["city"] in ("Rome", "Paris")
        one, _ = tool_answers(served, tools=[*STRICT, other], max_tokens=400, parallel_tool_calls=False)
        assert len(one["message"]["tool_calls"]) == 1


def test_tools_beside_a_schema_answer_by_call_or_by_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
    with serving(script=OSLO["hermes"], max_model_len=2048) as served:
        choice, _ = tool_answers(served, tools=STRICT, response_format=form)
        assert choice["message"]["tool_calls"] and choice["finish_reason"] == "tool_calls"
        plain, _ = tool_answers(served, tools=STRICT, response_format=form, tool_choice="none")
        assert plain["message"]["content"] in "12"
        forced, _ = tool_answers(served, tools=STRICT, response_format=form, tool_choice="required")
        assert forced["message"]["tool_calls"]
    with serving(script="2", max_model_len=2048) as served:
        choice, _ = tool_answers(served, tools=STRICT, response_format=form)
        assert choice["message"]["content"] == "2" and choice["finish_reason"] == "stop"
        answer = served.post(RESPONSES, {
            "input": "hi", "tools": [{"type": "function", **STRICT[0]["function"]}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [1, 2]}}},
        }).json()  # fmt: skip
        assert answer["output"][0]["content"][0]["text"] == "2"


@pytest.mark.parametrize("family", OSLO)
def test_a_governed_call_cut_short_leaves_no_raw_text(family: str) -> None:
    """Beside a schema, calls begun and cut are no content; an answer by the schema stays whole."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"n": {"const": 2}}, "required": ["n"], "additionalProperties": False}}}  # noqa: E501  # fmt: skip
    with serving(source={"chat_template": TEMPLATES[family]}, script=OSLO[family] * 2, max_model_len=2048) as served:
        for length in range(1, 90, 8):
            message = tool_answers(served, tools=STRICT, response_format=form, max_tokens=length)[0]["message"]
            if family != "llama":
                assert not message["content"], message
            elif length > 40:
                assert message["tool_calls"]
    with serving(source={"chat_template": TEMPLATES[family]}, script=OSLO[family], max_model_len=2048) as served:
        for length in range(14, 38, 4):
            assert not tool_answers(served, tools=STRICT, max_tokens=length)[0]["message"]["content"]
    with serving(source={"chat_template": TEMPLATES[family]}, script='{"n": 2}', max_model_len=2048) as served:
        for length, text in ((1, "{"), (5, '{"n":'), (9, '{"n": 2}')):
            message = tool_answers(served, tools=STRICT, response_format=form, max_tokens=length)[0]["message"]
            assert message["content"] == text and "tool_calls" not in message


def test_a_schema_that_cannot_be_enforced_is_refused_for_strict_tools_alone() -> None:
    def tools(strict: bool | None) -> list:
        return [{"type": "function", "function": {"name": "x", "strict": strict, "parameters": {"type": "objekt"}}}]

    with serving(max_model_len=2048) as served:
        error = served.refused(CHAT, {"messages": HI, "tools": tools(True)}, param="tools")
        assert "Invalid type: objekt" in error["message"] and "tool_call" not in error["message"], "our own grammar"
        served.refused(CHAT, {"messages": HI, "stream": True, "tools": tools(True)}, param="tools")
        for lax in (False, None):
            served.chat(tools=tools(lax), max_tokens=1)
        served.canary()


LAX = {
    "type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["a"], "additionalProperties": False, "x-guidance": {"lenient": True},
}  # fmt: skip


@pytest.mark.parametrize("family", OSLO)
def test_a_schema_cannot_ask_for_laxness_within_a_grammar_of_calls(family: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": LAX}}
    any_object = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    lax = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": LAX}}]
    with serving(source={"chat_template": TEMPLATES[family]}, max_model_len=2048) as served:
        for fields, param in (
            ({"response_format": form}, "response_format"),
            ({"response_format": form, "tools": any_object}, "response_format"),
            ({"tools": lax}, "tools"), ({"tools": lax, "tool_choice": "required"}, "tools"),
        ):  # fmt: skip
            error = served.refused(CHAT, {"messages": HI, "max_tokens": 5, **fields}, param=param)
            assert "x-guidance" in error["message"] and "start:" not in error["message"]


def test_earlier_calls_are_shown_as_the_model_is_told_to_call() -> None:
    """Of a template that knows no tools: what the prompt says of an earlier call is a call, by the same rules."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    result = "[user]<tool_response>\nsunny\n</tool_response>"
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    talk = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]  # fmt: skip
    items = [*HI, {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
             {"type": "function_call_output", "call_id": "c1", "output": "sunny"}]  # fmt: skip
    with serving(source={"chat_template": template}, max_model_len=2048) as served:
        tokens = served.chat(talk, tools=STRICT, tool_choice="auto", max_tokens=1, return_token_ids=True)
        prompt = served.post("/detokenize", {"tokens": tokens["prompt_token_ids"]}).json()["prompt"]
        system, shown = prompt.split("[user]hi[assistant]")
        assert "write nothing but <tool_call>" in system and shown.endswith(result)
        [piece] = Calls(HERMES, ("weather",)).feed(shown.removesuffix(result), final=True)
        assert piece.tool and piece.tool.name == "weather" and json.loads(piece.tool.arguments) == {"city": "Oslo"}
        bare = served.post(RESPONSES, {"input": items, "max_output_tokens": 1}).json()["usage"]["input_tokens"]
        assert bare == len("[user]hi[assistant]" + shown)


def test_a_function_without_parameters_takes_none() -> None:
    tools = [{"type": "function", "function": {"name": "now", "strict": True}}]
    script = '<tool_call>{"name": "now", "arguments": {"x": 1}}</tool_call>'
    with serving(script=script, max_model_len=2048) as served:
        choice, _ = tool_answers(served, tools=tools)
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {}


@pytest.mark.parametrize("family", OSLO)
def test_a_forced_call_cut_short_is_a_call_with_the_arguments_that_came(family: str) -> None:
    """At each length: never the raw text of the call, the finish is "length", stream and whole are the same."""
    with serving(source={"chat_template": TEMPLATES[family]}, script=OSLO[family], max_model_len=2048) as served:
        seen = set()
        for length in range(1, 60, 4):
            for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
                answer, _ = tool_answers(served, tools=STRICT, tool_choice=choice, max_tokens=length)
                calls = answer["message"].get("tool_calls")
                if calls is None:  # cut before its arguments
                    assert answer["finish_reason"] == "length" and not answer["message"]["content"]
                    seen.add("")
                    continue
                [call] = calls
                assert call["function"]["name"] == "weather" and answer["message"]["content"] is None
                if answer["finish_reason"] == "tool_calls":
                    json.loads(call["function"]["arguments"])
                else:
                    assert answer["finish_reason"] == "length"
                    assert re.match(r'\{\s*("c|"?$)', call["function"]["arguments"][:3])
                seen.add(call["function"]["arguments"])
        assert "" in seen and len(seen) > 2


def test_a_call_that_the_model_leaves_unfinished_is_an_incomplete_item() -> None:
    tools = [{"type": "function", **STRICT[0]["function"], "strict": False}]
    with serving(script=OSLO["hermes"][:60], max_model_len=2048) as served:
        [item] = served.post(RESPONSES, {"input": "hi", "tools": tools}).json()["output"]
        assert item["type"] == "function_call" and item["status"] == "incomplete"


def test_of_several_forced_tools_none_is_made_up() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    with serving(script=OSLO["hermes"], max_model_len=2048) as served:
        answer, _ = tool_answers(served, tools=[*STRICT, other], tool_choice="required", max_tokens=5)
        assert answer["message"]["content"] == "" and "tool_calls" not in answer["message"]
        assert answer["finish_reason"] == "length"
        body = {"input": "hi", "tools": [{"type": "function", **STRICT[0]["function"]}], "tool_choice": "required"}
        cut = served.post(RESPONSES, {**body, "max_output_tokens": 50}).json()
        assert cut["status"] == "incomplete" and cut["output"][0]["type"] == "function_call"
        assert cut["output"][0]["status"] == "incomplete"
    with serving(script=OSLO["hermes"] + " So", max_model_len=2048) as served:
        body = {"input": "hi", "tools": [{"type": "function", **STRICT[0]["function"], "strict": False}]}
        cut = served.post(RESPONSES, {**body, "max_output_tokens": 70}).json()
        assert cut["status"] == "incomplete" and cut["output"][0]["status"] == "completed"
        assert json.loads(cut["output"][0]["arguments"]) == {"city": "Oslo"}


def test_a_call_that_a_stop_string_ends_is_not_finished_as_a_call() -> None:
    with serving(script=OSLO["hermes"], max_model_len=2048) as served:
        answer, _ = tool_answers(served, stop=['"city'])
        assert answer["finish_reason"] == "stop" and answer["message"]["tool_calls"][0]["function"]["arguments"] == "{"
        named = {"type": "function", "function": {"name": "weather"}}
        for stop in ('"name', "weather", '"arguments', ": {"):  # before its first argument there is no call
            for choice in ("required", named):
                answer, _ = tool_answers(served, tools=STRICT, tool_choice=choice, stop=[stop])
                assert answer["finish_reason"] == "stop" and not answer["message"].get("tool_calls"), stop
                assert not answer["message"]["content"]
    with serving(script=OSLO["hermes"] + OSLO["hermes"].replace("Oslo", "Bergen"), max_model_len=2048) as served:
        answer, _ = tool_answers(served, stop=["Ber"])
        assert answer["finish_reason"] == "stop" and len(answer["message"]["tool_calls"]) == 2
        [whole, cut] = (call["function"]["arguments"] for call in answer["message"]["tool_calls"])
        assert whole == '{"city": "Oslo"}' and cut == '{"city": "'


SPECIAL = {"[TOOL_CALLS]": 259, "[ARGS]": 260}


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_grammars_of_calls(form, null: Served) -> None:
    """Each grammar against texts that are of it and texts that are not; special tokens by their ids."""
    llguidance = pytest.importorskip("llguidance")
    layout = json.loads(null.service.engine.card.tokenizer_json)
    layout["added_tokens"] += [
        {"id": number, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for text, number in SPECIAL.items()
    ]  # fmt: skip
    from tandem.engine.text import Text

    text = Text(json.dumps(layout))
    tokenizer = llguidance.LLTokenizer(text.json, n_vocab=261, eos_token=[2])

    def fits(constraint, said: str) -> bool:
        grammar = llguidance.LLMatcher.grammar_from_lark(constraint.text)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = text.encode(said, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    tools = [FunctionTool("w", parameters=CITY, strict=True), FunctionTool("t")]
    for by_name in (False, True) if form is MISTRAL else (False,):
        grammars = CallGrammar(form, tools, text.special_id, by_name=by_name, free_tools=["t"])

        def call(city: str, by_name: bool = by_name) -> str:
            arguments = json.dumps({"city": city})
            if by_name:
                return f"[TOOL_CALLS]w[ARGS]{arguments}"
            one = f'{{"name": "w", "{form.arguments_key}": {arguments}}}'
            return f"[TOOL_CALLS][{one}]" if form is MISTRAL else f"{form.opening}{one}{form.closing}"

        good, bad = call("Rome"), call("Oslo")
        two = f"{good}; {good}" if form is LLAMA else good + good
        if form is MISTRAL and not by_name:
            two = f"{good[:-1]}, {good[len('[TOOL_CALLS][') :]}"
        assert fits(grammars.forced(), good)
        assert not any(fits(grammars.forced(), said) for said in (bad, two, "hi", ""))
        free, one = grammars.free(single=False), grammars.free(single=True)
        assert all(fits(free, said) for said in ("hi <tool", "", good, two)) and not fits(free, bad)
        assert fits(one, good) and fits(one, "text")
        formed = grammars.formed('{"type": "integer"}', single=False)
        assert all(fits(formed, said) for said in ("12", good, two)) and not fits(formed, "hi")
        assert not fits(formed, bad) and not fits(grammars.formed('{"type": "integer"}', single=True), two)
        if form.opening:
            assert fits(free, f"hm {good}") and not fits(free, f"hm {bad}")
        if form is MISTRAL:
            assert "<[259]>" in grammars.forced().text
