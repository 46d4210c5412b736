"""Types of values between tags by the schema: what going over a client's schema may take."""

import time

import pytest
from test_parse import calls_of, tagged

from tandem.serve.calls import TAGGED
from tandem.serve.value_kinds import ValueKinds


@pytest.mark.parametrize("number", [10, 30, 3000])
def test_going_over_a_schema_takes_as_long_as_it_is_large(number: int) -> None:
    """However often its parts refer to each other: a client writes it, and the event loop waits."""
    me = {"$ref": "#/properties/x"}
    rings = {
        "x": {"anyOf": [dict(me) for _ in range(number)]},
        "y": {"anyOf": [{"allOf": [{"oneOf": [dict(me)] * number}] * number}] * number},
    }
    kinds = ValueKinds({"time": {"properties": rings}})
    start_s = time.thread_time()
    for key in rings:
        assert calls_of(TAGGED, tagged("time", **{key: "3"}), kinds=kinds) == ("", [("time", f'{{"{key}": "3"}}')])
    assert time.thread_time() - start_s < 0.25


def test_types_are_found_out_once_for_all_answers_to_a_request() -> None:
    looks = []

    class Watched(dict):
        def get(self, name: str, default: object = None) -> object:
            looks.append(name)
            return super().get(name, default)

    kinds = ValueKinds({"time": {"properties": {"x": Watched(type="integer", enum=[3] * 1000)}}})
    for _ in range(50):
        assert calls_of(TAGGED, tagged("time", x="3"), kinds=kinds)[1] == [("time", '{"x": 3}')]
    assert looks.count("type") == 1


def test_no_more_than_so_many_parts_of_a_schema_are_gone_over_for_a_value() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(400)} | {"d400": {"type": "integer"}}
    root = {"properties": {"near": {"$ref": "#/$defs/d200"}, "far": {"$ref": "#/$defs/d0"}}, "$defs": chain}
    kinds = ValueKinds({"f": root, "g": {"properties": 5}})
    assert kinds.of("f", "near") == {"integer"} and not kinds.of("f", "far")
    assert not kinds.of("g", "x") and not kinds.of("f", "other") and not kinds.of("unknown", "x")


def test_entries_that_are_no_schemas_count_too() -> None:
    """Lists of numbers below one $ref took 21 ms of the event loop for each parameter."""
    inner = [{word: [1] * 110 for word in ("anyOf", "oneOf", "allOf")} for _ in range(250)]
    properties = {f"p{place}": {"$ref": "#/d"} for place in range(50)}
    kinds = ValueKinds({"f": {"properties": properties, "d": {"anyOf": inner}}})
    start_s = time.thread_time()
    assert not any(kinds.of("f", name) for name in properties)
    assert time.thread_time() - start_s < 0.25


def test_a_union_of_many_ways_to_the_same_parts_is_gone_over_wholly() -> None:
    kinds_of_json = [{"type": "integer"}, {"type": "array", "items": {}}, {"type": "null"}, {"type": "boolean"}]
    parts = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(10)]} for i in range(10)}
    parts |= {f"d{i}": kind for i, kind in enumerate(kinds_of_json, 6)}
    kinds = ValueKinds({"f": {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": parts}})
    assert kinds.of("f", "x") == {"integer", "array", "null", "boolean"}
