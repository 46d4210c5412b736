"""continue_final_message within a thought or a call: the answer goes on inside of it, and no mark is content."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_drive import Served, serving
from test_parse import ARGUMENTS, CALL, NAMES, parse, tagged
from test_serve_tools import CHAT, CITY

from tandem.errors import RequestError
from tandem.serve.calls import HERMES, LLAMA, MISTRAL, TAGGED, CallFormat, Calls
from tandem.serve.continued import continued, said_in
from tandem.serve.parse import AnswerParser, Reasoning

SAID = {
    "hermes": (HERMES, f"<think> Hm.\nHa. </think>\n I look. <tool_call>\n{CALL}\n</tool_call><tool_call>{CALL}\n"),
    "tagged": (TAGGED, f"<think>Hm.</think>So. {tagged('time', zone='CET', x='1')} {tagged('weather', city='Rome')}"),
    "mistral": (MISTRAL, f"So. [TOOL_CALLS][{CALL}, {CALL}]"),
    "by name": (MISTRAL, f"So. [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}"),
    "llama": (LLAMA, f"{CALL}; {CALL}"), "no call": (LLAMA, '{"answer": {"x": 3}} is it.'),
    "strangers": (MISTRAL, f'a [TOOL_CALLS][{{"name": "zz"}}, {CALL}, {{"name": "yy"}}] b'),
}  # fmt: skip


def maker(form: CallFormat, thinks: bool):
    def make() -> AnswerParser:
        calls = Calls(form, NAMES)
        return Reasoning(calls, inside=False) if thinks else calls

    return make


@pytest.mark.parametrize("what", SAID)
def test_wherever_a_message_ends_the_answer_goes_on_with_it(what: str) -> None:
    """What is given behind the cut is the rest of the whole; a call that is open there is given whole."""
    form, text = SAID[what]
    make = maker(form, "think" in text)
    content, reasoning, calls = parse(make(), [text])
    num_open = {"thought": 0, "call": 0}
    for place in range(1, len(text)):
        found = continued(make, text[:place], is_governed=False)
        if found is None:
            continue
        num_open[found.open_kind if found.open_kind != "mark" else "call"] += 1
        whole = parse(found.copy(), [text[place:]])
        assert parse(found.copy(), list(text[place:])) == whole
        if found.open_kind == "thought":  # all behind it is told apart as in the whole
            assert whole[2] == calls and reasoning.endswith(whole[1]) and whole[0] == content
        assert content.endswith(whole[0]) and reasoning.endswith(whole[1])
        num_ended = len(calls) - len(whole[2])
        assert whole[2] == calls[num_ended:] and len(whole[0]) <= len(text) - place
        assert num_ended == text[:place].count(ARGUMENTS + "}") or "name" in what or form is TAGGED
    assert num_open["call"] > 10 and (num_open["thought"] > 5 or "think" not in text)


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "<tool_call>", CALL, "</tool_call>", "<", '{"'])),
       st.integers(0, 300), st.lists(st.integers(0, 300), max_size=5))  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_nothing_of_the_prompt_is_given_as_text(parts: list[str], place: int, cuts: list[int]) -> None:
    text = "".join(parts)
    said, rest = text[:place], text[place:]
    found = continued(maker(HERMES, True), said, is_governed=False)
    if found is not None:
        content, reasoning, _ = parse(found.copy(), [rest])
        edges = sorted({0, len(rest), *(cut for cut in cuts if cut < len(rest))})
        pieces = [rest[a:b] for a, b in pairwise(edges)]
        assert parse(found.copy(), [*pieces, ""]) == parse(found.copy(), [rest])
        assert len(content) + len(reasoning) <= len(rest)


def test_each_answer_has_a_call_of_its_own() -> None:
    found = continued(maker(HERMES, False), '<tool_call>{"name": "time", "arguments": {"a"', is_governed=False)
    assert found is not None
    ids = set()
    for rest in (": 1}}", ": 2}}</tool_call>"):
        pieces = found.copy().feed(rest, final=True)
        ids.add(pieces[0].tool.id)
        assert "".join(piece.tool.arguments for piece in pieces) == f'{{"a"{rest[:5].rstrip("}")}}}'
    assert len(ids) == 2


@pytest.mark.parametrize("said", ["Well", "<think>a</think> So", "", " ", f"<tool_call>{CALL}</tool_call> Yes. "])
def test_a_message_that_ends_within_nothing_changes_nothing(said: str) -> None:
    for governed in (False, True):
        assert continued(maker(HERMES, True), said, is_governed=governed) is None


@pytest.mark.parametrize(
    ("end", "content", "said"),
    [
        ("[a]Well", "Well", "Well"), ("[a]Well", " Well \n", "Well"), ("[a]x\nWell ", "Well ", "Well "),
        ("[a]<think>\nWell", "Well", "<think>Well"), ("[a]other", "Well", "Well"), ("[a]", "", ""),
        ("Well [a]Well<tool_call>", "Well", "Well<tool_call>"),
    ],
)  # fmt: skip
def test_what_the_prompt_ends_with(end: str, content: str, said: str) -> None:
    assert said_in(end, content) == said


TEMPLATE = (
    "{# tools MARKS #}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% if not loop.last %}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LAX = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def answer(served: Served, said: str, **fields) -> dict:
    """The choice, which a stream gives as well."""
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}]
    body = {"messages": talk, "continue_final_message": True, "tools": LAX, **fields}
    whole = served.post(CHAT, body)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    content = reasoning = arguments = ""
    for event in served.events(CHAT, body)[:-1]:
        delta = event["choices"][0]["delta"]
        content, reasoning = content + (delta.get("content") or ""), reasoning + (delta.get("reasoning_content") or "")
        arguments += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
    message = choice["message"]
    calls = message.get("tool_calls", ())
    assert content == (message["content"] or "") and reasoning == message.get("reasoning_content", "")
    assert arguments == "".join(call["function"]["arguments"] for call in calls)
    return choice


@pytest.mark.parametrize("said", ["<think>I begin", "<think>\nI begin\n", "<think>I begin</thi"])
def test_an_answer_goes_on_within_a_thought(said: str) -> None:
    rest = "nk>The answer." if said.endswith("</thi") else " to see. </think>\nThe answer."
    with serving(source={"chat_template": TEMPLATE.replace("MARKS", "<tool_call><think>")}, script=rest) as served:
        for fields in (
            {},
            {"tools": None},
            {"tool_choice": "none"},
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": CITY}}]},
        ):
            choice = answer(served, said, **fields)
            assert choice["message"]["content"] == "The answer." and choice["finish_reason"] == "stop"
            thought = choice["message"].get("reasoning_content", "")
            assert thought.strip() == ("" if said.endswith("</thi") else "to see.")


@pytest.mark.parametrize(
    ("marks", "said", "rest", "arguments"),
    [
        ("<tool_call>", '<tool_call>{"name": "f", ', '"arguments": {"x": 1}}</tool_call>', '{"x": 1}'),
        ("<tool_call>", 'So. <tool_call>{"name": "f", "arguments": {"x"', ": 1}}</tool_call>", '{"x": 1}'),
        ("<tool_call>", "<tool_call>", '{"name": "f", "arguments": {"x": 1}}</tool_call>', '{"x": 1}'),
        ("<tool_call>", "<tool_ca", 'll>{"name": "f", "arguments": {"x": 1}}</tool_call>', '{"x": 1}'),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", ', '"arguments": {"x": 1}}]', '{"x": 1}'),
        ("[TOOL_CALLS][ARGS]", "[TOOL_CALLS]f[AR", 'GS]{"x": 1}', '{"x": 1}'),
        ("", '{"name": "f", "para', 'meters": {"x": 1}}', '{"x": 1}'),
        ("<tool_call><function=", "<tool_call><function=f><parameter=x>\na", "b\n</parameter></function></tool_call>",
         '{"x": "ab"}'),
    ],
)  # fmt: skip
def test_an_answer_goes_on_within_a_call_unless_a_grammar_governs_it(
    marks: str, said: str, rest: str, arguments: str
) -> None:
    with serving(source={"chat_template": TEMPLATE.replace("MARKS", marks)}, script=rest, max_model_len=2048) as served:
        choice = answer(served, said)
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": arguments} and choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        cut = answer(served, said, max_tokens=1)
        named = '"f"' in said or "f>" in said  # else it is none yet, and stays content as ever
        assert cut["finish_reason"] == "length" and (cut["message"]["content"] or "") == ("" if named else rest[0])
        text = answer(served, said, tool_choice="none")
        assert text["message"]["content"] == rest and "tool_calls" not in text["message"]
        talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}]
        strict = [{"type": "function", "function": {**LAX[0]["function"], "strict": True}}]
        if "function" in marks:
            return
        for fields in ({"tools": strict}, {"tools": LAX, "tool_choice": "required"}):
            body = {"messages": talk, "continue_final_message": True, **fields}
            error = served.refused(CHAT, body, param="continue_final_message")
            assert "within a tool call" in error["message"] and "in front of it" in error["message"]


def test_a_long_call_is_gone_on_with_at_once() -> None:
    said = '<tool_call>{"name": "time", "arguments": {"text": "' + "x" * 60_000
    start_s = time.monotonic()
    found = continued(maker(HERMES, True), said, is_governed=False)
    assert found is not None and time.monotonic() - start_s < 1
    _, _, [(_, arguments)] = parse(found.copy(), ['"}}'])
    assert len(json.loads(arguments)["text"]) == 60_000


@pytest.mark.parametrize("form", [LLAMA, MISTRAL, HERMES])
def test_a_message_that_is_costly_to_continue_is_told_its_limit(form: CallFormat) -> None:
    """Rows of what is no call: parsing them takes the square of their length, on the thread of everyone's bodies."""
    for said in ("{}" * 30_000, "[TOOL_CALLS]5{}" * 4000, "<tool_call>x" * 5000):
        start_s = time.monotonic()
        continued(maker(form, True), said, is_governed=False)
        assert time.monotonic() - start_s < 2
        with pytest.raises(RequestError, match="limit is 65,536"):
            continued(maker(form, True), said * 2, is_governed=False)


@pytest.mark.parametrize("said", ["The tag `<think>` marks", "<think>a</think> b <think> c"])
def test_a_thought_that_is_only_spoken_of_is_none(said: str) -> None:
    assert continued(maker(HERMES, True), said, is_governed=False) is None


def test_a_users_final_message_is_not_parsed() -> None:
    with serving(source={"chat_template": TEMPLATE.replace("MARKS", "<think>")}, script="Yes.") as served:
        body = {"messages": [{"role": "user", "content": "<think>I wonder"}], "continue_final_message": True}
        message = served.post(CHAT, body).json()["choices"][0]["message"]
        assert message["content"] == "Yes." and not message.get("reasoning_content")
