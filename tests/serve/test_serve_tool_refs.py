"""Schemas of strict and forced tools that refer to parts of themselves: # is the root that the client wrote."""

import json
from typing import Any

import pytest
from serve_drive import Served, serving
from test_serve_text import tool_answers
from test_serve_tools import CHAT, HI, TEMPLATES

from tandem.serve.call_grammar import CallGrammar
from tandem.serve.calls import HERMES, LLAMA, MISTRAL
from tandem.serve.schema import FunctionTool

FORMS = {"hermes": HERMES, "mistral": MISTRAL, "mistral by name": MISTRAL, "llama": LLAMA}
TEXT = {"type": "string"}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
            **more}  # fmt: skip


def one(ref: str, **more: Any) -> dict[str, Any]:
    return closed({"x": {"$ref": ref}}, **more)


PLACE = one("#/$defs/Place", **{"$defs": {"Place": closed({"city": TEXT})}})
LIST = closed({"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})
REFERRING = {  # schema, arguments that fit it, some that do not
    "$defs": (PLACE, {"x": {"city": "Oslo"}}, {"x": {"town": "Oslo"}}),
    "definitions": (one("#/definitions/P", definitions={"P": TEXT}), {"x": "a"}, {"x": 1}),
    "recursive": (LIST, {"v": 1, "next": {"v": 2, "next": None}}, {"v": 1, "next": {"name": "f", "arguments": {}}}),
    "ring of parts": (
        one("#/$defs/a", **{"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}),
        {"x": [[], [[]]]}, {"x": [1]},
    ),
    "beside": (one("#/properties/y") | {"properties": {"x": {"$ref": "#/properties/y"}, "y": TEXT}},
               {"x": "a", "y": "b"}, {"x": 1, "y": "b"}),
    "escapes": (one("#/$defs/a~1b%25~0%20c", **{"$defs": {"a/b%~ c": TEXT}}), {"x": "a"}, {"x": 1}),
    "list": (one("#/$defs/P/anyOf/1", **{"$defs": {"P": {"anyOf": [{"type": "null"}, TEXT]}}}), {"x": "a"}, {"x": 1}),
    "$anchor": (one("#p", **{"$defs": {"P": {"$anchor": "p", **TEXT}}}), {"x": "a"}, {"x": 1}),
    "$id": (one("http://x.y/z#/$defs/P", **{"$id": "http://x.y/z", "$defs": {"P": TEXT}}), {"x": "a"}, {"x": 1}),
    "$id of a part": (one("q", **{"$defs": {"P": {"$id": "q", **TEXT}}}), {"x": "a"}, {"x": 1}),
    "siblings": (
        closed({"x": {"$ref": "#/$defs/P", "minLength": 2}}, **{"$defs": {"P": TEXT}}), {"x": "ab"}, {"x": "a"},
    ),
    "root": ({"$ref": "#/$defs/P", "$defs": {"P": closed({"a": TEXT})}}, {"a": "b"}, {"a": 1}),
    "names": (closed({"$ref": TEXT, "$defs": {"$ref": "#/properties/$ref"}}), {"$ref": "a", "$defs": "b"},
              {"$ref": "a", "$defs": 1}),
    "values": (closed({"x": {"enum": [{"$ref": "#/a"}], "default": {"$ref": "#/b"}, "examples": [{"$ref": "#/c"}]},
                       "y": {"const": {"$ref": "#"}}}),
               {"x": {"$ref": "#/a"}, "y": {"$ref": "#"}}, {"x": {"$ref": "#/a"}, "y": {"$ref": "#/d"}}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFERRING)
@pytest.mark.parametrize("family", FORMS)
def test_what_a_schema_refers_to_is_its_own(family: str, what: str, null: Served) -> None:
    """Forced and beside free tools; two tools with the same names of parts hold each to its own."""
    llguidance = pytest.importorskip("llguidance")
    text = null.service.engine.text
    tokenizer = llguidance.LLTokenizer(null.service.engine.card.tokenizer_json, n_vocab=259, eos_token=[2])
    schema, good, bad = REFERRING[what]
    form, by_name = FORMS[family], "by name" in family
    other = closed({"x": {"$ref": "#/$defs/P"}}, **{"$id": "http://x.y/z", "$defs": {"P": {"type": "boolean"}}})
    tools = [FunctionTool("o", parameters=other), FunctionTool("f", parameters=schema), FunctionTool("any")]
    grammars = CallGrammar(form, tools, text.special_id, by_name=by_name, free_tools=["any"])

    def call(name: str, arguments: Any) -> str:
        if by_name:
            return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"
        said = json.dumps({"name": name, form.arguments_key: arguments})
        return f"[TOOL_CALLS][{said}]" if form is MISTRAL else f"{form.opening}{said}{form.closing}"

    for constraint in (grammars.forced(), grammars.free(single=False), grammars.formed(json.dumps(LIST), single=True)):
        grammar = llguidance.LLMatcher.grammar_from_lark(constraint.text)

        def fits(name: str, arguments: Any, grammar: str = grammar) -> bool:
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            ids = text.encode(call(name, arguments), add_special_tokens=False)
            return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

        assert fits("f", good) and not fits("f", bad)
        assert fits("o", {"x": True}) and not fits("o", {"x": "a"}) and not fits("o", good)
        assert fits("any", good) and fits("any", bad)


@pytest.mark.parametrize("family", FORMS)
def test_nested_and_recursive_schemas_are_enforced(family: str) -> None:
    """As pydantic writes nested models, and lists that hold lists of their own kind."""
    for schema, said in ((PLACE, {"x": {"city": "Oslo"}}), (LIST, REFERRING["recursive"][1])):
        form, function = FORMS[family], {"name": "f", "parameters": schema, "strict": True}
        script = json.dumps({"name": "f", form.arguments_key: said})
        script = f"{form.opening}{f'[{script}]' if form is MISTRAL else script}{form.closing}"
        if "by name" in family:
            script = f"[TOOL_CALLS]f[ARGS]{json.dumps(said)}"
        with serving(script=script, source={"chat_template": TEMPLATES[family]}, max_model_len=2048) as served:
            for strict, choice in ((True, "auto"), (False, "required")):
                tools = [{"type": "function", "function": {**function, "strict": strict}}]
                answer, _ = tool_answers(served, tools=tools, tool_choice=choice)
                assert answer["finish_reason"] == "tool_calls"
                [call] = answer["message"]["tool_calls"]
                assert call["function"] == {"name": "f", "arguments": json.dumps(said)}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (one("#/$defs/Q", **{"$defs": {"P": TEXT}}), ("'/$defs/Q' does not exist", "#/$defs/NAME")),
        (one("#q", **{"$defs": {"P": {"$anchor": "p"}}}), ("does not exist", "#/$defs/NAME")),
        (one("http://x.y/z"), ("'http://x.y/z'", "nothing is fetched")),
        (one("other.json#/a"), ("other.json", "nothing is fetched")),
        (closed({"x": {"$dynamicRef": "#p"}}), ('Unimplemented keys: ["$dynamicRef"]',)),
        (closed({"x": {"$ref": 5}}), ("$ref must be a string",)),
        (closed({"x": False}), ("Unsatisfiable schema",)),
        (closed({"x": TEXT}, **{"$defs": {"P": {"x-guidance": {"lenient": True}}}}), ("x-guidance",)),
        ({"anyOf": [{"properties": {"a": json.loads('{"anyOf": [' * 31 + "{}" + "]}" * 31)}}]}, ("64 deep",)),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_the_reason(schema: dict[str, Any], words: tuple[str, ...]) -> None:
    function = {"name": "f", "parameters": schema}
    with serving(max_model_len=2048) as served:
        for strict, choice in ((True, "auto"), (False, "required")):
            tools = [{"type": "function", "function": {**function, "strict": strict}}]
            body = {"messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 5}
            error = served.refused(CHAT, body, param="tools")
            assert all(word in error["message"] for word in words), error["message"]
            assert "call_0" not in error["message"] and "start:" not in error["message"], "our own grammar"
        free = [{"type": "function", "function": function}]
        assert served.post(CHAT, {"messages": HI, "tools": free, "max_tokens": 1}).status_code == 200


def test_levels_around_a_schema_do_not_count() -> None:
    """64 levels are taken, as in response_format."""
    with serving(max_model_len=2048) as served:
        for levels, status in ((31, 200), (32, 400)):
            schema = json.loads('{"anyOf": [' * levels + '{"type": "object"}' + "]}" * levels)
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
            for fields in ({"response_format": form}, {"tools": tools}, {"tools": tools, "tool_choice": "required"}):
                body = {"messages": HI, "max_tokens": 1, **fields}
                answer = served.post(CHAT, body)
                assert answer.status_code == status, (levels, fields, answer.text)
