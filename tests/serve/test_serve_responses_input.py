"""Responses: items as the turns that the model wrote, and errors that name what the client wrote."""

import time
from typing import Any

import msgspec
import pytest
from serve_drive import Served, serving

from tandem.serve.responses_input import Place, messages_of
from tandem.serve.schema import ResponsesRequest

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f"}


def text(said: Any, role: str = "assistant") -> dict:
    return {"type": "message", "role": role, "content": [{"type": "output_text", "text": said}]}


def thought(said: str) -> dict:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": said}]}


def call(name: str, **changes: Any) -> dict:
    return {"type": "function_call", "call_id": f"c{name}", "name": name, "arguments": "{}", **changes}


def result(name: str, output: Any = "sun") -> dict:
    return {"type": "function_call_output", "call_id": f"c{name}", "output": output}


def turns_of(items: list[dict], places: list[Place] | None = None) -> list[tuple]:
    """Messages as (role, content, names of calls or reasoning, if any)."""
    found = []
    body = msgspec.convert({"input": items}, ResponsesRequest)
    for message in messages_of(body, [] if places is None else places):
        content = message["content"]
        plain = "".join(part["text"] for part in content) if isinstance(content, list) else content
        calls = tuple(made["function"]["name"] for made in message.get("tool_calls", ()))
        more = [part for part in (calls, message.get("reasoning_content")) if part]
        found.append((message["role"][0], plain, *more))
    return found


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([text("a"), call("f")], [("a", "a", ("f",))]),
        ([{**HI, "type": None}, text("a")], [("u", "hi"), ("a", "a")]),
        ([call("f"), text("a")], [("a", "a", ("f",))]),
        ([thought("h"), text("a"), call("f"), call("g")], [("a", "a", ("f", "g"), "h")]),
        ([text("a"), call("f"), text("b"), call("g")], [("a", "ab", ("f", "g"))]),
        ([text("a"), thought("h"), call("f"), thought("i"), call("g")], [("a", "a", ("f", "g"), "hi")]),
        ([call("f"), thought("h"), result("f")], [("a", None, ("f",), "h"), ("t", "sun")]),
        ([call("f"), result("f"), text("a"), call("g"), result("g")],
         [("a", None, ("f",)), ("t", "sun"), ("a", "a", ("g",)), ("t", "sun")]),
        # as chat takes them: messages that a client wrote one behind the other
        ([text("a"), text("b"), call("f")], [("a", "a"), ("a", "b", ("f",))]),
        # a thought that was cut belongs to no later turn
        ([thought("h"), HI, text("a")], [("a", "", "h"), ("u", "hi"), ("a", "a")]),
        ([text("a"), thought("h")], [("a", "a")]),
        ([text("a"), text("b", "user"), call("f")], [("a", "a"), ("u", "b"), ("a", None, ("f",))]),
    ],
)  # fmt: skip
def test_what_the_assistant_said_in_a_row_is_one_turn(items: list, turns: list) -> None:
    places: list[Place] = []
    assert turns_of([HI, *items], places) == [("u", "hi"), *turns]
    assert len(places) == 1 + len(turns)


def test_long_turns_take_as_long_as_they_are() -> None:
    items = [item for number in range(1300) for item in (text("x" * 1000), call(f"f{number}"), thought("y" * 1000))]
    start_s = time.thread_time()
    ((_, said, calls, _),) = turns_of(items)
    assert len(said) == 1300 * 1000 and len(calls) == 1300
    assert time.thread_time() - start_s < 0.3


TEMPLATES = {
    "alternating": (
        "{# tools <tool_call> #}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    ),
    "writes calls": (
        "{# tools <tool_call> <think> #}{% for m in messages %}[{{ m.role }}]"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_that_is_sent_back_is_the_prompt_that_chat_makes_of_it(name: str) -> None:
    calls = "".join(f'<tool_call>{{"name": "f", "arguments": {{"x": {x}}}}}</tool_call>' for x in (1, 2))
    said = f"Let me see. {calls} So."
    if "think" in TEMPLATES[name]:
        said = f"<think>Hm.</think>{said}"
    with serving(source={"chat_template": TEMPLATES[name]}, script=said, max_model_len=1024) as served:
        output = served.post(PATH, {"input": "hi", "tools": [TOOL]}).json()["output"]
        kinds = [item["type"] for item in output if item["type"] != "reasoning"]
        assert kinds == ["message", "function_call", "function_call", "message"]
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
                   for item in output if item["type"] == "function_call"]  # fmt: skip
        again = served.post(PATH, {"input": [HI, *output, *results], "tools": [TOOL], "max_output_tokens": 1})
        assert again.status_code == 200, again.text

        tools = [{"type": "function", "function": {"name": "f"}}]
        message = served.chat("hi", tools=tools)["choices"][0]["message"]
        for made, item in zip(message["tool_calls"], results, strict=True):
            made["id"] = item["call_id"]  # ids go into the prompt where a template knows no results
        told = [{"role": "tool", "tool_call_id": item["call_id"], "content": "sun"} for item in results]
        chat = served.chat([HI, message, *told], tools=tools, max_tokens=1)["usage"]
        usage = again.json()["usage"]
        assert usage["input_tokens"] == chat["prompt_tokens"]
        assert chat["prompt_tokens_details"]["cached_tokens"] >= (usage["input_tokens"] - 1) // 16 * 16


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"input": [HI, call("f", call_id="")]}, "input", "input[1].call_id is empty."),
        ({"input": [HI, call("")]}, "input", "input[1].name is empty."),
        ({"input": [HI, call("f", arguments=5)]}, "input", "input[1].arguments must be a string."),
        ({"input": [HI, text("a"), call("f"), call("g", arguments="[1]")]}, "input", "input[3].arguments is '[1]'"),
        ({"input": [HI, call("f"), result("f", None)]}, "input", "input[2].output is missing"),
        ({"input": [HI, call("f"), result("f", {})]}, "input", "input[2].output is of type dict"),
        ({"input": [HI, call("f"), result("f", [{"type": "input_image"}])]}, "input",
         "input[2].output[0] is of type 'input_image'; this model takes text parts only."),
        ({"input": [HI, call("f"), text(None)]}, "input", "input[2].content[0].text is missing"),
        ({"input": [HI, text("a"), {**text("b"), "content": ["c", 5]}], "instructions": "x"}, "input",
         "input[2].content[1] is 5; it must be a string or an object."),
        ({"input": [HI, {"role": "tool", "content": "x"}]}, "input", "input[1].role is 'tool'; it must be one of"),
        ({"reasoning": {"effort": "wild"}}, "reasoning", "reasoning.effort is 'wild'"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", "it is one of 'none', 'auto', 'required', or an ob"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": [TOOL]}, "tool_choice", "tool_choice.name"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name is missing"),
        ({"input": [text("")] * 10 + [{**HI, "content": [""] * 16375}]}, "input",
         "input holds 16385 parts and calls or more; the limit is 16384."),
    ],
)  # fmt: skip
def test_errors_name_what_the_client_wrote(served_names: Served, fields: dict, param: str, told: str) -> None:
    message = served_names.refused(PATH, {"input": "hi", **fields}, param=param)["message"]
    assert told in message and "messages[" not in message


@pytest.fixture(scope="module")
def served_names() -> Any:
    names = (
        "{# tools <tool_call> #}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<{{ c.function.name }}>{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    with serving(source={"chat_template": names}, max_model_len=256) as served:
        yield served


def test_parts_of_a_chat_message_are_named_too(null: Served) -> None:
    named = [{**HI, "name": "ann", "content": ["x", {"type": "text"}]}, {**HI, "name": "bob"}]
    for content in (["x", {"type": "text"}], ["x", {"type": "video"}], [{"type": "text", "text": "x"}, 5]):
        messages = [{**named[0], "content": content}, named[1]]
        assert "messages[0].content[1]" in null.refused(CHAT, {"messages": messages}, param="messages")["message"]
