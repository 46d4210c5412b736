"""Reasoning and tool calls out of an answer's text: formats, oddities, and that cutting changes nothing."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.serve.calls import HERMES, LLAMA, MISTRAL, TAGGED, CallFormat, Calls
from tandem.serve.parse import AnswerParser, Reasoning
from tandem.serve.value_kinds import ValueKinds

NAMES = ("weather", "time")
CALL = '{"name": "weather", "arguments": {"city": "Paris", "days": [1, {"x": "}\\""}]}}'
ARGUMENTS = '{"city": "Paris", "days": [1, {"x": "}\\""}]}'


def parse(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, calls as (name, arguments)) joined over all pieces."""
    content, reasoning, calls = "", "", {}
    for place, text in enumerate(pieces):
        for piece in parser.feed(text, final=place == len(pieces) - 1):
            assert (bool(piece.content) + bool(piece.reasoning) + (piece.tool is not None)) == 1
            content += piece.content
            reasoning += piece.reasoning
            if piece.tool is not None:
                assert bool(piece.tool.id) == (piece.tool.index not in calls), "an id comes once, first"
                piece.tool.add_to(calls)
    assert sorted(calls) == list(range(len(calls)))
    return content, reasoning, [(c["function"]["name"], c["function"]["arguments"]) for c in calls.values()]


def calls_of(form: CallFormat, text: str, **options) -> tuple[str, list[tuple[str, str]]]:
    content, _, calls = parse(Calls(form, NAMES, **options), [text])
    return content, calls


def test_hermes_calls_between_content() -> None:
    text = f"I look.\n <tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n Done. "
    assert calls_of(HERMES, text) == ("I look.Done. ", [("weather", ARGUMENTS)] * 2)
    assert calls_of(HERMES, text, single=True)[1] == [("weather", ARGUMENTS)]


def test_llama_calls_are_the_whole_answer() -> None:
    one = '{"name": "time", "parameters": {"zone": "CET"}}'
    assert calls_of(LLAMA, f" {one}") == ("", [("time", '{"zone": "CET"}')])
    assert calls_of(LLAMA, f"{one}; {one}") == ("", [("time", '{"zone": "CET"}')] * 2)
    assert calls_of(LLAMA, f"It is so: {one}") == (f"It is so: {one}", [])
    assert calls_of(LLAMA, '{"answer": 3}') == ('{"answer": 3}', [])


def test_mistral_calls_as_list_and_by_name() -> None:
    assert calls_of(MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]") == ("", [("weather", ARGUMENTS)] * 2)
    named = f"Yes. [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[CALL_ID]a1[ARGS]{{}}"
    assert calls_of(MISTRAL, named) == ("Yes.", [("weather", ARGUMENTS), ("time", "{}")])


@pytest.mark.parametrize(
    ("form", "written", "arguments"),
    [
        (HERMES, '"\\ud83d"', "\ufffd"),
        (HERMES, '"{\\"a\\":\\"\\ud83d\\ude00\\udc00\\"}"', '{"a":"\U0001f600\ufffd"}'),
        (LLAMA, '"\\udc00"', "\ufffd"), (HERMES, '"{\\"a\\": \\"\\\\ud83d\\"}"', r'{"a": "\ufffd"}'),
        (HERMES, r'{"a": "Oslo \ud83d x"}', r'{"a": "Oslo \ufffd x"}'), (LLAMA, r'{"\udc00": 1}', r'{"\ufffd": 1}'),
        (MISTRAL, r'{"a": "\uD83D\n\ude00"}', r'{"a": "\ufffd\n\ufffd"}'),
        (MISTRAL, r'{"a": "\ud83d\ud83d\ude00\ude00"}', r'{"a": "\ufffd\ud83d\ude00\ufffd"}'),
        (HERMES, r'{"a": "\\ud83d\\\ud83d\ud7ff\u00e9"}', r'{"a": "\\ud83d\\\ufffd\ud7ff\u00e9"}'),
        (HERMES, r'{"a": "\ud83d\udc', r'{"a": "\ufffd\udc'), (HERMES, r'{"a": "\ud83d', r'{"a": "\ufffd'),
        (LLAMA, r'{"a": "x\ud83d\\', r'{"a": "x\ufffd\\'), (HERMES, r'{"a": "\ud8', r'{"a": "\ud8'),
        (HERMES, '{"a": "\\', '{"a": "\\'), (HERMES, r'{"a": "\ud83d\u', r'{"a": "\ufffd\u'),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_is_a_replacement_character(form: CallFormat, written: str, arguments: str) -> None:
    """Whole, and character by character; of JSON its escape. Of an answer that is cut short nothing is held back."""
    is_whole = written.endswith(('"', "}"))
    said = f'{form.opening}{{"name": "time", "{form.arguments_key}": {written}'
    said += f"}}{form.closing}" if is_whole else ""
    for pieces in ([said], list(said), [*said, ""]):
        content, _, calls = parse(Calls(form, NAMES), pieces)
        assert (content, calls) == ("", [("time", arguments)]) and calls[0][1].encode()
        if is_whole and arguments.startswith("{"):
            json.dumps(json.loads(calls[0][1]), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "written", ['{"name": "time"}', '{"arguments": {}, "name": "time"}', '{"name":"time","arguments":"{}"}']
)
def test_odd_but_valid_calls(written: str) -> None:
    assert calls_of(HERMES, f"<tool_call>{written}</tool_call>") == ("", [("time", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "a <tool_call>no json</tool_call> b",
        'a  <tool_call> {"name": "unknown", "arguments": {}} </tool_call> b',
        'a <tool_call>{"name": "wea',
        "a <tool_call> ",
        "a <tool_ca",
        "<b> < <tool <toolx",
        " \n ",
    ],
)
def test_what_is_no_call_stays_content_as_written(text: str) -> None:
    assert calls_of(HERMES, text) == (text, [])


def test_a_call_cut_short_keeps_what_came() -> None:
    assert calls_of(HERMES, '<tool_call>{"name": "time", "arguments": {"zo') == ("", [("time", '{"zo')])
    assert calls_of(HERMES, f"<tool_call>{CALL}</tool") == ("", [("weather", ARGUMENTS)])


@pytest.mark.parametrize("governed", [False, True])
@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA])
def test_a_call_cut_short_is_given_only_if_arguments_came(form: CallFormat, governed: bool) -> None:
    """Of whatever length, and however cut into pieces: no call without arguments, and the parser knows it was cut."""
    text = f'{form.opening}{"[" if form.is_list else ""}{{"name": "time", "{form.arguments_key}": {{"zone": 1}}}}'
    whole = len(text)
    for before in ("",) if form is LLAMA else ("", f"{text}{form.closing}" + ("]" if form.is_list else "")):
        for size in range(len(form.opening) + 1, whole + 1):
            parser = Calls(form, NAMES, governed=governed)
            content, calls = parse(parser, list(before + text[:size]))[::2]
            if before:
                assert calls.pop(0) == ("time", '{"zone": 1}')
            named = '"time"' in text[:size]
            assert bool(calls) == ('": {' in text[:size]) and all(arguments for _, arguments in calls), text[:size]
            assert not content if governed or named else content
            assert parser.cut_short == (size < whole and (governed or named)), text[:size]
            assert parser.in_call == (bool(calls) and size < whole)


@pytest.mark.parametrize("arguments", ['""', "", " "])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    assert calls_of(HERMES, f'<tool_call>{{"name": "time", "arguments": {arguments}}}</tool_call>') == (
        "",
        [("time", "{}")],
    )


@pytest.mark.parametrize(
    ("text", "inside", "content", "reasoning"),
    [
        ("\n<think>\nHm. Ha.\n</think>\n\nYes. ", False, "Yes. ", "Hm. Ha."),
        ("Hm.</think>Yes.", True, "Yes.", "Hm."),
        ("Hm. no end ", True, "", "Hm. no end "),
        ("plain <think>x</think>", False, "plain <think>x</think>", ""),
        ("  plain", False, "  plain", ""),
        ("<thin", False, "<thin", ""),
        ("<think></think> a", False, "a", ""),
        ("<think>a</think> b </think> c", False, "b </think> c", "a"),
    ],
)  # fmt: skip
def test_reasoning(text: str, inside: bool, content: str, reasoning: str) -> None:
    assert parse(Reasoning(None, inside=inside), [text])[:2] == (content, reasoning)


PARTS = st.sampled_from([
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "[ARGS]", CALL, '{"name": "time"}',
    '{"name": "nobody", "arguments": 1}', '{"name": "time", "parameters": "{\\"a\\": 1}"}', "weather", " ", "\n",
    "\n\n", ",", ";", "a", "{", "}", '"', "\\", "<", "<t", "</", "text. ", "[CALL_ID]", "5 ",
    '"}}', "\\ud83d", "\\uDE00", '<tool_call>{"name": "time", "arguments": {"a": "', "\\ud8",
])  # fmt: skip
TAGGED_PARTS = st.sampled_from([
    "<think>", "</think>", "<tool_call>", "<tool_call>\n<function=weather>\n", "<tool_call><function=time>",
    "<function=", "<function=unknown>", "</function>", "</tool_call>", "\n</function>\n</tool_call>",
    "<parameter=days>",
    "<parameter=list>\n[1]\n</parameter>", "</parameter>", "</tool_calls", "</functio", "</", "<", ">", "3", " ", "\n",
    "It is done.", "x" * 255, "xx", '{"name": "time"}', "<x>",
])  # fmt: skip


@given(
    parts=st.lists(PARTS, max_size=14), cuts=st.lists(st.integers(0, 400), max_size=30),
    form=st.sampled_from([HERMES, LLAMA, MISTRAL, None]), thinks=st.sampled_from([None, False, True]),
    single=st.booleans(), governed=st.booleans(),
)  # fmt: skip
@example([f" <tool_call> {CALL} </tool_call> x"], list(range(100)), HERMES, None, False, False)
@example(
    ["<think> a </think> ", '{"name": "time", "parameters": {}}', " ; x"], list(range(100)), LLAMA, False, False, False
)
@example(["<tool_call><function=time></tool_call>z"], [12], HERMES, None, False, True)
@example(
    ['<tool_call>{"name": "time", "arguments": {"a": "', r"\ud83d\\ud83d\ude00\ud8"], [58], HERMES, None, False, True
)
@settings(deadline=None, max_examples=300)
def test_cutting_changes_nothing(parts, cuts, form, thinks, single, governed) -> None:
    check_cuts("".join(parts), cuts, form, thinks, single=single, governed=governed)


CLOSED = "<tool_call><function=time><parameter=a>1</parameter></tool_call> It is done."
LONG = f"<tool_call><function={'x' * 257}></function></tool_call>text {CLOSED}"


@given(
    parts=st.lists(TAGGED_PARTS, max_size=14), cuts=st.lists(st.integers(0, 400), max_size=30),
    thinks=st.sampled_from([None, False, True]), single=st.booleans(), governed=st.booleans(),
)  # fmt: skip
@example([CLOSED], [60], None, False, False)
@example([CLOSED.replace("time", "unknown")], [60], None, False, False)
@example([LONG], [10], None, False, False)
@example(["<tool_call><function=time></tool_calls ", "</function>x"], [40], None, False, False)
@settings(deadline=None, max_examples=300)
def test_cutting_calls_between_tags_changes_nothing(parts, cuts, thinks, single, governed) -> None:
    check_cuts("".join(parts), cuts, TAGGED, thinks, single=single, governed=governed, kinds=KINDS)


def check_cuts(text: str, cuts: list[int], form: CallFormat | None, thinks: bool | None, **options) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]

    def outcome(pieces: list[str]) -> tuple:
        calls = Calls(form, NAMES, **options) if form is not None else None
        parser: AnswerParser = calls if thinks is None and calls is not None else Reasoning(calls, inside=bool(thinks))
        return *parse(parser, pieces), parser.in_call, parser.cut_short

    whole = outcome([text])
    assert outcome([*pieces, ""]) == whole
    assert outcome(list(text) or [""]) == whole


@pytest.mark.parametrize("pieces", [["", "</tool_call>"], ["</", "tool", "_call", ">"], ["</tool_c", "all>"]])
def test_a_call_that_its_closing_ends_takes_all_of_it(pieces: list[str]) -> None:
    before = "<tool_call><function=time><parameter=a>1</parameter>"
    parser = Calls(TAGGED, NAMES)
    said = parse(parser, [before + pieces[0], *pieces[1:], " It is", " done.", ""])
    assert said == ("It is done.", "", [("time", '{"a": "1"}')]) and not parser.cut_short
    unknown = before.replace("time", "unknown")
    said = parse(Calls(TAGGED, NAMES), [unknown + pieces[0], *pieces[1:], " It is done.", ""])
    assert said == (unknown + "</tool_call> It is done.", "", [])


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_a_name_that_is_too_long_swallows_nothing_behind_it(size: int) -> None:
    content, _, calls = parse(Calls(TAGGED, NAMES), [LONG[i : i + size] for i in range(0, len(LONG), size)])
    assert content == LONG.removesuffix(f" {CLOSED}") + "It is done." and calls == [("time", '{"a": "1"}')]


def test_arguments_stream_as_they_come() -> None:
    parser = Calls(HERMES, NAMES)
    pieces = [p for c in f"<tool_call>{CALL}" for p in parser.feed(c, final=False)]
    tools = [piece.tool for piece in pieces]
    assert all(tools) and tools[0].name == "weather" and len(tools) > 20
    assert json.loads("".join(t.arguments for t in tools)) == json.loads(ARGUMENTS)


def test_ids_are_of_the_one_form_that_every_template_takes() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'
    ids = [piece.tool.id for piece in Calls(MISTRAL, ["f"]).feed(text, final=True) if piece.tool and piece.tool.id]
    assert len(set(ids)) == 2 and all(len(made) == 9 and made.isascii() and made.isalnum() for made in ids)


def tagged(name: str, **values: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


SCHEMAS = {"weather": {"properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "share": {"type": ["number", "null"]},
    "fine": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "list": {"$ref": "#/$defs/list"}, "any": {},
    "note": {"type": ["string", "null"]}, "pick": {"enum": [1, 2]},
    "odd": {"type": 5}, "odder": {"type": True}, "oddest": {"type": {}}, "some": {"type": [5, "integer", {}]},
    "any of": {"anyOf": [5, None, [], {"type": "boolean"}]}, "listed": {"$ref": "#/properties/nested/anyOf/1"},
    "nested": {"anyOf": [{}, {"type": "integer"}]}, "lost": {"$ref": "#/properties/nested/anyOf/9/x"},
    "ring": {"$ref": "#/properties/ring"}, "far": {"$ref": "#/$defs/a~1b"},
}, "$defs": {"list": {"type": "array"}, "a/b": {"type": "integer"}}}}  # fmt: skip
KINDS = ValueKinds(SCHEMAS)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("city", "12", "12"), ("city", "a\n<b>\n  c", "a\n<b>\n  c"), ("city", "\nx\n", "\nx\n"), ("days", "12", 12),
        ("days", "many", "many"), ("days", "1.5", "1.5"), ("share", "3", 3), ("share", "None", None),
        ("fine", "True", True),
        ("fine", "false", False), ("list", '[1, {"a": "</b>"}]', [1, {"a": "</b>"}]), ("any", "5", "5"),
        ("other", "5", "5"), ("note", "null", None), ("note", "7", "7"), ("pick", "2", 2), ("days", "NaN", "NaN"),
        ("city", "", ""), ("list", "[" * 100_000, "[" * 100_000),
        # no float holds it, and Infinity is no JSON
        ("share", "1e999", "1e999"), ("share", "-1e999", "-1e999"), ("list", "[1, -1e999]", "[1, -1e999]"),
        ("list", '[{"a": 1e999}]', '[{"a": 1e999}]'), ("share", "1e308", 1e308), ("share", "0e999", 0.0),
        # an integer is a number without a fraction
        ("days", "5.0", 5), ("days", "-2e2", -200), ("days", "1e300", 1e300), ("share", "5.0", 5.0),
        ("days", "1e999", "1e999"),
        ("list", '["\\ud83d", {"\\udc00": "\\ud83d\\ude00"}]', ["\ufffd", {"\ufffd": "\U0001f600"}]),
        ("odd", "3", "3"), ("odder", "3", "3"), ("oddest", "3", "3"), ("some", "3", 3), ("any of", "true", True),
        ("listed", "2", 2), ("lost", "2", "2"), ("ring", "4", "4"), ("far", "4", 4),
    ],
)  # fmt: skip
def test_values_between_tags_are_of_the_type_that_the_schema_says(key: str, written: str, value: object) -> None:
    content, [(name, arguments)] = calls_of(TAGGED, tagged("weather", **{key: written}), kinds=KINDS)
    assert (content, name) == ("", "weather") and arguments.encode()
    [found] = json.loads(arguments, parse_constant=pytest.fail).values()
    assert found == value and type(found) is type(value)


def test_calls_between_tags_stand_between_content() -> None:
    text = f"Well.\n{tagged('weather', city='Rome', days='2')}\n{tagged('time')}\nSo."
    calls = [("weather", '{"city": "Rome", "days": 2}'), ("time", "{}")]
    assert calls_of(TAGGED, text, kinds=KINDS) == ("Well.So.", calls)
    for cut in range(len(text)):
        for pieces in ([text[:cut], text[cut:]], list(text)):
            content, _, found = parse(Calls(TAGGED, NAMES, kinds=KINDS), pieces)
            assert (content, found) == ("Well.So.", calls), cut
            if cut:
                break
    other = tagged("unknown", city="Rome")
    assert calls_of(TAGGED, other) == (other, [])
    spaced = tagged("time", a="1", b="2").replace("\n<", " " * 700 + "<").replace("</function>", "<x>?</function>")
    ((_, arguments),) = calls_of(TAGGED, spaced)[1]
    assert {key: value.strip() for key, value in json.loads(arguments).items()} == {"a": "1", "b": "2"}
    assert calls_of(TAGGED, "<tool_call>\n<functio") == ("<tool_call>\n<functio", [])
    assert calls_of(TAGGED, tagged("time", a="1").replace("</function>\n", "")) == ("", [("time", '{"a": "1"}')])
    assert calls_of(TAGGED, "<tool_call><function=" + "x" * 5000)[1] == []
    assert calls_of(TAGGED, '<tool_call>{"name": "time", "arguments": {}}</tool_call>') == ("", [("time", "{}")])


def test_a_call_between_tags_that_is_cut_short_keeps_whole_parameters() -> None:
    text = tagged("weather", city="Rome", days="2")
    seen = set()
    for size in range(len("<tool_call>\n<function=weather>"), len(text)):
        parser = Calls(TAGGED, NAMES, kinds=KINDS)
        content, _, calls = parse(parser, [text[:size]])
        assert not content and parser.cut_short == ("</function>" not in text[:size])
        seen.update(calls)
    assert seen == {
        ("weather", '{"city": "Rome"'), ("weather", '{"city": "Rome", "days": 2'),
        ("weather", '{"city": "Rome", "days": 2}'),
    }  # fmt: skip
