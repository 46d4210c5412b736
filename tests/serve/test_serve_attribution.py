"""Responses: log-probabilities of texts and numbers of thought tokens are a matter of the tokens, however they came."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serve_drive import events_of, serving, tokenizer_with

from tandem.engine.output import OutputStream
from tandem.engine.streams import merge
from tandem.engine.text import Text
from tandem.request import Change, SamplingParams, TokenLogprobs
from tandem.serve.calls import HERMES, LLAMA, MISTRAL, TAGGED, CallFormat, Calls
from tandem.serve.items import ResponsesReply
from tandem.serve.parse import Reasoning
from tandem.serve.reply import Ask, Show

EOS = 2
CALL = ['{"na', 'me": "f", "argu', 'ments": {"x": 1}', "}"]


def shape_of(
    pieces: list[str], cuts: list[int], *, inside: bool = False, streamed: bool = False, form: CallFormat = HERMES
) -> tuple[list, int]:
    """(items of the answer, reasoning tokens), each piece one token, given in as many updates as the cuts make.

    A message is shown as its text and the tokens of its log-probabilities. A piece of one character is its bytes.
    """
    layout, ids, _ = tokenizer_with([piece for piece in pieces if len(piece) > 1])
    text = Text(layout, eos_ids=(EOS,))
    own = iter(ids)
    tokens = [token for piece in pieces for token in ([next(own)] if len(piece) > 1 else text.encode(piece))] + [EOS]
    output = OutputStream(SamplingParams(max_tokens=999, logprobs=0), text, [5])
    updates = []
    for place, token in enumerate(tokens):
        finish = "stop" if place == len(tokens) - 1 else None
        update = output.push(Change("", (token,), finish, [TokenLogprobs(token, -float(place), 1, ())]))
        assert update is not None
        if updates and place not in cuts:
            merge(updates[-1], update)
        else:
            updates.append(update)
    ask = Ask(SimpleNamespace(prompt_token_ids=[5]), 1, params=SamplingParams())  # type: ignore[arg-type]
    show = Show(logprobs=True, parser=lambda: Reasoning(Calls(form, ["f"]), inside=inside))
    reply = ResponsesReply([ask], "m", text, show, echoed={})

    async def answered() -> dict[str, Any]:
        async def come() -> Any:
            for update in updates:
                yield ask, update

        if not streamed:
            return json.loads(b"".join(await reply.whole(come())))
        chunks = [chunk async for chunk in reply.chunks(come())]
        events = list(events_of(iter(b"".join(chunks).decode().split("\n"))))
        _check_deltas(events)
        return events[-1]["response"]

    response = asyncio.run(answered())
    items = []
    for item in response["output"]:
        part = item.get("content", [{}])[0]
        if item["type"] == "message":
            items.append(("message", part["text"], [entry["token"] for entry in part["logprobs"]]))
        else:
            items.append((item["type"], part.get("text", item.get("arguments"))))
    assert response["usage"]["output_tokens"] == len(tokens)
    return items, response["usage"]["output_tokens_details"]["reasoning_tokens"]


def _check_deltas(events: list[dict]) -> None:
    """Log-probabilities of a text come with its deltas; behind them come tokens without text alone."""
    for done in (event for event in events if event["type"] == "response.output_text.done"):
        deltas = [e for e in events if e["type"] == "response.output_text.delta" and e["item_id"] == done["item_id"]]
        came = [entry for delta in deltas for entry in delta["logprobs"]]
        assert came == done["logprobs"][: len(came)]
        assert all(entry["token"] == "<eos>" for entry in done["logprobs"][len(came) :])


ANSWERS = [
    # marks and calls are neither; a token that brings characters of a part belongs to it, to the first if of two
    (["<thi", "nk>Hm", ". So", ".</th", "ink>", " Let", " me.", " <tool", "_call>", *CALL, "</tool_call>", " Do",
      "ne."],
     [("reasoning", "Hm. So."), ("message", "Let me.", [" Let", " me."]), ("function_call", '{"x": 1}'),
      ("message", "Done.", [" Do", "ne.", "<eos>"])], 3),
    (["<think>", "Hm", "</think>So", ": x<tool_call>", *CALL, "</tool_call>y", "es"],
     [("reasoning", "Hm"), ("message", "So: x", ["</think>So", ": x<tool_call>"]), ("function_call", '{"x": 1}'),
      ("message", "yes", ["</tool_call>y", "es", "<eos>"])], 1),
    (["<think>H", "m</think>a", "bc"], [("reasoning", "Hm"), ("message", "abc", ["bc", "<eos>"])], 2),
    # a call is what the answer ends in: the end belongs to no text
    (["Hm ", "\n", "<tool_call>", *CALL, "\n</tool", "_call>"],
     [("message", "Hm", ["Hm "]), ("function_call", '{"x": 1}')], 0),
    # what looks like a call and is none is text, characters of several tokens are
    (["x <tool", "_call>", " {no", " call} ", "👩", " é", "  "],
     [("message", "x <tool_call> {no call} 👩 é  ",
       ["x <tool", "_call>", " {no", " call} ", *["\ufffd"] * 4, " é", "  ", "<eos>"])], 0),
    # a thought that does not end
    (["<think>", "Hm", ", ", "so"], [("reasoning", "Hm, so")], 4),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "items", "num_reasoning"), ANSWERS)
def test_tokens_count_where_their_characters_stand(pieces: list[str], items: list, num_reasoning: int) -> None:
    for streamed in (False, True):
        for cuts in ([], list(range(99)), list(range(0, 99, 2))):
            assert shape_of(pieces, cuts, streamed=streamed) == (items, num_reasoning), cuts


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "</thi", "nk>", "<tool_call>", "</tool_call>", "<tool", "_call>",
                              "  ", "a", "👩", " b", "\n", "".join(CALL), *CALL]), max_size=12),
    st.sets(st.integers(1, 20)), st.booleans(), st.booleans(),
)  # fmt: skip
@example(["<think>", "a", "</think>", "b"], {3}, False, True)
@settings(deadline=None, max_examples=150)
def test_however_an_answer_is_cut_it_is_the_same(pieces: list[str], cuts: set, inside: bool, streamed: bool) -> None:
    whole = shape_of(pieces, [], inside=inside)
    assert shape_of(pieces, sorted(cuts), inside=inside, streamed=streamed) == whole


ROW = ['{"name": "f", "arg', 'uments": {}}', '{"name": "g", "arguments": {}}', ", ", "; ", "]", "[", "[TOOL_CALLS]",
       "[TOOL", "_CALLS] [", "f[ARGS]{}", "<tool_call><function=", "f>", "g>", "<parameter=x>1</parameter>",
       "</function></tool_", "call>", "</tool_call>", "  ", "a", "👩", "</think>"]  # fmt: skip


@given(
    st.sampled_from([MISTRAL, LLAMA, TAGGED]), st.lists(st.sampled_from(ROW), max_size=12), st.sets(st.integers(1, 20)),
    st.booleans(), st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_so_it_is_in_every_family(form: CallFormat, pieces: list, cuts: set, inside: bool, streamed: bool) -> None:
    whole = shape_of(pieces, [], inside=inside, form=form)
    assert shape_of(pieces, sorted(cuts), inside=inside, streamed=streamed, form=form) == whole


def test_over_http_with_a_pace_and_without() -> None:
    said = f"<think>{'thought ' * 5}</think>And so: <tool_call>{''.join(CALL)}</tool_call>"
    source = {"chat_template": "{# tools <tool_call> <think> #}x"}
    body = {"input": "hi", "temperature": 0, "tools": [{"type": "function", "name": "f"}],
            "include": ["message.output_text.logprobs"]}  # fmt: skip
    for step_s in (0.0, 0.002):
        with serving(source=source, script=said, max_model_len=1024, step_s=step_s) as served:
            for response in (served.post("/v1/responses", body).json(),
                             served.events("/v1/responses", body)[-1]["response"]):  # fmt: skip
                assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len("thought " * 5) - 1
                part = response["output"][1]["content"][0]
                assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "And so:"
