"""A constraint in llguidance's notation, or the reason why it is refused. It follows no grammar.

What llguidance cannot enforce it refuses, and so does this: a request is answered by its grammar or not at all.
"""

import json
import re
from typing import Any

from tandem.sampling.grammar_limits import GrammarLimits

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")


HINT = "\nhint: "
SIMPLER = "make the grammar simpler: smaller repetition counts, fewer alternatives, no rule that matches in many ways."

_LAXNESS = "x-guidance"  # with it a schema asks llguidance to leave out what it cannot enforce
_NAMING = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_EFFECTLESS = re.compile(r"(?:^|,)\s*(temperature|capture|stop_capture)\s*(?=[=,\]])")
_HEAD = re.compile(r"[?!]*[\w-]+[ \t]*\[([^:]*)")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/')


class UnfitError(Exception):
    """A grammar is refused, or cannot be followed any further; the reason, without a full stop."""


class LimitError(UnfitError):
    """The reason is a limit; str() brings a hint behind it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}{HINT}{SIMPLER}")


def grammar_text(llguidance: Any, kind: str, text: str, limits: GrammarLimits) -> str:
    """Raises UnfitError: unknown kind, too long, malformed, too deep."""
    if kind not in KINDS:
        raise UnfitError(f"there is no such kind; the kinds are {', '.join(KINDS)}")
    try:
        num_bytes = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise UnfitError("it holds a lone surrogate, which is no character") from error
    if num_bytes > limits.max_text_bytes:
        raise UnfitError(f"it has {num_bytes} bytes; the limit is {limits.max_text_bytes}")
    matcher = llguidance.LLMatcher
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "grammar":
        _check_lark(text, limits)
        return str(matcher.grammar_from_lark(text))
    if kind == "choice":
        return str(matcher.grammar_from_regex(_choice_pattern(text, limits)))
    schema = _json(text) if kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict | bool):
        raise UnfitError(f"a schema is an object; this is of type {type(schema).__name__}")
    _check_schema(schema, limits)
    try:
        return str(matcher.grammar_from_json_schema(json.dumps(schema)))
    except ValueError as error:
        raise UnfitError(first_line(str(error))) from error


def _check_lark(text: str, limits: GrammarLimits) -> None:
    """Refuse what llguidance takes and does not enforce, in schemas within the grammar too."""
    if text.lstrip().startswith("{"):  # llguidance's own format, in which schemas could ask for anything
        raise UnfitError("it is JSON; it must be a grammar in Lark notation")
    # numbers are not read: those of thousands of digits are an error here, and none in the library
    decoder = json.JSONDecoder(parse_int=len, parse_float=len)
    for found in re.finditer("%json[ \\t\\r\\n]*", text):
        try:
            schema, _ = decoder.raw_decode(text, found.end())
        except RecursionError:
            raise UnfitError("a schema in it is nested too deep") from None
        except ValueError:
            continue  # not a schema, or refused by the library
        _check_schema(schema, limits)
    for line in text.splitlines():
        head = _HEAD.match(_QUOTED.sub('""', line.strip()))
        if head is not None and (attribute := _EFFECTLESS.search(head[1])):
            raise UnfitError(f"the attribute {attribute[1]} of a rule has no effect here")


def _check_schema(schema: Any, limits: GrammarLimits) -> None:
    """Refuse a nesting beyond the limit, and the library's own key for laxness, at any level."""
    depth, level = 0, [(schema, True)]
    while level:  # no recursion of our own
        containers = [(item, is_schema) for item, is_schema in level if isinstance(item, dict | list)]
        if any(is_schema and isinstance(item, dict) and _LAXNESS in item for item, is_schema in containers):
            raise UnfitError(f"{_LAXNESS} is not supported: schemas are enforced as they stand")
        level = [part for item, is_schema in containers for part in _parts(item, is_schema)]
        depth += bool(containers)
        if depth > limits.max_depth:
            raise UnfitError(f"it is nested more than {limits.max_depth} deep")


def _parts(item: dict[str, Any] | list[Any], is_schema: bool) -> list[tuple[Any, bool]]:
    """What is in it, and whether its keys are keywords; those of properties and definitions are names."""
    if isinstance(item, list):
        return [(part, True) for part in item]
    return [(part, not (is_schema and key in _NAMING)) for key, part in item.items()]


def _choice_pattern(text: str, limits: GrammarLimits) -> str:
    options = _json(text)
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise UnfitError("it must be a JSON list of strings, at least one")
    if len(options) > limits.max_choices:
        raise UnfitError(f"it has {len(options)} entries; the limit is {limits.max_choices}")
    if any("\ud800" <= character <= "\udfff" for option in options for character in option):
        raise UnfitError("it holds a lone surrogate, which is no character")
    # one pattern, not one rule each: thousands of rules side by side are more items than a row may have
    return "|".join("".join(map(_escaped, option)) for option in dict.fromkeys(options))


def _escaped(character: str) -> str:
    return character if character.isalnum() else f"\\x{{{ord(character):x}}}"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise UnfitError("it is nested too deep") from None
    except ValueError as error:
        raise UnfitError(f"it is no JSON: {error}") from error


def first_line(message: str) -> str:
    """llguidance's messages have many lines; the first ones say it."""
    lines = (line.strip() for line in message.replace("<non-verbose/>", "").strip().splitlines()[:3])
    return " ".join(line for line in lines if line)[:300].rstrip(".")
