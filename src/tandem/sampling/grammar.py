"""Grammars as bitmasks of allowed ids, by way of llguidance. It knows no logits and needs no torch.

    Constraint ─compile─► GrammarMask:  allowed() → mask     accept(tokens)
                                          ▲                     │
                                          └── pool of threads ◄─┘   a mask takes 0.01 to 2 ms; the loop never waits

What llguidance cannot enforce it refuses, and so does this: a request is answered by its grammar or not at all.
"""

import json
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tandem.errors import RequestError
from tandem.request import Constraint

_KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost.

    max_text_bytes  length of the schema, pattern, list or grammar.     max_choices   entries of a choice.
    max_depth       nesting of a JSON schema.                           compile_s     seconds of compiling.
    """

    max_text_bytes: int = 256 << 10
    max_choices: int = 4096
    max_depth: int = 64
    compile_s: float = 5.0


def compile_constraint(
    constraint: Constraint,
    tokenizer_json: str,
    num_logits: int,
    eos_ids: Collection[int],
    limits: GrammarLimits | None = None,
) -> "GrammarMask":
    """Compile a request's grammar; blocks for milliseconds, so call it off the loop's thread.

    json_object  any JSON object.       json_schema  text is a JSON schema.       regex  text is a pattern.
    choice       text is a JSON list of strings.                                  grammar  text is a Lark grammar.
    num_logits   rows of the output matrix: the width of the masks. Ids that pad it are never allowed.
    eos_ids      allowed where the grammar may end.

    Raises RequestError: malformed, not enforceable, impossible to fulfil, too large, or llguidance is not installed.
    """
    limits = limits or GrammarLimits()
    llguidance = _library()
    try:
        grammar = _grammar_text(llguidance, constraint, limits)
    except UnicodeEncodeError as error:
        raise _refusal(constraint, "it holds a lone surrogate, which is no character") from error
    if not eos_ids:
        raise _refusal(constraint, "the model has no end-of-sequence token, which ends a constrained answer")
    tokenizer = _tokenizer(tokenizer_json, num_logits, tuple(sorted(eos_ids)))
    # Compiling cannot be interrupted, only left alone: llguidance's own limits (fuel) end it in the background.
    future = _pool().submit(_first_mask, llguidance, tokenizer, grammar, num_logits)
    try:
        matcher, mask, reason = future.result(timeout=limits.compile_s)
    except FutureTimeout:
        raise _refusal(constraint, f"compiling it takes longer than {limits.compile_s:g} s") from None
    if reason:
        raise _refusal(constraint, reason)
    return GrammarMask(matcher, num_logits, mask)


class GrammarMask:
    """Follows one request's grammar (plan.Mask). Called from one thread; the work is done on others, in order."""

    def __init__(self, matcher: Any, num_logits: int, first: bytes) -> None:
        self._matcher, self._num_logits = matcher, num_logits
        self._mask: bytes | None = first
        self._coming: Future[bytes] | None = None

    def allowed(self) -> bytes | None:
        """Bitmask of the ids allowed next, little-endian words of 32; None while it is being computed.

        Raises RequestError if the grammar became too complex to go on with, or a token was not of it.
        """
        if self._mask is None:
            assert self._coming is not None
            if not self._coming.done():
                return None
            self._mask = self._coming.result()
        return self._mask

    def accept(self, tokens: Sequence[int]) -> None:
        """The request sampled these tokens, end-of-sequence included. Returns at once."""
        if tokens:
            self._mask = None
            self._coming = _pool().submit(self._advance, self._coming, tuple(tokens))

    def _advance(self, before: "Future[bytes] | None", tokens: tuple[int, ...]) -> bytes:
        if before is not None:
            before.result()  # submitted earlier, so never behind this in the pool's queue
        matcher = self._matcher
        if not matcher.consume_tokens(list(tokens)):
            raise RequestError(f"the answer left its grammar at the tokens {list(tokens)}.", param="response_format")
        mask, error = _mask_of(matcher, self._num_logits)
        if error:
            raise RequestError(f"the grammar cannot be followed any further: {error}.", param="response_format")
        return mask


def _grammar_text(llguidance: Any, constraint: Constraint, limits: GrammarLimits) -> str:
    """The constraint in llguidance's own notation."""
    kind, text = constraint.kind, constraint.text
    if kind not in _KINDS:
        raise _refusal(constraint, f"there is no such kind; the kinds are {', '.join(_KINDS)}")
    num_bytes = len(text.encode("utf-8", errors="replace"))
    if num_bytes > limits.max_text_bytes:
        raise _refusal(constraint, f"it has {num_bytes} bytes; the limit is {limits.max_text_bytes}")
    matcher = llguidance.LLMatcher
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "grammar":
        return str(matcher.grammar_from_lark(text))
    if kind == "choice":
        return str(matcher.grammar_from_lark(_choice_grammar(constraint, limits)))
    schema = _json(constraint) if kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict | bool):
        raise _refusal(constraint, f"a schema is an object; this is of type {type(schema).__name__}")
    if _depth(schema) > limits.max_depth:
        raise _refusal(constraint, f"it is nested more than {limits.max_depth} deep")
    try:
        return str(matcher.grammar_from_json_schema(json.dumps(schema)))
    except ValueError as error:
        raise _refusal(constraint, _first_line(str(error))) from error


def _choice_grammar(constraint: Constraint, limits: GrammarLimits) -> str:
    options = _json(constraint)
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise _refusal(constraint, "it must be a JSON list of strings, at least one")
    if len(options) > limits.max_choices:
        raise _refusal(constraint, f"it has {len(options)} entries; the limit is {limits.max_choices}")
    return "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in dict.fromkeys(options))


def _json(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.text)
    except RecursionError:
        raise _refusal(constraint, "it is nested too deep") from None
    except ValueError as error:
        raise _refusal(constraint, f"it is no JSON: {error}") from error


def _depth(value: Any) -> int:
    """Nesting of lists and objects, without recursion of our own."""
    depth, level = 0, [value]
    while level:
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [part for item in containers for part in (item.values() if isinstance(item, dict) else item)]
        depth += bool(containers)
    return depth


def _first_mask(llguidance: Any, tokenizer: Any, grammar: str, num_logits: int) -> tuple[Any, bytes, str]:
    """(matcher, mask of the first token, error): some grammars are found to be impossible only when followed."""
    matcher = llguidance.LLMatcher(
        tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False)
    )
    if matcher.is_error():
        return matcher, b"", _first_line(matcher.get_error())
    mask, error = _mask_of(matcher, num_logits)
    return matcher, mask, error


def _mask_of(matcher: Any, num_logits: int) -> tuple[bytes, str]:
    mask = matcher.compute_bitmask()[: 4 * ((num_logits + 31) // 32)]
    if matcher.is_error():
        # A stop for want of any continuation carries the name of the reason alone.
        reason = _first_line(matcher.get_error())
        return b"", "nothing can fulfil it" if reason.startswith("NoExtension") else reason
    return mask, "" if any(mask) else "nothing can fulfil it"


def _first_line(message: str) -> str:
    return " ".join(line.strip() for line in message.strip().splitlines()[:3])[:300].rstrip(".")


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    return RequestError(f"the {constraint.kind} of this request is refused: {reason}.", param="response_format")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "structured output needs llguidance, which is not installed here.",
            param="response_format",
            hint='pip install "tandem-llm[serve]".',
        ) from error
    return llguidance


@lru_cache(maxsize=2)
def _tokenizer(tokenizer_json: str, num_logits: int, eos_ids: tuple[int, ...]) -> Any:
    """llguidance's view of a tokenizer: 0.2 s to make for 49,000 ids, so it is kept."""
    try:
        return _library().LLTokenizer(tokenizer_json, n_vocab=num_logits, eos_token=list(eos_ids))
    except Exception as error:  # llguidance raises plain exceptions for tokenizers that it cannot read
        raise RequestError(
            f"this model's tokenizer cannot be used for structured output: {_first_line(str(error))}.",
            param="response_format",
        ) from error


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tandem-grammar-mask")
