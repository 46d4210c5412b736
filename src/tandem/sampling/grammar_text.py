"""A constraint in llguidance's notation, or the reason why it is refused. It follows no grammar.

What llguidance cannot enforce it refuses, and so does this: a request is answered by its grammar or not at all.
"""

import json
from typing import Any

from tandem.sampling.grammar_limits import GrammarLimits

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")


HINT = "\nhint: "
SIMPLER = "make the grammar simpler: smaller repetition counts, fewer alternatives, no rule that matches in many ways."

_STRICT = {"lenient": False, "coerce_one_of": False}  # a schema may ask llguidance for laxness ("x-guidance")


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
        return str(matcher.grammar_from_lark(text))
    if kind == "choice":
        return str(matcher.grammar_from_regex(_choice_pattern(text, limits)))
    schema = _json(text) if kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict | bool):
        raise UnfitError(f"a schema is an object; this is of type {type(schema).__name__}")
    if _depth(schema) > limits.max_depth:
        raise UnfitError(f"it is nested more than {limits.max_depth} deep")
    try:
        return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=_STRICT))
    except ValueError as error:
        raise UnfitError(first_line(str(error))) from error


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


def _depth(value: Any) -> int:
    """Nesting of lists and objects, without recursion of our own."""
    depth, level = 0, [value]
    while level:
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [part for item in containers for part in (item.values() if isinstance(item, dict) else item)]
        depth += bool(containers)
    return depth


def first_line(message: str) -> str:
    """llguidance's messages have many lines; the first ones say it."""
    lines = (line.strip() for line in message.replace("<non-verbose/>", "").strip().splitlines()[:3])
    return " ".join(line for line in lines if line)[:300].rstrip(".")
