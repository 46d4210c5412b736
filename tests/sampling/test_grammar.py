"""Grammars: masks that keep an answer inside, refusals that come before anything is scheduled."""

import json
import sys
import time

import pytest
import torch
from grammar_drive import (
    EOS,
    NUM_LOGITS,
    TOKENIZER,
    accepts,
    allowed_ids,
    compiled,
    wait,
)

from tandem.errors import RequestError
from tandem.plan import Arrival
from tandem.request import Constraint, SamplingParams
from tandem.sampling.rows import SamplerRows
from tandem.sampling.sample import sample

pytestmark = pytest.mark.usefixtures("nothing_is_left")

SCHEMA = json.dumps({
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "ü"]}},
    "required": ["a", "b"], "additionalProperties": False,
})  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", '{"a": [1, {"b": null}]}', "[1]"),
        ("json_schema", SCHEMA, '{"a": 12, "b": "ü"}', '{"a": "12"}'),
        ("json_schema", '{"type":"integer","maximum":20000000000}', "19999999999", "20000000001"),
        ("regex", "[0-9]{2,3}", "123", "1"),
        ("choice", '["yes", "no", "a\\"b\\n"]', 'a"b\n', "maybe"),
        ("grammar", 'start: "a" start "b" | "c"', "aacbb", "aacb"),
    ],
)
def test_masks_keep_the_answer_inside(kind, text, good, bad):
    assert accepts(compiled(kind, text), good)
    assert not accepts(compiled(kind, text), bad)


def test_random_sampling_under_a_schema_gives_its_documents():
    """Ten answers of a model that says anything, drawn under the mask, parse and fit; padding ids never come."""
    params = SamplingParams(temperature=1.0, constraint=Constraint("json_schema", SCHEMA))
    for number in range(10):
        mask, tokens = compiled("json_schema", SCHEMA), []
        rows = SamplerRows(1, NUM_LOGITS, "cpu")
        rows.arrive(Arrival(str(number), 0, [1], 1, params, eos=(EOS,)))
        generator = torch.Generator().manual_seed(number)
        while not tokens or tokens[-1] != EOS:
            logits = torch.randn(1, NUM_LOGITS, generator=generator)
            logits[0, NUM_LOGITS - 10 :] = 50.0
            logits[0, EOS] = 9.0  # whitespace and digits may otherwise go on for long
            logits[0, [t for c in '},"' for t in TOKENIZER.encode(c).ids]] = 5.0
            tokens.append(sample(logits, rows, [0], [1 + len(tokens)], [(0, wait(mask))]).ids_R.item())
            mask.accept(tokens[-1:])
            assert len(tokens) < 400
        document = json.loads(TOKENIZER.decode(tokens))
        assert set(document) == {"a", "b"} and isinstance(document["a"], int) and document["b"] in ("x", "ü")


def deep(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + '{"type":"string"}' + "}}" * levels


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"objekt"}'),
        ("json_schema", '{"$ref":"#"}'),
        ("json_schema", '{"type":"string","pattern":"(["}'),
        ("json_schema", deep(5000)),
        ("json_schema", deep(40)),
        ("json_schema", '{"type":"array","uniqueItems":true}'),
        ("json_schema", '{"type":"integer","minimum":5,"maximum":3}'),
        ("json_schema", "[1"),
        ("json_schema", '"text"'),
        ("regex", "(["),
        ("regex", r"a\bb"),
        ("choice", "[]"),
        ("choice", '["a", 1]'),
        ("choice", "[" * 100_000),
        ("choice", '["\\ud800"]'),
        ("grammar", "start: nowhere"),
        ("grammar", "@@@"),
        ("nonsense", ""),
        ("regex", "a" * 300_000),
    ],
    ids=lambda value: value[:24],
)
def test_c26_bad_grammars_are_refused(kind, text):
    """C26: a RequestError that says why, in bounded time; never a crash, never free text."""
    began_s = time.perf_counter()
    with pytest.raises(RequestError, match="refused") as caught:
        compiled(kind, text)
    assert caught.value.param == "response_format" and len(str(caught.value)) < 600
    assert time.perf_counter() - began_s < 5


LAX = '{"type":"array","items":{"type":"integer"},"uniqueItems":true,"x-guidance":{"lenient":true}}'
ESCAPED = LAX.replace("x-g", "\\u0078-g").replace("{", '{"maximum":' + "1" * 5000 + ",", 1)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", LAX, "x-guidance"),
        ("grammar", f"start: %json {LAX}", "x-guidance"),
        ("grammar", f'start: "a" x\nx: %json\n {LAX}', "x-guidance"),
        ("grammar", f"start: %json {ESCAPED}", "x-guidance"),
        ("grammar", f' {{"grammars": [{{"json_schema": {LAX}}}]}}', "must be a grammar in Lark"),
        ("grammar", f"start: %json {deep(40)}", "nested more than 64"),
        ("grammar", f"start: %json {deep(5000)}", "nested"),
        ("grammar", 'start: r\n  ?r[temperature=5]: "c"', "the attribute temperature"),
        ("grammar", 'start[lazy, capture]: "c"', "the attribute capture"),
        ("grammar", 'start[stop="]:", stop_capture="x"]: /.*/', "the attribute stop_capture"),
    ],
)
def test_what_would_not_be_enforced_is_refused(kind, text, words):
    """A schema cannot ask for laxness, wherever it stands; an attribute of a rule has an effect or is refused."""
    with pytest.raises(RequestError, match=words):
        compiled(kind, text)


@pytest.mark.parametrize("under", ["properties", "$defs", "patternProperties"])
def test_a_name_is_no_keyword(under):
    """A property of that name is one like others; beneath it keywords count again."""
    named = {"type": "object", under: {"x-guidance": {"type": "integer"}}}
    assert accepts(compiled("json_schema", json.dumps(named)), '{"x-guidance": 1}')
    named[under]["x-guidance"] = {"type": "array", "x-guidance": {"lenient": True}}
    for kind, text in (("json_schema", "{}"), ("grammar", "start: %json {}")):
        with pytest.raises(RequestError, match="x-guidance"):
            compiled(kind, text.replace("{}", json.dumps(named)))


def test_attributes_that_have_an_effect_are_taken():
    assert accepts(compiled("grammar", 'start: r "[temperature=5]:"\nr[max_tokens=2]: /a*/'), "aa[temperature=5]:")


def test_a_schema_is_refused_without_the_grammar_around_it():
    with pytest.raises(RequestError) as caught:
        compiled("grammar", 'start: "inner" c\nc: %json {"type": "array", "uniqueItems": true}')
    assert 'failed to compile JSON schema: Unimplemented keys: ["uniqueItems"]' in str(caught.value)
    assert "inner" not in str(caught.value) and "start" not in str(caught.value)


def test_c26_recursive_schemas_are_fine():
    assert accepts(compiled("json_schema", '{"type":"object","properties":{"a":{"$ref":"#"}}}'), '{"a":{"a":{}}}')


def test_without_the_library_requests_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="not installed") as caught:
        compiled("regex", "a")
    assert caught.value.hint.startswith('pip install -e ".[serve]"'), "as the docs say"


def test_a_token_outside_the_grammar_fails_the_request():
    mask = compiled("regex", "ab")
    mask.accept(TOKENIZER.encode("b").ids)
    with pytest.raises(RequestError, match="answer left it"):
        wait(mask)


def test_accept_before_the_mask_is_ready_keeps_the_order():
    mask = compiled("regex", "a{50}b")
    token = TOKENIZER.encode("a").ids
    for _ in range(50):
        mask.accept(token)
    assert allowed_ids(mask) == set(TOKENIZER.encode("b").ids)
