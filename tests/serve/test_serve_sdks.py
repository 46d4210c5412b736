"""Client libraries in wide use drive the server: openai, langchain-openai, litellm, instructor."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from serve_drive import Served, serving

HI = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}]


class Town(BaseModel):
    size: Literal[1, 2]
    kind: Literal["city", "village"]


@pytest.fixture(autouse=True)
def no_connection_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A library that keeps its client for ever is given ours, or told to close: else a socket is open at the end."""
    if "model" not in request.fixturenames:
        yield
        return
    port = int(request.getfixturevalue("model").url.rsplit(":", 1)[1])
    before = connections_to(port)
    yield
    assert connections_to(port) <= before


def connections_to(port: int) -> set[int]:
    """Our own ports of this process' connections to the port."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family == socket.AF_INET and connection.getpeername()[1] == port:
                    found.add(connection.getsockname()[1])
    return found


@pytest.fixture
def client(model: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{model.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.model
def test_openai_chat_stream_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )
    text = whole.choices[0].message.content
    assert text and whole.usage and whole.usage.completion_tokens == len(whole.choices[0].logprobs.content) <= 12
    assert whole._request_id == whole.id
    with client.chat.completions.stream(
        model="tiny", messages=HI, max_tokens=12, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text and final.usage.completion_tokens == whole.usage.completion_tokens
    several = client.chat.completions.create(model="tiny", messages=HI, max_tokens=4, n=3, seed=1, temperature=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]


@pytest.mark.model
def test_openai_tools(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        whole = client.chat.completions.create(
            model="tiny", messages=HI, tools=TOOLS, tool_choice=choice, max_tokens=60, temperature=0
        )
        [call] = whole.choices[0].message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        assert whole.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(
        model="tiny", messages=HI, tools=TOOLS, tool_choice="required", max_tokens=60, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds and message.tool_calls[0].function.name == "weather"
    answered = [
        *HI, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]  # fmt: skip
    assert client.chat.completions.create(model="tiny", messages=answered, tools=TOOLS, max_tokens=3)


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


@pytest.mark.model
def test_openai_strict_tools_are_free_to_be_called_and_bound_when_they_are(client: OpenAI) -> None:
    """pydantic_function_tool sends strict: true; the choice is the model's, the arguments' shape is not."""
    tool = openai.pydantic_function_tool(Weather)
    assert tool["function"]["strict"] is True
    options = {"model": "tiny", "messages": HI, "tools": [tool], "temperature": 0, "max_tokens": 90}
    plain = client.chat.completions.create(**{**options, "tools": []})
    free = client.chat.completions.parse(**{**options, "max_tokens": 400})
    assert plain.choices[0].message.content and free.choices[0].finish_reason in ("stop", "tool_calls")
    # beside a form, which this model does not follow by itself, it answers by a call or by the form
    formed = client.chat.completions.create(
        **options, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
    )
    message = formed.choices[0].message
    if message.tool_calls:
        assert Weather.model_validate_json(message.tool_calls[0].function.arguments)
    else:
        assert message.content in ("1", "2")


@pytest.mark.model
def test_openai_structured(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=HI, response_format=Town, max_tokens=40, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Town)
    plain = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=25, temperature=0, response_format={"type": "json_object"}
    )
    assert plain.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.model
def test_openai_completions_and_models(client: OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    done = client.completions.create(model="tiny", prompt=["Once upon", "The sky"], max_tokens=5, echo=True, logprobs=2)
    assert [c.text.startswith(p) for c, p in zip(done.choices, ["Once upon", "The sky"], strict=True)] == [True, True]
    streamed = "".join(
        c.choices[0].text
        for c in client.completions.create(model="tiny", prompt="One", max_tokens=5, temperature=0, stream=True)
    )
    assert (
        streamed == client.completions.create(model="tiny", prompt="One", max_tokens=5, temperature=0).choices[0].text
    )


@pytest.mark.model
def test_openai_responses(client: OpenAI) -> None:
    whole = client.responses.create(
        model="tiny", input="Name a colour.", instructions="Be brief.", max_output_tokens=10, temperature=0
    )
    assert whole.output_text and whole.usage.output_tokens <= 10
    with client.responses.stream(
        model="tiny", input="Name a colour.", instructions="Be brief.", max_output_tokens=10, temperature=0
    ) as stream:
        events = list(stream)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    parsed = client.responses.parse(
        model="tiny", input="A town.", text_format=Town, max_output_tokens=40, temperature=0
    )
    assert isinstance(parsed.output_parsed, Town)
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    with client.responses.stream(
        model="tiny", input="Weather?", tools=[tool], tool_choice="required", max_output_tokens=60, temperature=0
    ) as stream:
        final = stream.get_final_response() if list(stream) else None
    assert final.output[0].type == "function_call" and json.loads(final.output[0].arguments)["city"] in (
        "Paris",
        "Rome",
    )


@pytest.mark.model
async def test_openai_async_many(model: Served) -> None:
    async with AsyncOpenAI(base_url=f"{model.url}/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"Say {number}."}],
                max_tokens=5,
                temperature=0,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert all(await asyncio.gather(*map(one, range(6))))


def test_c13_the_sdk_raises_in_all_three() -> None:
    options = {"max_retries": 0, "api_key": "none"}
    with (
        serving(fail_at_prompt=70, max_model_len=512) as served,
        OpenAI(base_url=f"{served.url}/v1", **options) as client,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            list(client.completions.create(model="null", prompt="x" * 600, stream=True))
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.InternalServerError):
            list(client.completions.create(model="null", prompt=[70, 71], stream=True))
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        served.canary()
    arm = {"arm_at_prompt": [71, "raise_at", 5], "step_s": 0.02, "max_model_len": 512}
    with serving(**arm) as served, OpenAI(base_url=f"{served.url}/v1", **options) as client:
        stream = client.completions.create(
            model="null", prompt=[71, 71], max_tokens=99, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError):
            list(stream)


def test_c14_the_sdk_sees_no_keep_alive() -> None:
    from tandem.serve.options import ServeOptions

    with serving(ServeOptions(keep_alive=0.05), step_s=0.2, script="abcdefgh", max_model_len=512) as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            chunks = list(
                client.completions.create(
                    model="null", prompt="x", max_tokens=4, stream=True, extra_body={"ignore_eos": True}
                )
            )
        assert [bool(chunk.choices) for chunk in chunks] == [True] * 4


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_langchain(model: Served) -> None:
    chat_models = pytest.importorskip("langchain_openai")

    llm = chat_models.ChatOpenAI(
        base_url=f"{model.url}/v1",
        api_key="none",
        model="tiny",
        temperature=0,
        max_tokens=60,
        stream_usage=True,
        max_retries=0,
    )
    try:
        drive_langchain(llm)
    finally:
        llm.root_client.close()  # the library keeps it for other models of the same server


def drive_langchain(llm: Any) -> None:
    from langchain_core.messages import AIMessage, HumanMessage

    answer = llm.invoke("Say hello.", max_tokens=8)
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    chunks = list(llm.stream("Say hello.", max_tokens=8))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert any(chunk.usage_metadata for chunk in chunks)
    called = llm.bind_tools(TOOLS, tool_choice="weather").invoke("The weather in Rome?")
    assert called.tool_calls[0]["name"] == "weather" and called.tool_calls[0]["args"]["city"] in ("Paris", "Rome")
    assert llm.bind_tools([Weather], strict=True).invoke("Say hello.", max_tokens=8)
    talk = [("human", "Hi"), AIMessage("Hello.", name="agent"), HumanMessage("So?", name="ann")]
    assert llm.invoke(talk, max_tokens=3).content
    town = llm.with_structured_output(Town, method="json_schema").invoke("A town.")
    assert isinstance(town, Town)
    scored = llm.bind(logprobs=True, top_logprobs=1).invoke("Hi")
    assert scored.response_metadata["logprobs"]["content"]


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_litellm(model: Served, client: OpenAI) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network first
    litellm = pytest.importorskip("litellm")
    options = {
        "model": "openai/tiny",
        "api_base": f"{model.url}/v1",
        "api_key": "none",
        "client": client,
        "temperature": 0,
        "max_tokens": 40,
    }
    answer = litellm.completion(messages=HI, **{**options, "max_tokens": 8})
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0
    chunks = list(
        litellm.completion(
            messages=HI, stream=True, stream_options={"include_usage": True}, **{**options, "max_tokens": 8}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    called = litellm.completion(messages=HI, tools=TOOLS, tool_choice="required", **options)
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    shaped = litellm.completion(messages=HI, response_format=Town, **options)
    assert Town.model_validate_json(shaped.choices[0].message.content)
    assert len(litellm.completion(messages=HI, n=2, **{**options, "max_tokens": 4}).choices) == 2


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_instructor(model: Served) -> None:
    instructor = pytest.importorskip("instructor")
    with OpenAI(base_url=f"{model.url}/v1", api_key="none", max_retries=0) as client:
        for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
            town = instructor.from_openai(client, mode=mode).chat.completions.create(
                model="tiny", messages=HI, response_model=Town, max_retries=0, max_tokens=100, temperature=0
            )
            assert isinstance(town, Town)
