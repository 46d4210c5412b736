"""Which JSON types a tool's schema says of each of its parameters. It knows schemas; it does not know calls.

A client writes the schema, and may write it so that going over it never ends ($ref in a ring) or takes long (the same
part reached in many ways). So no part is gone over twice for a parameter, and no more than MAX_PARTS of them, nor
are more than MAX_LOOKS entries looked at, such as are no schemas or lead to known ones among them.
"""

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

KINDS: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
MAX_PARTS = 256
MAX_LOOKS = 2 * MAX_PARTS
MAX_STEPS = 32
_NONE: frozenset[str] = frozenset()


class ValueKinds:
    """Types by tool and parameter, found out when they are first asked for and kept: answers to a request share them.

    schemas   the parameters of each tool by its name.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._found: dict[tuple[str, str], frozenset[str]] = {}
        self._own: dict[int, frozenset[str]] = {}

    def of(self, tool: str, parameter: str) -> frozenset[str]:
        """The JSON types that are said of a parameter's value; none: nothing is."""
        root = self._schemas.get(tool, {})
        properties = root.get("properties")
        if not isinstance(properties, Mapping) or parameter not in properties:
            return _NONE
        where = tool, parameter
        if where not in self._found:
            self._found[where] = self._reached(properties[parameter], root)
        return self._found[where]

    def _reached(self, schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
        """Of a schema and of all that it is said to be any, one or all of, or refers to."""
        waiting, seen = deque([schema]), set[int]()
        kinds = set[str]()
        num_left = MAX_LOOKS
        while waiting and num_left and len(seen) < MAX_PARTS:
            num_left -= 1
            part = waiting.popleft()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            kinds |= self._own_kinds(part)
            for word in ("anyOf", "oneOf", "allOf"):
                inner = part.get(word)
                waiting.extend(islice(inner, max(0, num_left - len(waiting))) if isinstance(inner, list) else ())
            if "$ref" in part:
                waiting.append(_referred(part["$ref"], root))
        return frozenset(kinds)

    def _own_kinds(self, part: Mapping[str, Any]) -> frozenset[str]:
        """Kept by identity, which is safe: schemas live as long as this does. An enum may be long."""
        if id(part) not in self._own:
            self._own[id(part)] = frozenset(_said(part))
        return self._own[id(part)]


def _said(part: Mapping[str, Any]) -> set[str]:
    """By "type", else by "enum" and "const". A "type" that is no name, and no list of names, says nothing."""
    kind = part.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    if kind is not None:
        return set()
    values = part.get("enum")
    types = set(map(type, values)) if isinstance(values, list) else set()
    if "const" in part:
        types.add(type(part["const"]))
    return {KINDS.get(one, "string") for one in types}


def _referred(place: Any, root: Mapping[str, Any]) -> Any:
    """What a pointer (RFC 6901) into the tool's own schema points at; None if it is no such pointer."""
    if not isinstance(place, str) or not place.startswith("#"):
        return None
    found: Any = root
    for step in place.split("/", MAX_STEPS)[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(step)] if step.isdecimal() and len(step) < 6 and int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, Mapping) else None
    return found
