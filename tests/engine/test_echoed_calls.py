"""Calls that come back in the next turn: whatever the model wrote as arguments goes into the prompt as it stands."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.chat import ChatTemplate
from tandem.engine.earlier_calls import CallWay, _begun
from tandem.engine.messages import json_of
from tandem.errors import RequestError

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
HEAD = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}:"
TAIL = ">{% endfor %}{% endfor %}{{ tools }}"
TEXT = HEAD + "{{ '' + c.function.arguments }}" + TAIL
SHOWN = HEAD + "{{ c.function.arguments }}" + TAIL
NAMES = HEAD + "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}" + TAIL
KEYS = HEAD + "{% for k in c.function.arguments.keys() %}{{ k }}={{ c.function.arguments[k] }};{% endfor %}" + TAIL
SILENT = (
    "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}[{{ m.role }}]<{{ c.function.name }}:"
    "{{ '' + c.function.arguments }}>{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
STERN = (
    "{% for m in messages %}{% if m.tool_calls and (loop.last or messages[loop.index].role != 'tool') %}"
    "{{ raise_exception('a result must follow') }}{% endif %}{% endfor %}" + TEXT
)
NINE = (  # what Mistral's templates ask of ids
    "{% macro check(id) %}{% if id is not defined or id | length != 9 %}{{ raise_exception('9 letters!') }}{% endif %}"
    "{% endmacro %}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ check(c.id) }}"
    "[TOOL_CALLS][{{ c.function | tojson }}#{{ c.id }}]{% endfor %}{% if m.role == 'tool' %}{{ check(m.tool_call_id) }}"
    "[TOOL_RESULTS]{{ m.content }}#{{ m.tool_call_id }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    "{{ tools }}"
)
ALTERNATING = (  # as Gemma 3 and Llama 2
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ONE = (  # as Llama 3.1
    "{% for m in messages %}{% if m.role == 'tool' %}[ipython]{{ m.content }}{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}[assistant]{{ m.content }}{{ f.name }}:{{ f.arguments | tojson }}"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}{{ tools }}"
)
FIRST = ONE.replace("m.tool_calls | length != 1", "false")
NO_RESULTS = (  # calls, and roles that it knows
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function | tojson }}>{% endfor %}{% endif %}{% endfor %}{{ tools }}"
)
REFUSES_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    + NO_RESULTS
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
    assert told.endswith(
        "[user]<tool_response>\nc2: result c2\n</tool_response>\n<tool_response>\nc1: result c1\n</tool_response>"
    )
    told = prompt(BARE, two[0], results=("c1",))  # one has nothing to tell
    assert '"id"' not in told and told.endswith("[user]<tool_response>\nresult c1\n</tool_response>")
    told = prompt(HERMES, *two, results=("c2",))  # this one has its own way
    assert told.endswith("[tool]result c2None")


def test_the_way_of_a_template_is_found_by_trying() -> None:
    for template, way in {
        HERMES: CallWay(), MISTRAL: CallWay(), LLAMA: CallWay(), TEXT: CallWay(as_text=True),
        SHOWN: CallWay(as_text=True), NAMES: CallWay(takes_text=False), KEYS: CallWay(takes_text=False),
        SILENT: CallWay(as_text=True, needs_nothing=True), STERN: CallWay(as_text=True), BARE: None, ALTERNATING: None,
        ONE: CallWay(one_call=True), FIRST: CallWay(one_call=True), NINE: CallWay(short_ids=True),
        NO_RESULTS: CallWay(by_user=True), REFUSES_RESULTS: CallWay(by_user=True),
        "{{ raise_exception('no') }}{{ messages[0]['tool_calls'] }}": CallWay(),
    }.items():  # fmt: skip
        assert ChatTemplate(template).call_way == way, template


@pytest.mark.parametrize("template", [TEXT, SHOWN, SILENT, STERN])
@pytest.mark.parametrize(
    "arguments", ['{"a":"\u00e9", "b":[1e300,2]}', '{"city": "Ro', "[1,2]", '"x"', "null", "{'a': 1}"]
)
def test_a_template_that_puts_arguments_between_texts_gets_what_the_model_wrote(template: str, arguments: str) -> None:
    assert f"<f:{arguments}>" in prompt(template, call(arguments), results=("c1",))
    assert "<f:{}>" in prompt(template, call(""), results=("c1",))
    given = {"id": "c1", "function": {"name": "f", "arguments": {"a": "\u00e9"}}}
    assert '<f:{"a": "\u00e9"}>' in prompt(template, given, results=("c1",))


def test_text_beside_calls_is_not_lost_where_calls_are_written_without_content_alone() -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well", "tool_calls": [call("{}")]}]
    template = ChatTemplate(SILENT)
    assert template.render(talk, add_generation_prompt=False) == "[user]hi[assistant]well[assistant]<f:{}>"
    with pytest.raises(RequestError, match="cannot be continued") as refused:
        template.render(talk, add_generation_prompt=False, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize("template", [NAMES, KEYS])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"a": "x", "b": 2}', "a=x;b=2;"), ('{"a": "x', "a=x;"), ('{"a": "x", "b', "a=x;"), ("{", ""), ("", ""),
        ('{"a": "x", "b": tr', "a=x;"), ('{"a": "x\\', "a=x;"), ('{"a": "x\\u00', "a=x;"), ("null", ""),
        ('{"a": "x\\ud83d\\ud', "a=x;"), ('{"a": "x\\\\', "a=x\\;"), ('{"a": "\\"', 'a=";'), ('{"a": "x"', "a=x;"),
        ('{"a": [1, {"b": ', "a=[1, {}];"),
    ],
)  # fmt: skip
def test_a_template_that_goes_over_names_gets_those_that_came(template: str, arguments: str, told: str) -> None:
    assert prompt(template, call(arguments)).endswith(f"<f:{told}>None")


@pytest.mark.parametrize("template", [NAMES, KEYS])
@pytest.mark.parametrize(
    "arguments", ["[1,2]", "5", '"x"', "true", '{"x": NaN}', "{'a': 1}", '{"a": 1}}', "]", "x" * 500]
)
def test_a_template_that_goes_over_names_refuses_what_has_none_by_its_path(template: str, arguments: str) -> None:
    with pytest.raises(RequestError, match="no JSON object") as refused:
        prompt(template, call("{}"), call(arguments, number="c2"))
    assert refused.value.what.startswith(f"messages[1].tool_calls[1].function.arguments is {arguments!r:.80}")
    assert refused.value.param == "messages" and refused.value.hint and len(refused.value.what) < 300


LEAVES = st.none() | st.booleans() | st.integers() | st.text('a"\\{}[],:\u00e9\U0001f600', max_size=5)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def is_beginning(part: object, whole: object) -> bool:
    if isinstance(whole, dict):
        assert isinstance(part, dict)
        part, whole = list(part.items()), list(whole.items())
        if [key for key, _ in part] != [key for key, _ in whole[: len(part)]]:
            return False
        part, whole = [value for _, value in part], [value for _, value in whole]
    if isinstance(whole, list):
        assert isinstance(part, list)
        return part[:-1] == whole[: len(part)][:-1] and (not part or is_beginning(part[-1], whole[len(part) - 1]))
    return str(whole).startswith(str(part))


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.data(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_came_of_a_call_is_its_beginning(value: dict, data: st.DataObject, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    cut = data.draw(st.integers(1, len(text) - 1))
    part = _begun(text[:cut])
    assert part is not None and is_beginning(part, value), part
    json.dumps(part, ensure_ascii=False).encode()
    assert _begun(text) is None, "it is no beginning"


@pytest.mark.parametrize(
    "text", ['{"a": "' + "x" * (4 << 20), '{"a": ' + '"\\"' * (1 << 20), "{" * (1 << 20), '{"a":[' + "{},1," * 60_000]
)
def test_a_long_beginning_takes_no_time(text: str) -> None:
    began_s = time.thread_time()
    _begun(text)
    assert time.thread_time() - began_s < 1.0


def test_ids_of_other_servers_are_short_for_templates_that_take_no_others() -> None:
    long = [f"call_{number:024d}" for number in range(2)]
    told = prompt(NINE, call("{}", number=long[0]), call("{}", number=long[1]), results=(long[1], long[0]))
    calls, results = re.findall("}#([a-zA-Z0-9]{9})]", told), re.findall("result call_[0-9]*#([a-zA-Z0-9]{9})", told)
    assert len(set(calls)) == 2 and results == calls[::-1]
    told = prompt(NINE, call("{}", number="aB3456789"), results=("aB3456789",))
    assert told.count("#aB3456789") == 2
    assert "#" + long[0] not in ChatTemplate(NINE).render([{"role": "tool", "tool_call_id": long[0], "content": "x"}])
    assert long[0] in prompt(HERMES.replace("{% for c", "{{ m.tool_call_id }}{% for c"), results=(long[0],)), "as it is"


@pytest.mark.parametrize("template", [BARE, ALTERNATING, NO_RESULTS, REFUSES_RESULTS])
def test_results_are_the_user_s_where_the_template_knows_no_such_role(template: str) -> None:
    """Those in a row are one message, with what the user says next, so that roles alternate."""
    calls = [call("{}", number="c1"), call("{}", number="c2")]
    talk = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
    ]  # fmt: skip
    more = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "so"}]
    names = ("c1: ", "c2: ") if "tools" not in template else ("", "")
    results = "[user]" + "\n".join(
        f"<tool_response>\n{name}{said}\n</tool_response>" for name, said in zip(names, ("sun", "rain"), strict=True)
    )
    chat = ChatTemplate(template)
    assert chat.render(talk, add_generation_prompt=False).removesuffix("None").endswith(results)
    told = chat.render([*talk, *more], add_generation_prompt=False).removesuffix("None")
    assert told.endswith(f"{results}\nand?[assistant]so")
    told = chat.render([*talk, more[1], *more], add_generation_prompt=False).removesuffix("None")
    assert told.endswith(f"{results}[assistant]so[user]and?[assistant]so")


@pytest.mark.parametrize("template", [ONE, FIRST])
def test_where_a_template_takes_one_call_a_message_each_has_its_own_with_its_result(template: str) -> None:
    calls = [call(f'{{"x": {number}}}', number=f"c{number}") for number in range(3)]
    told = prompt(template, *calls, results=("c2", "c9", "c0", "c2"))
    assert told == (
        '[user]hi[assistant]f:{"x": 0}[ipython]result c0[assistant]f:{"x": 1}'
        '[assistant]f:{"x": 2}[ipython]result c2[ipython]result c2[ipython]result c9None'
    )
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well", "tool_calls": calls[:2]}]
    told = ChatTemplate(template).render([*talk, *talk[:1]])
    assert told == '[user]hi[assistant]wellf:{"x": 0}[assistant]f:{"x": 1}[user]hiNone'


@pytest.mark.parametrize("source", [TEXT, NAMES, HERMES, BARE])
def test_an_object_that_is_nested_too_deep_or_holds_itself_is_refused(source: str) -> None:
    deep: dict = {"a": 1}
    for _ in range(99):
        deep = {"b": deep}
    own: dict = {}
    own.update(a=own, b=[own, own])
    made = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": deep}}
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [made]}]
    template = ChatTemplate(source)
    assert "b" in template.render(talk)
    for arguments in ({"c": deep}, own):
        made["function"] = {"name": "f", "arguments": arguments}
        with pytest.raises(
            RequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is nested too deep"
        ):
            template.render(talk)
