"""Text of answers over HTTP, with scripts: stop strings, min_tokens, tool calls, reasoning, templates."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_drive import Served, serving

from tandem.errors import ModelError
from tandem.serve.options import ServeOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]  # noqa: E501  # fmt: skip


def both(served: Served, body: dict) -> tuple[str, str, int]:
    """(text, finish, completion tokens) of a completion, the same whole and streamed."""
    whole = served.complete(**body)
    events = served.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    chunks = [event for event in events[:-1] if event["choices"]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    choice = whole["choices"][0]
    assert text == choice["text"] and chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    return text, choice["finish_reason"], whole["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def letters() -> Iterator[Served]:
    with serving(pieces=["ABC", " DE", "F", "GHI", "J", " KLM"], max_model_len=256) as served:
        yield served


@pytest.mark.parametrize(
    ("stop", "include", "text", "tokens"),
    [
        (["EFG"], False, "ABC D", 4), (["EFG"], True, "ABC DEFG", 4), (["GHI", "FG"], False, "ABC DE", 4),
        ("GHI", False, "ABC DEF", 4), ("xyz", False, "ABC DEFGHIJ KLM", 7), ("hello", False, "ABC DEFGHIJ KLM", 7),
        (None, False, "ABC DEFGHIJ KLM", 7),
    ],
)  # fmt: skip
def test_c15_stop_strings(letters: Served, stop, include: bool, text: str, tokens: int) -> None:
    body = {"prompt": "hello", "max_tokens": 50, "stop": stop, "include_stop_str_in_output": include}
    assert both(letters, body) == (text, "stop", tokens)
    letters.at_rest()


def test_c15_no_part_of_a_stop_is_streamed_and_nothing_else_is_held(letters: Served) -> None:
    body = {"prompt": "hello", "max_tokens": 50, "stop": ["J KLMN"]}
    with serving(pieces=["ABC", " DE", "F", "GHI", "J", " KLM"], max_model_len=256, step_s=0.02) as slow:
        events = slow.events(COMPLETIONS, body)
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == "ABC DEFGHIJ KLM" and "GHI" in texts and "J" not in texts
    letters.refused(COMPLETIONS, {"prompt": "a", "stop": ""}, param="stop")


def test_c15_a_stop_within_one_token() -> None:
    with serving(pieces=["a", "\n\n\n", "b"], max_model_len=256) as served:
        assert both(served, {"prompt": "x", "max_tokens": 9, "stop": ["\n\n"]}) == ("a", "stop", 2)
        served.at_rest()


def test_c16_min_tokens() -> None:
    with serving(pieces=["a", "\n", "b", "\n", "c", "\n"], max_model_len=256) as served:
        body = {"prompt": "x", "stop": ["\n"], "min_tokens": 3, "max_tokens": 10}
        assert both(served, body) == ("a\nb", "stop", 4)
        served.refused(COMPLETIONS, {"prompt": "x", "min_tokens": 11, "max_tokens": 10}, param="min_tokens")
        served.refused(COMPLETIONS, {"prompt": "x", "min_tokens": -1}, param="min_tokens")
        served.at_rest()


def test_text_of_broken_and_whole_characters() -> None:
    """C11 through the server: joined deltas are the whole text, and a cut character is flushed once."""
    text = "Hi 👩‍🚀 naïve 日本語"
    with serving(script=text, max_model_len=256) as served:
        assert both(served, {"prompt": "x", "max_tokens": 100})[0] == text
        cut, finish, tokens = both(served, {"prompt": "x", "max_tokens": 5})
        assert cut == "Hi �" and finish == "length" and tokens == 5


HERMES_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools|tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def tool_answers(served: Served, **fields) -> tuple[dict, dict]:
    """(message, the same assembled from a stream)."""
    body = {"messages": HI, "tools": TOOLS, "max_tokens": 200, **fields}
    whole = served.post(CHAT, body)
    assert whole.status_code == 200, whole.text
    content, calls, finish = "", {}, None
    for event in served.events(CHAT, body)[:-1]:
        choice = event["choices"][0]
        content += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] not in calls:
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == finish
    message = choice["message"]
    assert (message["content"] or "") == content
    assert [call["function"] for call in message.get("tool_calls", [])] == list(calls.values())
    return choice, calls


@pytest.mark.parametrize(
    ("template", "script"),
    [
        (HERMES_TEMPLATE, f"Let me see. {CALL}\n{CALL}"),
        ("[TOOL_CALLS]{{ tools }}{{ messages[0].content }}", f"[TOOL_CALLS] [{ROME}, {ROME}]"),
        ("{{ tools }}{{ messages[0].content }}",
         '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "weather", "parameters": {"city": "Rome"}}'),
        (None, f"Let me see. {CALL}\n{CALL}"),
    ],
)  # fmt: skip
def test_tool_calls_of_the_families(template: str | None, script: str) -> None:
    source = {} if template is None else {"source": {"chat_template": template}}
    with serving(script=script, max_model_len=2048, **source) as served:
        choice, _ = tool_answers(served)
        assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 2
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
        assert choice["message"]["content"] == ("Let me see." if "Let me" in script else None)
        one, _ = tool_answers(served, parallel_tool_calls=False)
        assert len(one["message"]["tool_calls"]) == 1
        for body in ({"tool_choice": "none"}, {"tools": None}):
            plain = served.post(CHAT, {"messages": HI, "tools": TOOLS, "max_tokens": 300, **body}).json()["choices"][0]
            assert plain["message"]["content"] == script and plain["finish_reason"] == "stop"
        served.at_rest()


def test_tools_that_cannot_be() -> None:
    with serving(max_model_len=2048) as served:
        function = TOOLS[0]["function"]
        for body, param in (
            ({"tools": [{"type": "retrieval"}]}, "tools"), ({"tools": [{"type": "function"}]}, "tools"),
            ({"tools": TOOLS * 2}, "tools"), ({"tools": TOOLS * 129}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
            ({"tools": TOOLS, "response_format": {"type": "regex", "regex": "a"}}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": "n" * 257}}]}, "tools"),
            ({"tools": [{"type": "function", "function": {**function, "parameters": {"type": "objekt"}}}],
              "tool_choice": "required"}, "tools"),
        ):  # fmt: skip
            served.refused(CHAT, {"messages": HI, **body}, param=param)
        served.canary()


def test_reasoning_apart_from_content() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    for source, script in (
        (template, "Hm.\n</think>\n\nSo it is."),
        (template[:-1] + "x", "<think>\nHm.</think>So it is."),
    ):
        with serving(script=script, max_model_len=512, source={"chat_template": source}) as served:
            message = served.chat(max_tokens=100)["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", "So it is.")
            deltas = [e["choices"][0]["delta"] for e in served.events(CHAT, {"messages": HI, "max_tokens": 100})[:-1]]
            assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."
            assert "".join(d.get("content", "") for d in deltas) == "So it is."


def test_c24_no_template() -> None:
    with serving(source={"chat_template": None}, max_model_len=256) as served:
        served.complete(max_tokens=1)
        error = served.refused(CHAT, {"messages": HI}, param="messages")
        assert "no chat template" in error["message"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "chat.jinja"
        file.write_text("{{ messages[0].content }}")
        with serving(source={"bos_id": None}, chat_template=str(file), max_model_len=256) as served:
            assert served.chat("abcd", max_tokens=1)["usage"]["prompt_tokens"] == 4


def test_c24_a_template_that_refuses_or_is_broken() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role here.') }}{% endif %}x"
    with serving(source={"chat_template": template}, max_model_len=256) as served:
        error = served.refused(CHAT, {"messages": [{"role": "system", "content": "x"}]}, param="messages")
        assert "No system role here." in error["message"]
        served.refused(CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, param="chat_template")
        served.canary()
    with pytest.raises(ModelError, match="chat template has an error"), serving(source={"chat_template": "{% if %}"}):
        pass


def test_c25_one_bos_and_the_header_only_when_asked() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% if not loop.last or "
        "m.role != 'assistant' or add_generation_prompt %}[/]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    with serving(source={"chat_template": template, "add_bos": True}, max_model_len=256) as served:

        def ids(**fields) -> list[int]:
            return served.chat(return_token_ids=True, max_tokens=1, **fields)["prompt_token_ids"]

        text = served.post("/detokenize", {"tokens": ids()[1:]}).json()["prompt"]
        assert ids().count(1) == 1 and ids()[0] == 1 and text == "[u]hi[/][a]"
        assert ids(add_generation_prompt=False) == ids()[:-3]
        for prompt in ("hi", "<bos>hi"):
            answer = served.complete(prompt, return_token_ids=True, max_tokens=1)
            assert answer["prompt_token_ids"][0] == 1 and answer["usage"]["prompt_tokens"] == 3
        talk = [*HI, {"role": "assistant", "content": "Well"}]
        continued = served.post(
            CHAT, {"messages": talk, "continue_final_message": True, "return_token_ids": True}
        ).json()
        tail = served.post("/detokenize", {"tokens": continued["prompt_token_ids"]}).json()["prompt"]
        assert tail.endswith("[a]Well")
        both_flags = {"messages": talk, "continue_final_message": True, "add_generation_prompt": True}
        served.refused(CHAT, both_flags, param="continue_final_message")


def test_names_of_the_options_reach_the_answer() -> None:
    with serving(ServeOptions(served_model_name=["a", "b"]), max_model_len=64) as served:
        assert served.complete(model="b", max_tokens=1)["model"] == "b"
