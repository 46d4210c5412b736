"""From a body's bytes to its structure, strictly. It knows structures' fields; it does not know what they mean.

Fields, and parts of fields, that a structure does not have are refused by name: whoever sends one counts on it. null is
no such demand. In tools and tool_choice (schema.OPEN) what is unknown is passed over, and where a structure holds plain
JSON (messages, schemas, values for the template) any name may stand.
"""

import re
from collections.abc import Iterator
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw, Struct

from tandem.errors import RequestError
from tandem.serve.nesting import MAX_DEPTH, SMALL_BYTES, check_build, depth_of, too_deep
from tandem.serve.refusals import NEUTRAL
from tandem.serve.schema import MISPLACED, OPEN

Body = TypeVar("Body")


def decode(raw: bytes, kind: type[Body]) -> Body:
    """Decode one body of at most MAX_DEPTH levels; null at the top level of an object counts as not given. Raises
    RequestError, for fields and parts that are unknown or another endpoint's too.

    A large body is looked at before: one that would make too many objects is refused. See nesting.py.
    """
    if len(raw) > SMALL_BYTES:
        check_build(raw)
    try:
        strict: Any = _strict(kind)  # type: ignore[arg-type]
        body: Body = msgspec.json.decode(raw, type=strict)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        body = _leniently_decoded(raw, kind)
    if len(raw) <= SMALL_BYTES and depth_of(raw) > MAX_DEPTH:
        raise too_deep()
    return body


@cache
def _strict(kind: type[Struct]) -> Any:
    """The same structure, which takes no field that it does not have, be it null; nor do the structures in it."""
    hints = get_type_hints(kind)
    inner = [
        (field.name, _strict_type(hints[field.name]), msgspec.field(default=field.default, name=field.encode_name))
        for field in msgspec.structs.fields(kind)
        if _strict_type(hints[field.name]) != hints[field.name]
    ]
    return msgspec.defstruct(kind.__name__, inner, bases=(kind,), kw_only=True, forbid_unknown_fields=True)


def _strict_type(hint: Any) -> Any:
    """The type with strict structures in place of those that it speaks of, but for open ones."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint if hint in OPEN else _strict(hint)
    if get_origin(hint) in (Union, UnionType):
        return reduce(or_, map(_strict_type, get_args(hint)))
    return hint


def _leniently_decoded(raw: bytes, kind: type[Body]) -> Body:
    """What is not as it should be: what is unknown and asks for nothing is passed over, all else is refused."""
    try:
        body = msgspec.json.decode(raw, type=kind)
        unknown = next(_unknown_in(body, Raw(raw)), None)
    except msgspec.ValidationError as error:
        path = re.search(r"`\$\.?([^`]*)`$", str(error))
        param = re.split(r"[.\[]", path.group(1))[0] if path and path.group(1) else None
        missing = re.search(r"missing required field `(\w+)`", str(error)) if param is None else None
        raise RequestError(
            f"the body is not as it should be: {error}.",
            param=missing.group(1) if missing else param,
            code="invalid_type", hint=_values_of(kind, param) if "enum value" in str(error) else None,
        ) from None  # fmt: skip
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if isinstance(error, RecursionError):
            raise too_deep() from None
        raise RequestError(f"the body is no valid JSON: {error}.", code="invalid_json") from None
    if unknown is None:
        return body
    if depth_of(raw) > MAX_DEPTH:
        raise too_deep()
    is_misplaced = unknown.name in MISPLACED.get(kind, ()) and not unknown.path
    hint = "it belongs to another one of /v1/chat/completions, /v1/completions and /v1/responses."
    raise RequestError(
        f"{unknown.path + unknown.name!r:.80} is no field of this endpoint.",
        param=re.split(r"[.\[]", unknown.path)[0] if unknown.path else unknown.name[:80], code="unsupported_value",
        hint=hint if is_misplaced else "leave it out; /openapi.json lists the fields.",
    )  # fmt: skip


def _values_of(kind: type, name: str | None) -> str | None:
    """What a field may be, if it is one of some words."""
    hint = get_type_hints(kind).get(name or "")
    parts = get_args(hint)
    words = [repr(word) for part in parts if get_origin(part) is Literal for word in get_args(part)]
    is_open = any(isinstance(part, type) and issubclass(part, Struct) for part in parts)
    return f"it is one of {', '.join(words)}{', or an object' if is_open else ''}." if words else None


class _Unknown(NamedTuple):
    """A name that its structure does not have. path: what stands before it, up to the dot."""

    name: str
    path: str = ""


def _unknown_in(part: Any, raw: Raw, path: str = "") -> Iterator[_Unknown]:
    """Names that a structure and those in it do not have, with values that ask for something."""
    if not isinstance(part, Struct) or isinstance(part, OPEN):
        return
    names = dict(zip(part.__struct_encode_fields__, part.__struct_fields__, strict=True))
    for name, text in msgspec.json.decode(raw, type=dict[str, Raw]).items():
        if name in names:
            yield from _unknown_in(getattr(part, names[name]), text, f"{path}{name}.")
        elif bytes(text) not in (b"null", *(NEUTRAL.get(name, ()) if not path else ())):
            yield _Unknown(name, path)
