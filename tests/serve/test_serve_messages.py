"""Messages: what is refused by its path, what the SDK gives back, names, and what the model is told of a schema."""

import json
from typing import Any

import pytest
from serve_drive import Served, serving

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]


def call(**changes: Any) -> dict:
    function = {"name": "weather", "arguments": "{}"}
    return {"id": "call_1", "type": "function", "function": function, **changes}


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [call(function={})]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call(function={"name": "x"})]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call(type="custom")]}, "messages[1].tool_calls[0].type"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, "messages[1].tool_calls"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[1].tool_call_id"),
        ({"role": "assistant", "content": "x", "audio": {"id": "x"}}, "messages[1].audio"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "x"}}, "messages[1].function_call"),
        ({"role": "assistant", "content": "x", "refusal": "y"}, "messages[1].refusal"),
        ({"role": "user", "content": "x", "name": "a b"}, "messages[1].name"),
        ({"role": "user", "content": "x", "name": 5}, "messages[1].name"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": {}}]},
         "messages[1].content[0].prompt_cache_breakpoint"),
    ],
)  # fmt: skip
def test_messages_are_refused_by_path(null: Served, message: dict, place: str) -> None:
    assert place in null.refused(CHAT, {"messages": [*HI, message]}, param="messages")["message"]
    if message["role"] != "user" or "name" not in message:
        assert place in null.refused("/tokenize", {"messages": [*HI, message]}, param="messages")["message"]


def test_messages_as_the_sdk_gives_them_back_are_taken(null: Served) -> None:
    given_back = {"role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None,
                  "function_call": None, "tool_calls": [call()]}  # fmt: skip
    answered = {"role": "tool", "tool_call_id": "call_1", "content": "sunny", "name": "weather"}
    null.chat([*HI, given_back, answered], max_tokens=1)
    refused = [*HI, {"role": "assistant", "content": None, "refusal": "No."}, *HI]
    plain = [*HI, {"role": "assistant", "content": "No."}, *HI]
    options = {"max_tokens": 1, "return_token_ids": True}
    assert null.chat(refused, **options)["prompt_token_ids"] == null.chat(plain, **options)["prompt_token_ids"]


def prompt_of(served: Served, messages: list[dict]) -> str:
    tokens = served.chat(messages, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    assert served.post("/tokenize", {"messages": messages}).json()["tokens"] == tokens
    return served.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_names_tell_participants_of_a_role_apart() -> None:
    silent = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    ann, bob = {"role": "user", "content": "hi", "name": "ann"}, {"role": "user", "content": "ho", "name": "bob"}
    alone = [ann, {"role": "assistant", "content": "well", "name": "agent"}, {**bob, "name": "ann"}]
    with serving(source={"chat_template": silent}, max_model_len=256) as served:
        assert prompt_of(served, [ann, bob]) == "[u]ann: hi[u]bob: ho"
        assert prompt_of(served, [{**ann, "content": [{"type": "text", "text": "x"}]}, *HI]) == "[u]ann: x[u]hi"
        assert prompt_of(served, alone) == "[u]hi[a]well[u]ho", "there is nobody to be told apart from"
    writes = "{% for m in messages %}[{{ m.name or m.role }}]{{ m.content }}{% endfor %}"
    with serving(source={"chat_template": writes}, max_model_len=256) as served:
        assert prompt_of(served, [ann, bob]) == "[ann]hi[bob]ho"
        served.canary()


@pytest.mark.parametrize("content", [5, 0, True, False, 1.5, {"type": "text", "text": "x"}, {}, None])
def test_a_content_that_is_no_text_is_refused_alike_with_a_name_and_without(null: Served, content: Any) -> None:
    """The name of one of several participants was put before it: a 500, or it was taken."""
    for path in (CHAT, "/tokenize"):
        told = []
        for name in ({}, {"name": "bob"}):
            messages = [{"role": "user", "content": content, **name}, *HI]
            told.append(null.refused(path, {"messages": messages}, param="messages")["message"])
        assert told[0] == told[1] and told[0].startswith("messages[0]")
    calling = {"role": "assistant", "content": None, "name": "ann", "tool_calls": [call()]}
    null.chat([*HI, calling, {"role": "assistant", "content": "x"}, *HI], max_tokens=1)


def test_a_schema_that_is_described_is_told_of() -> None:
    form = {"name": "town", "schema": {"type": "integer"}, "description": "The town's size."}
    source = {"chat_template": "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"}
    with serving(source=source, max_model_len=256) as served:

        def prompt(messages: list, **fields: Any) -> str:
            tokens = served.chat(messages, max_tokens=1, return_token_ids=True, **fields)["prompt_token_ids"]
            return served.post("/detokenize", {"tokens": tokens}).json()["prompt"]

        told = prompt(HI, response_format={"type": "json_schema", "json_schema": form})
        assert told == "[s]Your answer has the form town: The town's size.[u]hi"
        system = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *HI]
        told = prompt(system, response_format={"type": "json_schema", "json_schema": form})
        assert told == "[s]Be brief.\n\nYour answer has the form town: The town's size.[u]hi"
        bare = {"schema": {"type": "integer"}}
        assert prompt(HI, response_format={"type": "json_schema", "json_schema": bare}) == "[u]hi"
        answer = served.post(RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", **form}}}).json()
        assert answer["usage"]["input_tokens"] == len("[s]Your answer has the form town: The town's size.[u]hi")
        json.loads(answer["output"][0]["content"][0]["text"])


NAMES = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}:"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}>{% endfor %}{% endfor %}"
)


def test_arguments_that_the_template_cannot_write_are_refused_by_path() -> None:
    """Even where a system message was put before the client's; what was cut short is no such thing."""
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}, "description": "A size."}}
    source = {"chat_template": NAMES}
    with serving(source=source, max_model_len=256) as served:
        for arguments in ("[1, 2]", "5", '"x"'):
            made = {**call(), "function": {"name": "f", "arguments": arguments}}
            messages = [*HI, {"role": "assistant", "tool_calls": [call(), made]}]
            for fields in ({}, {"response_format": form}):
                error = served.refused(CHAT, {"messages": messages, **fields}, param="messages")
                assert error["message"].startswith("messages[1].tool_calls[1].function.arguments is "), error
                assert "no JSON object" in error["message"] and "hint: send a JSON object" in error["message"]
            item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
            error = served.refused(RESPONSES, {"input": [*HI, item]}, param="input")
            assert error["message"].startswith("input[1].arguments is ")
        cut = {**call(), "function": {"name": "f", "arguments": '{"city": "Ro'}}
        assert prompt_of(served, [*HI, {"role": "assistant", "tool_calls": [cut]}]) == "[u]hi[a]<f:city=Ro;>"
        served.canary()


def test_half_of_a_surrogate_pair_in_earlier_arguments_is_a_replacement_character() -> None:
    """The server gives such a call itself, if a model writes one."""

    def talk(arguments: str) -> list[dict]:
        made = {**call(), "function": {"name": "f", "arguments": arguments}}
        return [*HI, {"role": "assistant", "tool_calls": [made]}]

    with serving(source={"chat_template": NAMES}, max_model_len=256) as served:
        for arguments, told in (
            (r'{"a": "\ud83d"}', "a=\ufffd;"),
            (r'{"\udc00": 1}', "\ufffd=1;"),
            (r'{"a": "x\uD83Dy"}', "a=x\ufffdy;"),
            (r'{"a": "\ud83d", "b": "c', "a=\ufffd;b=c;"),
            (r'{"a": "\ud83d\ude00"}', "a=\U0001f600;"),
        ):
            assert prompt_of(served, talk(arguments)) == f"[u]hi[a]<f:{told}>"
            served.chat([*talk(arguments), *HI], max_tokens=1)
        nested = talk(r'{"a": [1, {"b": ["\ud83d"]}]}')
        assert "\ufffd" in prompt_of(served, nested)
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": r'{"a": "\ud83d"}'}
        assert served.post(RESPONSES, {"input": [*HI, item], "max_output_tokens": 1}).status_code == 200
    with serving(max_model_len=256) as served:
        served.chat([*talk(r'{"a": "\ud83d"}'), *HI], max_tokens=1)


def test_earlier_arguments_that_are_nested_too_deep_stay_text_or_are_refused_by_path() -> None:
    """As deep as a body may be; deeper they are no failure, wherever an interpreter would give up."""

    def talk(num_levels: int, leaf: str) -> list[dict]:
        arguments = '{"a":' * num_levels + leaf + "}" * num_levels
        made = {**call(), "function": {"name": "f", "arguments": arguments}}
        return [*HI, {"role": "assistant", "tool_calls": [made]}, {"role": "tool", "tool_call_id": "call_1",
                                                                   "content": "x"}]  # fmt: skip

    whole = NAMES.replace("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
                          "{{ c.function.arguments | tojson }}")  # fmt: skip
    for source in (whole, NAMES, None):
        with serving(source={"chat_template": source} if source else None, max_model_len=16384) as served:
            for num_levels in (99, 100, 101, 490, 500, 700, 980, 990, 1200):
                for leaf in ("1", r'"\ud83d"', r'[{"b": "]"}]'):
                    body = {"messages": talk(num_levels, leaf), "max_tokens": 1}
                    answer = served.post(CHAT, body)
                    if source == NAMES and num_levels + 2 * leaf.startswith("[") > 100:
                        error = served.refused(CHAT, body, param="messages")
                        assert error["message"].startswith("messages[1].tool_calls[0].function.arguments is ")
                        assert "nested too deep (the limit is 100 levels)" in error["message"]
                    else:
                        assert answer.status_code == 200, (num_levels, leaf, answer.text)
            served.canary()
