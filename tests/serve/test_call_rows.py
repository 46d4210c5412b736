"""Calls in a list or a row, some of tools that nobody offered: what is a call, what is content; names that are long."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serve_drive import serving
from test_parse import NAMES, calls_of, check_cuts, parse
from test_serve_text import tool_answers
from test_serve_tools import TEMPLATES

from tandem.serve.calls import HERMES, LLAMA, MISTRAL, CallFormat, Calls

W, T, Z, Y = (f'{{"name": "{name}", "arguments": {{"x": 1}}}}' for name in ("weather", "time", "zz", "yy"))
GIVEN = {W: ("weather", '{"x": 1}'), T: ("time", '{"x": 1}')}


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ((Z, W), Z), ((W, Z), Z), ((W, Z, T), Z), ((Z, W, Y), Z + Y), ((Z, Y, W), f"{Z}, {Y}"), ((W, T), ""),
        ((W, Z, Y, T), f"{Z}, {Y}"), ((W, W, Z), Z), ((W, '{"name": 5}', T), '{"name": 5}'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", [MISTRAL, LLAMA])
def test_a_call_that_nobody_offered_takes_none_of_the_others_with_it(
    form: CallFormat, row: tuple[str, ...], content: str
) -> None:
    calls = [GIVEN[call] for call in row if call in GIVEN]
    if form is MISTRAL:
        text = f"[TOOL_CALLS][{', '.join(row)}]"
        before, behind = ("So." if row[0] in GIVEN else "So. "), ("" if row[-1] in GIVEN else " ")
        assert calls_of(form, f"So. {text} Yes.") == (f"{before}{content}{behind}Yes.", calls)
    else:
        text, content = "; ".join(row), content.replace("}, {", "}; {")
    for pieces in ([text], list(text), [*text, ""]):
        assert parse(Calls(form, NAMES), pieces)[::2] == (content, calls)
    assert calls_of(form, text, single=True) == (content, calls[:1])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (MISTRAL, f"[TOOL_CALLS][{Z}]"), (MISTRAL, f"a [TOOL_CALLS] [ {Z} ,\n{Y} ] b"), (LLAMA, f" {Z};\n{Y} "),
        (MISTRAL, f"[TOOL_CALLS][{Z}, "), (MISTRAL, f"[TOOL_CALLS][{Z}, {{"), (MISTRAL, f"[TOOL_CALLS]{Z}, {Y}] x"),
        (MISTRAL, f"[TOOL_CALLS][{Z}, 5]"), (MISTRAL, "[TOOL_CALLS][ 5, 6]"), (MISTRAL, "[TOOL_CALLS] [ "),
        (LLAMA, f"{Z}; hm"), (LLAMA, f"{Z}\n"), (LLAMA, f'{Z}; {{"na'), (LLAMA, '{"answer": 3}\n\nThat is it.'),
    ],
)  # fmt: skip
def test_a_row_without_a_call_of_ours_stays_as_written(form: CallFormat, text: str) -> None:
    for pieces in ([text], list(text), [*text, ""]):
        assert parse(Calls(form, NAMES), pieces)[::2] == (text, [])


@pytest.mark.parametrize("form", [MISTRAL, LLAMA])
def test_a_row_cut_short_keeps_what_is_content(form: CallFormat) -> None:
    """Behind a stranger a call is cut: before its name it is content, behind it nothing, then a call."""
    begin = "[TOOL_CALLS][" if form is MISTRAL else ""
    for size in range(1, len(W)):
        parser = Calls(form, NAMES)
        content, _, calls = parse(parser, list(f"{begin}{Z}, {W[:size]}"))
        named, argued = '"weather"' in W[:size], '": {' in W[:size]
        assert content == (Z if named else f"{begin}{Z}, {W[:size]}") and bool(calls) == argued
        assert parser.cut_short == named


def test_an_answer_of_json_lines_is_streamed() -> None:
    parser, said = Calls(LLAMA, NAMES), '{"a": 1}\n' * 50
    pieces = [(place, piece) for place, char in enumerate(said) for piece in parser.feed(char, final=False)]
    assert pieces[0][0] == 7 and len(pieces) == 50, "each with its line"
    assert "".join(piece.content for _, piece in pieces) + "\n" == said


ITEMS = st.sampled_from([
    W, T, Z, Y, '{"name": 5}', '{"name": "time"}', '{"na', ", ", "; ", " ", "\n", "]", "[", "text", "5", "}",
    "[TOOL_CALLS][", "[TOOL_CALLS]", "[TOOL_CALLS]zz[ARGS]{}", "[TOOL_CALLS]time[ARGS]{}", "</tool_call>",
])  # fmt: skip


@given(
    parts=st.lists(ITEMS, max_size=10), begin=st.sampled_from(["", "[TOOL_CALLS][", "<tool_call>"]),
    cuts=st.lists(st.integers(0, 300), max_size=20), form=st.sampled_from([MISTRAL, LLAMA, HERMES]),
    single=st.booleans(), governed=st.booleans(),
)  # fmt: skip
@example([Z, ", ", W, "]", " ", "text"], "[TOOL_CALLS][", [13, 60], MISTRAL, False, False)
@example([W, ", ", Z, ", ", Y, "] ", "text"], "[TOOL_CALLS][", [70], MISTRAL, True, False)
@settings(deadline=None, max_examples=300)
def test_cutting_rows_changes_nothing(parts, begin, cuts, form, single, governed) -> None:
    check_cuts(begin + "".join(parts), cuts, form, None, single=single, governed=governed)


@given(
    row=st.lists(st.sampled_from([W, T, Z, Y, "{}"]), min_size=1, max_size=8), form=st.sampled_from([MISTRAL, LLAMA])
)
@settings(deadline=None, max_examples=100)
def test_no_order_of_a_row_loses_a_call_or_a_stranger(row: list[str], form: CallFormat) -> None:
    text = f"[TOOL_CALLS][{', '.join(row)}]" if form is MISTRAL else "; ".join(row)
    content, calls = calls_of(form, text)
    assert calls == [GIVEN[call] for call in row if call in GIVEN]
    left = [call for call in row if call not in GIVEN]
    if calls:
        assert content.replace("}, {", "}{").replace("}; {", "}{") == "".join(left)
    else:
        assert content == text


@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_an_answer_with_a_stranger_gives_the_calls_behind_it(family: str) -> None:
    form = MISTRAL if family == "mistral" else LLAMA
    items = [Z, W] if form is MISTRAL else [Z.replace("arguments", "parameters"), W.replace("arguments", "parameters")]
    said = f"[TOOL_CALLS][{', '.join(items)}]" if form is MISTRAL else "; ".join(items)
    lax = [{"type": "function", "function": {"name": "weather"}}]
    with serving(script=said, source={"chat_template": TEMPLATES[family]}, max_model_len=2048) as served:
        answer, _ = tool_answers(served, tools=lax)
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] == items[0]
        assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["weather"]


@pytest.mark.parametrize("size", [1, 250, 251, 256])
@pytest.mark.parametrize("identity", ["", "[CALL_ID]a1b2c3d4e"])
def test_a_call_by_name_may_have_the_longest_name(size: int, identity: str) -> None:
    name = "x" * size
    said = f"[TOOL_CALLS]{name}{identity}[ARGS]{{}}"
    for pieces in ([said], list(said)):
        assert parse(Calls(MISTRAL, [name]), pieces)[::2] == ("", [(name, "{}")])
    strange = said.replace(name, "y" * 257 + name) + said
    assert calls_of(MISTRAL, strange.replace(name, "weather")) == (
        strange.removesuffix(said).replace(name, "weather"), [("weather", "{}")],
    )  # fmt: skip


def test_the_longest_name_is_called_by_an_answer() -> None:
    name = "x" * 256
    said = f'[TOOL_CALLS]{name}[ARGS]{{"a": 1}}'
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
    with serving(script=said, source={"chat_template": TEMPLATES["mistral by name"]}, max_model_len=4096) as served:
        for choice in ("auto", "required"):
            answer, _ = tool_answers(served, tools=tools, tool_choice=choice, max_tokens=600)
            [call] = answer["message"]["tool_calls"]
            assert call["function"]["name"] == name and json.loads(call["function"]["arguments"]) == {"a": 1}
