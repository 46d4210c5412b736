"""Calls that come back in the next turn: whatever the model wrote as arguments goes into the prompt as it stands."""

import json

import pytest

from tandem.engine.chat import ChatTemplate
from tandem.engine.messages import json_of

HERMES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% endfor %}{{ tools }}"
)
MISTRAL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]"
    "[{{ c.function | tojson }}]{% endfor %}{% endfor %}{{ tools }}"
)
LLAMA = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {% if c.function.arguments is string %}'
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}}{% endfor %}{% endfor %}"
    "{{ tools }}"
)
BARE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def call(arguments: str, name: str = "f", number: str = "c1") -> dict:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def prompt(template: str, *calls: dict, results: tuple[str, ...] = ()) -> str:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": list(calls)}]
    talk += [{"role": "tool", "tool_call_id": number, "content": f"result {number}"} for number in results]
    return ChatTemplate(template).render(talk, add_generation_prompt=False)


@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA, BARE])
@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Ro', '{"a": [1, {"b"', '{"x": 1e400}', '{"x": NaN}', "{'a': 1}", f'{{"x": {"9" * 5000}}}', "{" * 5000],
)
def test_arguments_that_are_no_json_or_too_large_are_written_as_they_came(template: str, arguments: str) -> None:
    told = prompt(template, call(arguments))
    assert arguments in told and "Infinity" not in told


@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA, BARE])
def test_arguments_that_are_json_are_values(template: str) -> None:
    told = prompt(template, call('{"a":"é", "b":[1e300,2]}'))
    assert '{"a": "é", "b": [1e+300, 2]}' in told
    assert "{}" in prompt(template, call(""))


def test_what_is_written_as_it_stands_is_so_at_any_level() -> None:
    assert json_of({"a": [1, {"b": ("c",)}]}) == json.dumps({"a": [1, {"b": ["c"]}]})


def test_results_of_several_calls_name_theirs_where_the_template_knows_no_tools() -> None:
    two = call('{"x": 1}', number="c1"), call('{"x": 2}', number="c2")
    told = prompt(BARE, *two, results=("c2", "c1"))
    assert '<tool_call>{"id": "c1", "name": "f", "arguments": {"x": 1}}</tool_call>' in told
    assert told.endswith("[tool]c2: result c2[tool]c1: result c1")
    told = prompt(BARE, two[0], results=("c1",))  # one has nothing to tell
    assert '"id"' not in told and told.endswith("[tool]result c1")
    told = prompt(HERMES, *two, results=("c2",))  # this one has its own way
    assert told.endswith("[tool]result c2None")
