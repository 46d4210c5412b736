"""POST /v1/responses on the null device: items, events, what is refused; streamed and whole are the same."""

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serve_drive import Served, serving

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
EVENTS = TypeAdapter(ResponseStreamEvent)


def ask(served: Served, **fields) -> tuple[dict, list[dict]]:
    """(response, events of the same streamed); both fit the SDK's types and each other."""
    answer = served.post(PATH, {"input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    response = answer.json()
    Response.model_validate(response)
    events = served.events(PATH, {"input": "hi", **fields})
    for place, event in enumerate(events):
        EVENTS.validate_python(event)
        assert event["sequence_number"] == place
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"

    def shape(output: list[dict]) -> list[dict]:
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]

    assert shape(last["output"]) == shape(response["output"])
    assert last["output"] == [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert last["usage"]["output_tokens"] == response["usage"]["output_tokens"]
    return response, events


def test_a_message(null: Served) -> None:
    response, events = ask(null, max_output_tokens=5, temperature=1, metadata={"a": "b"}, top_logprobs=2)
    assert response["object"] == "response" and response["metadata"] == {"a": "b"} and response["store"] is False
    assert response["status"] in ("incomplete", "completed")
    part = response["output"][0]["content"][0]
    assert part["type"] == "output_text" and len(part["logprobs"]) == response["usage"]["output_tokens"]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    done = next(e for e in events if e["type"] == "response.output_text.done")
    assert "".join(e["delta"] for e in deltas) == done["text"]


def test_the_end_by_length_is_incomplete() -> None:
    with serving(script="a long answer", max_model_len=256) as served:
        response, events = ask(served, max_output_tokens=3)
        assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert events[-1]["type"] == "response.incomplete"
        whole, _ = ask(served, instructions="Be brief.", input=[{"role": "user", "content": "hi"}])
        assert whole["status"] == "completed" and whole["output"][0]["content"][0]["text"] == "a long answer"
        assert whole["instructions"] == "Be brief."


def test_tools_and_reasoning_become_items() -> None:
    template = "{% if tools %}<tool_call>{{ tools|tojson }}{% endif %}{{ messages|tojson }}<think>"
    with serving(script=f"Hm.</think>So: {CALL}", max_model_len=2048, source={"chat_template": template}) as served:
        response, events = ask(served, tools=[TOOL], tool_choice="auto")
        assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
        reasoning, message, call = response["output"]
        assert reasoning["content"][0]["text"] == "Hm." and message["content"][0]["text"] == "So:"
        assert call["name"] == "weather" and json.loads(call["arguments"]) == {"city": "Rome"}
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert "response.function_call_arguments.delta" in {e["type"] for e in events}
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        again = served.post(
            PATH, {"input": [{"role": "user", "content": "hi"}, *response["output"], output], "tools": [TOOL]}
        )
        assert again.status_code == 200, again.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"store": True}, "store"),
        ({"background": True}, "background"), ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"), ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"), ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input"), ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"), ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"max_tool_calls": 3}, "max_tool_calls"), ({"input": [{"role": "boss", "content": "x"}]}, "input"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_needs_state_or_is_not_offered(null: Served, body: dict, param: str) -> None:
    null.refused(PATH, {"input": "hi", "max_output_tokens": 1, **body}, param=param)
    null.refused(PATH, {"input": "hi", "stream": True, "max_output_tokens": 1, **body}, param=param)


def test_explain_comes_with_the_last_event(null: Served) -> None:
    response, events = ask(null, max_output_tokens=2, explain=True)
    for account in (response["explain"], events[-1]["response"]["explain"]):
        assert sum(account["parts_s"].values()) == pytest.approx(account["total_s"], rel=0.01)
