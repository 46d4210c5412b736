"""Each field that the openai SDK can send is honoured, a label, or refused by name; errors name what was written.

The lists here are of what has been decided. What a later version of the SDK adds need not be on them: it is refused by
name, as all that the server does not know, which is what is tested then.
"""

import re
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)
from openai.types.responses import FunctionToolParam, ToolChoiceFunctionParam, response_create_params
from openai.types.responses.response_format_text_json_schema_config_param import (
    ResponseFormatTextJSONSchemaConfigParam,
)
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.shared_params import FunctionDefinition, Reasoning, ResponseFormatJSONSchema
from openai.types.shared_params.response_format_json_schema import JSONSchema
from serve_drive import Served, serving

from tandem.serve import refusals, schema
from tandem.serve.accept import Limits, completion_params

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BASE = {
    CHAT: {"messages": HI, "max_tokens": 1},
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
}
# They name the sender or group requests; what they are said to do elsewhere (billing, routing) has no place here.
LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
HONOURED = {
    CHAT: """messages model frequency_penalty logit_bias logprobs max_completion_tokens max_tokens n parallel_tool_calls
        presence_penalty reasoning_effort response_format seed stop stream stream_options temperature tool_choice tools
        top_logprobs top_p""",
    COMPLETIONS: """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed
        stop stream stream_options temperature top_p""",
    RESPONSES: """include input instructions max_output_tokens model parallel_tool_calls reasoning stream stream_options
        temperature text tool_choice tools top_logprobs top_p""",
}
REFUSED = {CHAT: refusals.CHAT, COMPLETIONS: refusals.COMPLETIONS, RESPONSES: refusals.RESPONSES}
BODIES = {CHAT: schema.ChatRequest, COMPLETIONS: schema.CompletionRequest, RESPONSES: schema.ResponsesRequest}
SDK = {
    CHAT: chat_create_params.CompletionCreateParamsBase,
    COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
    RESPONSES: response_create_params.ResponseCreateParamsBase,
}
# Values that ask for something, of the type the field has.
ASKING: dict[str, Any] = {
    "moderation": {"model": "x"}, "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"},
    "service_tier": "flex", "store": True, "audio": {"voice": "x"}, "functions": [{"name": "x"}],
    "function_call": "auto", "prediction": {"type": "content", "content": "x"}, "web_search_options": {},
    "modalities": ["text", "audio"], "verbosity": "low", "chat_template": "x", "echo": True, "suffix": "x",
    "previous_response_id": "resp_1", "conversation": "c", "background": True, "prompt": {"id": "x"},
    "max_tool_calls": 3, "context_management": [{"type": "compaction"}], "truncation": "auto",
    "background_options": {"completion_window": "8h"}, "access_programs": {"cyber": "daybreak_red"},
    "image": {"context_compression": "enabled"},
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_every_field_of_the_sdk_is_placed(null: Served, path: str) -> None:
    fields = {*get_type_hints(SDK[path]), "stream"}
    placed = {*HONOURED[path].split(), *REFUSED[path], *LABELS & fields}
    assert placed <= set(BODIES[path].__struct_fields__)
    for name in fields - placed:
        assert name in null.refused(path, {**BASE[path], name: {"x": 1}}, param=name)["message"]


TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
FORM = {"type": "json_schema", "name": "n", "schema": {"const": 1}}
# Each part with the path to it, the structure it is decoded into, and where in a body it stands.
PARTS = [
    (ChatCompletionStreamOptionsParam, schema.StreamOptions, "include_usage", refusals.STREAM_OPTIONS,
     CHAT, lambda more: {"stream": True, "stream_options": more}, "stream_options."),
    (response_create_params.StreamOptions, schema.ResponsesStreamOptions, "", refusals.STREAM_OPTIONS,
     RESPONSES, lambda more: {"stream": True, "stream_options": more}, "stream_options."),
    (FunctionDefinition, schema.FunctionTool, "name description parameters strict", refusals.TOOL,
     CHAT, lambda more: {"tools": [{"type": "function", "function": {"name": "x", **more}}]}, "tools[0].function."),
    (ChatCompletionFunctionToolParam, schema.Tool, "type function strict", refusals.TOOL,
     CHAT, lambda more: {"tools": [{"type": "function", "function": {"name": "x"}, **more}]}, "tools[0]."),
    (FunctionToolParam, schema.ResponsesTool, "type name description parameters strict", refusals.RESPONSES_TOOL,
     RESPONSES, lambda more: {"tools": [{**TOOL, **more}]}, "tools[0]."),
    (ChatCompletionNamedToolChoiceParam, schema.NamedToolChoice, "type function", {},
     CHAT, lambda more: {"tools": [{"type": "function", "function": {"name": "x"}}],
                         "tool_choice": {"type": "function", "function": {"name": "x"}, **more}}, "tool_choice."),
    (ToolChoiceFunctionParam, schema.ResponsesNamedTool, "type name", {},
     RESPONSES, lambda more: {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather", **more}},
     "tool_choice."),
    (ResponseFormatJSONSchema, schema.ResponseFormat, "type json_schema", {},
     CHAT, lambda more: {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}, **more}},
     "response_format."),
    (JSONSchema, schema.JsonSchemaFormat, "name description schema strict", {},
     CHAT, lambda more: {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}, **more}}},
     "response_format.json_schema."),
    (ResponseFormatTextJSONSchemaConfigParam, schema.ResponsesTextFormat, "type name description schema strict", {},
     RESPONSES, lambda more: {"text": {"format": {**FORM, **more}}}, "text.format."),
    (ResponseTextConfigParam, schema.ResponsesText, "format", refusals.TEXT,
     RESPONSES, lambda more: {"text": more}, "text."),
    (Reasoning, schema.Reasoning, "effort", refusals.REASONING,
     RESPONSES, lambda more: {"reasoning": more}, "reasoning."),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "part", "honoured", "refused", "endpoint", "body", "where"), PARTS)
def test_every_part_of_a_field_is_placed(
    null: Served, kind: type, part: type, honoured: str, refused: dict, endpoint: str, body: Any, where: str
) -> None:
    placed = {*honoured.split(), *refused}
    assert placed <= set(part.__struct_encode_fields__)
    param = re.split(r"\W", where)[0]
    for name in {"unheard_of"} | (set(get_type_hints(kind)) - placed):
        if part in schema.OPEN:
            answer = null.post(endpoint, {**BASE[endpoint], **body({name: {"x": 1}})})
            assert answer.status_code == 200, answer.text
            continue
        error = null.refused(endpoint, {**BASE[endpoint], **body({name: {"x": 1}})}, param=param)
        assert f"{where}{name}" in error["message"] and error["code"] == "unsupported_value"
        answer = null.post(endpoint, {**BASE[endpoint], **body({name: None})})
        assert answer.status_code == 200, answer.text
    assert null.post(endpoint, {**BASE[endpoint], **body({})}).status_code == 200


@pytest.mark.parametrize(
    ("kind", "placed"),
    [
        (ChatCompletionUserMessageParam, "role content name"),
        (ChatCompletionSystemMessageParam, "role content name"),
        (ChatCompletionDeveloperMessageParam, "role content name"),
        (ChatCompletionToolMessageParam, "role content tool_call_id"),
        (ChatCompletionAssistantMessageParam, "role content name refusal tool_calls audio function_call"),
    ],
)
def test_what_a_message_has_beside_goes_to_the_template(kind: type, placed: str) -> None:
    """What the SDK may have in store, and what models want that the API does not know."""
    new = {"unheard_of"} | (set(get_type_hints(kind)) - set(placed.split()))
    template = "{% for m in messages %}" + "".join(f"{{{{ m.get('{name}') }}}}" for name in new) + "{% endfor %}"
    with serving(source={"chat_template": template}, max_model_len=512) as served:
        answer = served.chat([{**HI[0], **dict.fromkeys(new, "seen")}], max_tokens=1, return_token_ids=True)
        assert served.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"] == "seen" * len(new)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_what_asks_for_something_else_is_refused_and_what_asks_for_nothing_is_not(null: Served, path: str) -> None:
    for name, refusal in REFUSED[path].items():
        error = null.refused(path, {**BASE[path], name: ASKING[name]}, param=name)
        assert error["code"] == "unsupported_value" and name in error["message"]
        for value in (None, *refusal.neutral):
            answer = null.post(path, {**BASE[path], name: value})
            assert answer.status_code == 200, (name, value, answer.text)
    for name in LABELS & set(BODIES[path].__struct_fields__):
        value = {"a": "b"} if name == "metadata" else "x"
        assert null.post(path, {**BASE[path], name: value}).status_code == 200
    if path == RESPONSES:
        assert null.post(path, {**BASE[path], "metadata": {"a": "b"}}).json()["metadata"] == {"a": "b"}
    for wrong in ({str(i): "x" for i in range(17)}, {"k" * 65: "x"}, {"k": "v" * 513}):
        null.refused(path, {**BASE[path], "metadata": wrong}, param="metadata")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        (RESPONSES, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        (RESPONSES, {"stream_options": {"include_obfuscation": False}}, "stream_options"),
        (RESPONSES, {"reasoning": {"summary": "auto"}}, "reasoning"),
        (RESPONSES, {"reasoning": {"generate_summary": "detailed"}}, "reasoning"),
        (RESPONSES, {"reasoning": {"context": "all_turns"}}, "reasoning"),
        (RESPONSES, {"reasoning": {"mode": "pro"}}, "reasoning"),
        (RESPONSES, {"tools": [{**TOOL, "defer_loading": True}]}, "tools"),
        (RESPONSES, {"tools": [{**TOOL, "async": True}]}, "tools"),
        (RESPONSES, {"tools": [{**TOOL, "async": False}]}, None),
        (RESPONSES, {"tools": [{**TOOL, "type": "web_search", "filters": {}}]}, "tools"),
        (RESPONSES, {"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]}, "tools"),
        (RESPONSES, {"tools": [{**TOOL, "output_schema": {}}]}, "tools"),
        # errors name what the client of this endpoint has written
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"max_output_tokens": 10**6}, "max_output_tokens"),
        (RESPONSES, {"top_logprobs": 21}, "top_logprobs"),
        (RESPONSES, {"input": "x" * 600}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": "x" * 600}]}, "input"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text"),
        (RESPONSES, {"text": {"format": {}}}, "text"),
        (RESPONSES, {"reasoning": {"effort": "much"}}, "reasoning"),
        (RESPONSES, {"tools": [{"name": "x"}]}, "tools"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 0, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 10**6}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 10**6}, "max_tokens"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        (CHAT, {"response_format": {}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        (CHAT, {"response_format": {"type": "text", "regex": "x"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
         "response_format"),
        (CHAT, {"chat_template_kwargs": {"unheard_of": 1}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"strftime_now": 1}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"namespace": 1}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"loop": 1}}, "chat_template_kwargs"),
        (CHAT, {"reasoning_effort": "much"}, "reasoning_effort"),
        (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools"),
        *((CHAT, {"tools": [{"type": "function", "function": {"name": "x", **inner}, **outer}]}, "tools")
          for asking in ({"defer_loading": True}, {"async": True}, {"allowed_callers": ["code_execution"]})
          for inner, outer in ((asking, {}), ({}, asking))),
        (CHAT, {"n": 0}, "n"), (CHAT, {"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        (COMPLETIONS, {"max_tokens": 10**6}, "max_tokens"), (COMPLETIONS, {"prompt": "x" * 600}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 600}, "prompt"), (COMPLETIONS, {"prompt": ["a"] * 10_000}, "prompt"),
        (COMPLETIONS, {"prompt": [[5]] * 257}, "prompt"), (COMPLETIONS, {"prompt": [[5], [259]]}, "prompt"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"), (COMPLETIONS, {"n": 2, "best_of": 1}, "best_of"),
        (COMPLETIONS, {"n": 2, "best_of": 3}, "best_of"), (COMPLETIONS, {"best_of": 0}, "best_of"),
        (COMPLETIONS, {"stop": ["a", ""]}, "stop"), (COMPLETIONS, {"stop": []}, None),
        (COMPLETIONS, {"stop_token_ids": [259]}, "stop_token_ids"),
    ],
)  # fmt: skip
def test_errors_name_the_field_as_written(null: Served, path: str, body: dict, param: str | None) -> None:
    body = {**BASE[path], **body}
    if param is None:
        assert null.post(path, body).status_code == 200
        return
    error = null.refused(path, body, param=param)
    if param.startswith("max_"):
        assert param in error["message"]
        assert not ({"max_tokens", "max_completion_tokens", "max_output_tokens"} - {param}) & set(
            error["message"].replace(",", " ").split()
        )


@pytest.mark.parametrize("key", ["1_0", "05", "٣", " 5", "5 ", "+5", "-5", "", "5.0", "0x5", "²", "9" * 5000])
def test_ids_in_logit_bias_are_plain_digits(null: Served, key: str) -> None:
    null.refused(COMPLETIONS, {"prompt": "a", "logit_bias": {key: 1}}, param="logit_bias")


def test_fields_that_are_unknown_or_of_another_endpoint_are_refused(null: Served) -> None:
    for path, fields in (
        (CHAT, {"prompt": "x", "max_output_tokens": 5, "input": "x", "suffix": "x", "instructions": "x"}),
        (COMPLETIONS, {"max_completion_tokens": 5, "messages": HI, "tools": [], "top_logprobs": 2}),
        (RESPONSES, {"max_tokens": 5, "messages": HI, "response_format": {"type": "json_object"}, "stop": "x", "n": 2}),
    ):
        for name, value in fields.items():
            assert null.refused(path, {**BASE[path], name: value}, param=name)["code"] == "unsupported_value"
            assert null.post(path, {**BASE[path], name: None}).status_code == 200
        for name in ("unheard_of", "bad_words", "allowed_token_ids", "truncate_prompt_tokens", "use_beam_search",
                     "logits_processors", "extra_body", ""):  # fmt: skip
            error = null.refused(path, {**BASE[path], name: [1]}, param=name)
            assert error["code"] == "unsupported_value" and "openapi" in error["message"]
            assert null.post(path, {**BASE[path], name: None}).status_code == 200
        habits = {"use_beam_search": False, "bad_words": [], "length_penalty": 1.0, "include_reasoning": True}
        assert null.post(path, {**BASE[path], **habits}).status_code == 200, "they ask for what happens anyway"
    null.refused("/tokenize", {"prompt": "a", "unheard_of": 1}, param="unheard_of")
    null.refused("/detokenize", {"tokens": [5], "unheard_of": 1}, param="unheard_of")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_structured_outputs_is_honoured_as_the_guided_fields_are(null: Served, path: str) -> None:
    def text(**wanted: Any) -> str:
        answer = null.post(path, {**BASE[path], "max_tokens": 40, "structured_outputs": wanted})
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        return choice["message"]["content"] if path == CHAT else choice["text"]

    assert text(choice=["yes"], disable_any_whitespace=False) == "yes" and text(regex="[a]{3}") == "aaa"
    assert text(json={"const": 17}) == text(json='{"const": 17}') == "17"
    assert text(grammar='start: "ab"') == "ab" and text(json_object=True).startswith("{")
    for wrong in (
        {}, {"json_object": False}, {"choice": ["a"], "regex": "a"}, {"choice": []}, {"json": {"type": "objekt"}},
        {"json": "{"}, {"regex": "(["}, {"regex": 5}, {"regex": "a", "disable_any_whitespace": True},
        {"regex": "a", "whitespace_pattern": " "}, {"structural_tag": {}}, {"regex": "a", "unheard_of": 1},
    ):  # fmt: skip
        null.refused(path, {**BASE[path], "structured_outputs": wrong}, param="structured_outputs")
    both = {**BASE[path], "structured_outputs": {"regex": "a"}, "guided_regex": "a"}
    null.refused(path, both, param="structured_outputs")
    null.refused(RESPONSES, {**BASE[RESPONSES], "structured_outputs": {"regex": "a"}}, param="structured_outputs")


def test_special_tokens_are_added_unless_unwanted() -> None:
    with serving(source={"add_bos": True}, max_model_len=128) as served:
        options = {"max_tokens": 1, "return_token_ids": True}
        with_bos, without = served.complete("hi", **options), served.complete("hi", add_special_tokens=False, **options)
        assert with_bos["prompt_token_ids"] == [1, *without["prompt_token_ids"]]
        several = served.complete(["hi", "ho"], add_special_tokens=False, **options)
        assert [len(choice["prompt_token_ids"]) for choice in several["choices"]] == [2, 2]
        assert several["choices"][0]["prompt_token_ids"] == without["prompt_token_ids"]
        served.refused("/tokenize", {"messages": HI, "add_special_tokens": True}, param="add_special_tokens")
        served.refused("/tokenize", {"prompt": "a", "add_generation_prompt": True}, param="add_generation_prompt")


CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "x"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"instructions": "x", "input": [*HI, {"role": "boss", "content": "x"}]}, "input", "input[1].role is "),
        ({"instructions": "x", "input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": 5}]},
         "input", "input[1].content is "),
        ({"input": [*HI, {**CALL_ITEM, "arguments": 5}]}, "input", "input[1]"),
        ({"input": [*HI, {**CALL_ITEM, "call_id": "", "arguments": "{}"}]}, "input", "input[1].call_id is "),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "reasoning alone"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema is missing"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text", "text.format.name is"),
    ],
)  # fmt: skip
def test_paths_in_errors_are_those_of_the_body(null: Served, body: dict, param: str, words: str) -> None:
    error = null.refused(RESPONSES, {**BASE[RESPONSES], **body}, param=param)
    assert words in error["message"] and "messages" not in error["message"]


def test_tool_choices_that_are_not_offered(null: Served) -> None:
    tools = [{"type": "function", "function": {"name": "x"}}]
    for choice in ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}, {"type": "function"}):
        error = null.refused(CHAT, {**BASE[CHAT], "tools": tools, "tool_choice": choice}, param="tool_choice")
        assert choice["type"] in error["message"]


def test_many_stop_tokens_are_no_more_than_the_vocabulary_has(null: Served) -> None:
    null.complete("a", max_tokens=3, ignore_eos=True, stop_token_ids=[5, 6] * 2048)
    body = schema.CompletionRequest(prompt="a", stop_token_ids=[6, 5, 6, 5])
    assert completion_params(body, {}, Limits()).stop_token_ids == (6, 5)
