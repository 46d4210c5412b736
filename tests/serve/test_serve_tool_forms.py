"""Tool calls that nothing governs: between tags, odd ones, names that cannot be written; calls that are sent back."""

import json
import re
import time
from typing import Any

import pytest
from serve_drive import serving
from test_serve_text import tool_answers
from test_serve_tools import CHAT, CITY, HI, OSLO, RESPONSES, STRICT, TEMPLATES

CODER = (  # as Qwen3-Coder's template tells of tools and writes calls
    "{% if tools %}{{ tools }}<tool_call><function=NAME>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}{% endfor %}"
)


def test_calls_between_tags_are_understood_and_come_back_so() -> None:
    said = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    lax = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    with serving(script=said, source={"chat_template": CODER}, max_model_len=2048) as served:
        answer, calls = tool_answers(served, tools=lax)
        assert answer["finish_reason"] == "tool_calls" and not answer["message"]["content"]
        assert calls[0] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        talk = [*HI, answer["message"]]
        tokens = served.chat(talk, tools=lax, tool_choice="auto", max_tokens=1, return_token_ids=True)
        prompt = served.post("/detokenize", {"tokens": tokens["prompt_token_ids"]}).json()["prompt"]
        assert said in prompt
        form = {"type": "json_object"}
        for fields, param in (
            ({"tools": lax, "tool_choice": "required"}, "tool_choice"), ({"tools": STRICT}, "tools"),
            ({"tools": lax, "response_format": form}, "tools"),
        ):  # fmt: skip
            refused = served.post(CHAT, {"messages": HI, "max_tokens": 9, **fields})
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["param"] == param and "between tags" in error["message"] and "auto" in error["message"]


BETWEEN_TAGS = "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("written", "schema", "arguments"),
    [
        ('["\\ud83d"]', {"type": "array"}, '{"x": ["\ufffd"]}'), ("3", {"type": 5}, '{"x": "3"}'),
        ("3", {"type": True}, '{"x": "3"}'), ("1e999", {"type": "number"}, '{"x": "1e999"}'),
        ("3", {"anyOf": [{"$ref": "#/properties/x"}] * 60}, '{"x": "3"}'),
    ],
)  # fmt: skip
def test_odd_values_and_odd_schemas_are_no_failure(written: str, schema: dict, arguments: str) -> None:
    """Whole, streamed, and as items; nobody waits meanwhile for what takes long."""
    parameters = {"type": "object", "properties": {"x": schema}}
    function = {"name": "f", "parameters": parameters}
    with serving(script=BETWEEN_TAGS.format(written), source={"chat_template": CODER}, max_model_len=8192) as served:
        start_s = time.monotonic()
        answer, _ = tool_answers(served, tools=[{"type": "function", "function": function}], tool_choice="auto")
        assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == [arguments]
        body = {"input": "hi", "tools": [{"type": "function", **function}]}
        [item] = served.post(RESPONSES, body).json()["output"]
        assert item["arguments"] == arguments and time.monotonic() - start_s < 5


@pytest.mark.parametrize(
    ("written", "arguments"),
    [('"\\ud83d"', "\ufffd"), (r'{"city": "Oslo \ud83d x\ude00"}', r'{"city": "Oslo \ufffd x\ufffd"}')],
)
@pytest.mark.parametrize("family", ["hermes", "llama", "mistral"])
def test_half_a_surrogate_pair_in_arguments_is_no_failure(family: str, written: str, arguments: str) -> None:
    """Clients decode what they get, and send it in UTF-8 in the next turn."""
    said = OSLO[family].replace('{"city": "Oslo"}', written)
    lax = [{"type": "function", "function": {"name": "weather"}}]
    with serving(script=said, source={"chat_template": TEMPLATES[family]}, max_model_len=2048) as served:
        answer, _ = tool_answers(served, tools=lax)
        assert answer["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": arguments}
        if written.startswith("{"):
            assert json.dumps(json.loads(arguments), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("template", "name", "properties", "where"),
    [
        (CODER, "a>b", {}, "tools[1].function.name"), (CODER, " f", {}, "tools[1].function.name"),
        (CODER, "f\n", {}, "tools[1].function.name"),
        (CODER, "f", {"a>b": {}}, "tools[1].function.parameters.properties"),
        (CODER, "f", {"a": {}, "b ": {}}, "tools[1].function.parameters.properties"),
        (TEMPLATES["mistral by name"], "a{b", {}, "tools[1].function.name"),
        (TEMPLATES["mistral by name"], "a[ARGS]b", {}, "tools[1].function.name"),
        (TEMPLATES["mistral by name"], "a[CALL_ID]", {}, "tools[1].function.name"),
        (TEMPLATES["mistral by name"], "[a", {}, "tools[1].function.name"),
        (TEMPLATES["mistral by name"], "a ", {}, "tools[1].function.name"),
    ],
)  # fmt: skip
def test_names_that_the_model_could_never_write_are_refused(
    template: str, name: str, properties: dict, where: str
) -> None:
    odd = {"name": name, "parameters": {"type": "object", "properties": properties}}
    good = {"name": "a.b-c_d\u00fc<", "parameters": {"type": "object", "properties": {"a b": {}}}}
    with serving(source={"chat_template": template}, max_model_len=2048) as served:
        for choice in ("auto", "required"):
            tools = [{"type": "function", "function": function} for function in (good, odd)]
            body = {"messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 1}
            error = served.refused(CHAT, body, param="tools")
            assert error["message"].startswith(where) and "letters, digits, _ and -" in error["message"]
        items = {"input": "hi", "tools": [{"type": "function", **function} for function in (good, odd)]}
        error = served.refused(RESPONSES, items, param="tools")
        assert error["message"].startswith(where.replace(".function", ""))
        served.chat(HI, tools=[{"type": "function", "function": good}], max_tokens=1)
    with serving(source={"chat_template": TEMPLATES["hermes"]}, max_model_len=2048) as served:
        served.chat(HI, tools=[{"type": "function", "function": odd}], max_tokens=1)  # JSON has room for every name


ALTERNATING = (  # as Gemma 3 and Llama 2
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NINE = (  # as Mistral
    "{% for m in messages %}{% for id in [m.tool_call_id] if m.role == 'tool' %}{% if id | length != 9 %}"
    "{{ raise_exception('nine letters') }}{% endif %}{% endfor %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}[TOOL_CALLS][{{ c.function | tojson }}]"
    "{% endfor %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools }}"
)
ONE = (  # as Llama 3.1
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('only one') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [(ALTERNATING, OSLO["hermes"] * 2), (NINE, OSLO["mistral"]), (ONE, f"{OSLO['llama']}; {OSLO['llama']}")],
)
def test_calls_that_the_server_made_are_taken_back_with_their_results(template: str, said: str) -> None:
    lax = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    with serving(script=said, source={"chat_template": template}, max_model_len=4096) as served:
        message = tool_answers(served, tools=lax)[0]["message"]
        assert len(message["tool_calls"]) == (1 if template is NINE else 2)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"sun {place}"}
            for place, call in enumerate(message["tool_calls"])
        ]
        body = {"messages": [*HI, message, *results], "tools": lax, "max_tokens": 1, "return_token_ids": True}
        answer = served.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        prompt = served.post("/detokenize", {"tokens": answer.json()["prompt_token_ids"]}).json()["prompt"]
        assert all(f"sun {place}" in prompt for place in range(len(results)))


def beside(**more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": OFFERED, **more}]}


def within(**more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**OFFERED, **more}}]}


OFFERED = {"name": "weather", "description": "The weather.", "parameters": CITY}
CACHED = {"cache_control": {"type": "ephemeral"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, beside(**CACHED)), (CHAT, within(**CACHED)),  # litellm, langchain
        (CHAT, beside(defer_loading=False, **CACHED)), (CHAT, within(defer_loading=False)),  # langchain's extras
        (CHAT, within(**{"return": {"type": "string", "description": "Sun or rain."}})),  # transformers
        (CHAT, within(returns={"type": "string"})), (CHAT, within(response={})), (CHAT, within(examples=[{}])),
        (CHAT, within(required=["city"])), (CHAT, beside(index=0, id="x")), (CHAT, beside(strict=False)),
        (CHAT, beside(name="weather", description="d")), (CHAT, beside(input_examples=[{"city": "Rome"}])),
        (CHAT, beside(allowed_callers=["direct"], **{"async": False})),
        (CHAT, {**beside(), "tool_choice": {**NAMED, "name": "weather", "description": "d"}}),
        (CHAT, {**beside(), "tool_choice": {"type": "function", "function": {"name": "weather", "description": "d"}}}),
        (RESPONSES, {"tools": [{"type": "function", **OFFERED, **CACHED}]}),
        (RESPONSES, {"tools": [{"type": "function", **OFFERED, "required": ["city"], "index": 0}]}),
        (RESPONSES, {"tools": [{"type": "function", **OFFERED}],
                     "tool_choice": {"type": "function", "name": "weather", "description": "d"}}),
    ],
)  # fmt: skip
def test_hints_and_labels_that_clients_write_into_tools_change_nothing(path: str, fields: dict[str, Any]) -> None:
    """Nor does the prompt hold them."""
    said = {"messages": HI, "max_tokens": 20} if path == CHAT else {"input": HI, "max_output_tokens": 20}
    plain = {**fields, "tools": beside()["tools"] if path == CHAT else [{"type": "function", **OFFERED}]}
    if "tool_choice" in fields:
        plain["tool_choice"] = NAMED if path == CHAT else {"type": "function", "name": "weather"}
    with serving(source={"chat_template": CODER.replace("<function=", "<call=")}, max_model_len=2048) as served:
        found = []
        for body in (fields, plain):
            answer = served.post(path, {**said, **body, "seed": 3, "temperature": 0})
            assert answer.status_code == 200, answer.text
            shown = answer.json()
            kept = shown["choices"][0]["message"] if path == CHAT else shown["output"]
            num_tokens = shown["usage"]["prompt_tokens" if path == CHAT else "input_tokens"]
            found.append((re.sub(r'"(id|call_id)": "[^"]*"', "", json.dumps(kept)), num_tokens))
        assert found[0] == found[1]


@pytest.mark.parametrize(("outer", "inner", "enforced"), [(True, None, True), (True, False, False), (None, True, True)])
def test_strict_beside_a_function_counts_as_if_it_stood_in_it(
    outer: bool | None, inner: bool | None, enforced: bool
) -> None:
    with serving(source={"chat_template": CODER}, max_model_len=2048) as served:
        tool = {"type": "function", "function": {**OFFERED, "strict": inner}, "strict": outer}
        answer = served.post(CHAT, {"messages": HI, "max_tokens": 1, "tools": [tool]})
        assert answer.status_code == (400 if enforced else 200)
        assert not enforced or "strict tools" in answer.json()["error"]["message"]
