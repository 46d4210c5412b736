"""Bodies that are nested too deep are refused by name, in every route and in a batch; counting levels is quick."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_drive import Served

from tandem.cli import main
from tandem.serve.nesting import MAX_DEPTH, depth_of

JSON = {"content-type": "application/json"}
TEXT = st.text('[]{}"\\a/é', max_size=6)
VALUES = st.recursive(
    TEXT | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


def levels(value: object) -> int:
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    return 0 if inner is None else 1 + max(map(levels, inner), default=0)


@given(VALUES, st.booleans())
@settings(max_examples=150, deadline=None)
def test_levels_are_counted_outside_strings(value: object, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert depth_of(raw, 0) == levels(value) and depth_of(raw) >= levels(value)


@pytest.mark.parametrize("raw", [b"[" + b"[]," * 1_300_000 + b"[]]", b'{"a":"' + b'\\"[{' * 1_000_000 + b'"}'])
def test_four_megabytes_hold_nobody_up(raw: bytes) -> None:
    began_s = time.thread_time()
    assert depth_of(raw) <= 2
    assert time.thread_time() - began_s < 0.3


def nested(num_levels: int) -> str:
    return "[" * num_levels + "]" * num_levels


@pytest.mark.parametrize("num_levels", [MAX_DEPTH, 260, 950, 100_000])
def test_a_deep_body_is_refused_by_every_route(null: Served, num_levels: int) -> None:
    """Wherever it is, be it a field that is given back or one that nobody knows."""
    function = '{"type": "function", "name": "f", "parameters": {"type": "object", "x": DEEP}}'
    for path, body in (
        ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "x": DEEP}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a", "x": DEEP}]}'),
        ("/v1/responses", f'{{"input": "a", "tools": [{function}]}}'),
        ("/tokenize", '{"prompt": "a", "x": DEEP}'),
        ("/detokenize", '{"tokens": [9], "x": DEEP}'),
    ):
        error = null.refused(path, None, content=body.replace("DEEP", nested(num_levels)), headers=JSON)
        assert "the body is nested too deep; the limit is 100 levels" in error["message"], path


def test_what_is_not_that_deep_is_answered_and_given_back(null: Served) -> None:
    schema = {"type": "object", "properties": {}, "x-deep": json.loads(nested(MAX_DEPTH - 5))}
    tools = [{"type": "function", "name": "f", "parameters": schema, "strict": False}]
    answer = null.post(
        "/v1/responses", {"input": "[[" * 60, "tools": tools, "max_output_tokens": 1, "tool_choice": "none"}
    )
    assert answer.status_code == 200 and answer.json()["tools"][0]["parameters"] == schema, answer.text


def test_a_deep_line_of_a_batch_is_an_error_line(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    function = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": DEEP}}}'
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 2, "tools": [{function}]}}'
    line = f'{{"custom_id": "NAME", "url": "/v1/chat/completions", "body": {body}}}\n'
    source.write_text("".join(line.replace("DEEP", nested(n)).replace("NAME", str(n)) for n in (300, 2000, 95)))
    assert main(["batch", str(source), "-o", str(target), "--device", "null"]) == 0
    found = [json.loads(answer) for answer in target.read_text().splitlines()]
    told = {answer["id"]: answer["error"]["message"] if answer["error"] else answer["response"] for answer in found}
    assert told["batch_req_1"] == "line 1: body is nested too deep; the limit is 100 levels."
    assert told["batch_req_2"].startswith("line 2: ") and told["batch_req_3"]["status_code"] == 200
