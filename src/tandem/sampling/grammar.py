"""Grammars as bitmasks of allowed ids, by way of llguidance. It knows no logits and needs no torch.

    Constraint ─compile─► GrammarMask:  allowed() → mask     accept(tokens)
                                          ▲                     │            each returns at once; a mask takes
                                          └── another process ◄─┘            0.01 to 2 ms, and the loop never waits

A grammar is first tried in one process, in which it may explode (grammar_trial.py), and then followed in another, which
never saw those that did. Both may be killed without harm to the engine. Reasons: grammar_worker.py. Limits:
grammar_limits.py.
"""

import atexit
import importlib.util
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

from tandem.errors import GrammarError, RequestError
from tandem.request import Constraint
from tandem.sampling.grammar_limits import GrammarLimits
from tandem.sampling.grammar_process import GrammarProcess, LostError, Tokenizer
from tandem.sampling.grammar_text import HINT
from tandem.sampling.grammar_trial import QUICK_S, LeftError, RefusedError, Trials, Turn

__all__ = ["GrammarLimits", "GrammarMask", "Turn", "compile_constraint", "hold", "release", "statistics"]

_FOLLOW_BYTES = 8 << 30


def compile_constraint(
    constraint: Constraint,
    tokenizer_json: str,
    num_logits: int,
    eos_ids: Collection[int],
    limits: GrammarLimits | None = None,
    turn: Turn | None = None,
) -> "GrammarMask":
    """Compile a request's grammar; blocks for milliseconds or seconds, so call it off the loop's thread.

    json_object  any JSON object.       json_schema  text is a JSON schema.       regex  text is a pattern.
    choice       text is a JSON list of strings.                                  grammar  text is a Lark grammar.
    num_logits   rows of the output matrix: the width of the masks. Ids that pad it are never allowed.
    eos_ids      allowed where the grammar may end.
    turn         by its ``leave`` this call is ended from another thread, and with it work that is for nobody else.

    Raises RequestError: malformed, not enforceable, impossible to fulfil, too large or too complex, or llguidance is
    not installed.
    """
    limits = limits or GrammarLimits()
    _check_library()
    if not eos_ids:
        raise _refusal(constraint, "the model has no end-of-sequence token, which ends a constrained answer")
    if len(constraint.text) > limits.max_text_bytes:
        raise _refusal(constraint, f"it has {len(constraint.text)} characters; the limit is {limits.max_text_bytes}")
    tokenizer = tokenizer_json, num_logits, tuple(sorted(eos_ids))
    turn = turn or Turn()
    process = _process()
    process.bring(tokenizer)  # all processes read it at once
    try:
        took_s = _trials().seconds(constraint, tokenizer, limits, turn)
        what = constraint.kind, constraint.text, limits
        mask = GrammarMask(process, _tokenizer_of(process, tokenizer), what, took_s > QUICK_S, turn.again())
        turn.wait(limits.compile_s)
        mask.allowed()
    except RefusedError as error:
        raise _refusal(constraint, str(error)) from None
    except TimeoutError:
        raise RequestError(
            f"the grammar's first mask was not there within {limits.compile_s:g} s: there is too much to do.",
            code="overloaded", hint="try again.",
        ) from None  # fmt: skip
    except LeftError:
        raise RequestError("the request was left.", code="internal_error") from None
    except LostError:
        raise RequestError(
            "the process that follows grammars was lost, and this request with it.",
            code="internal_error", hint="try again.",
        ) from None  # fmt: skip
    return mask


class GrammarMask:
    """Follows one request's grammar (plan.Mask). Called from one thread; the work is done elsewhere, in order."""

    def __init__(
        self, process: GrammarProcess, tokenizer: int, what: tuple[Any, ...], is_slow: bool, first: threading.Event
    ) -> None:
        """is_slow: compiling takes long, so it waits behind what does not. first: set when the first mask is there."""
        self._process = process
        self._news = _News(first)
        self._num_tokens = 0
        self._number = process.open(self._news, "follow", tokenizer, *what, is_slow)
        weakref.finalize(self, process.close_place, self._number).atexit = False

    def allowed(self) -> bytes | None:
        """Bitmask of the ids allowed next, little-endian words of 32; None while it is being computed.

        Raises GrammarError if a limit was reached, or a token was not of the grammar.
        """
        news = self._news
        if news.is_lost:
            raise RequestError(
                "the process that followed the grammar was lost, and this request with it.",
                code="internal_error", hint="try again.",
            )  # fmt: skip
        if news.reason is not None:
            reason, _, hint = news.reason.partition(HINT)
            raise GrammarError(f"the grammar cannot be followed any further: {reason}.", hint=hint or None)
        num_tokens, mask = news.latest
        return mask if num_tokens == self._num_tokens else None

    def accept(self, tokens: Sequence[int]) -> None:
        """The request sampled these tokens, end-of-sequence included. Returns at once."""
        if tokens:
            self._num_tokens += len(tokens)
            self._process.order("accept", self._number, tuple(tokens))


class _News:
    """What the other process has said last about one grammar. Written by one thread, read by another."""

    def __init__(self, first: threading.Event) -> None:
        self.latest: tuple[int, bytes | None] = (0, None)
        self.reason: str | None = None
        self.is_lost = False
        self.first = first

    def hear(self, num_tokens: int, value: Any, reason: str | None) -> None:
        if reason is not None:
            self.reason = reason
        else:
            self.latest = num_tokens, value
        self.first.set()

    def lose(self) -> None:
        self.is_lost = True
        self.first.set()


_follow: GrammarProcess | None = None
_tried: Trials | None = None
_lock = threading.Lock()


def _process() -> GrammarProcess:
    """The process that follows; a new one if it was lost."""
    global _follow
    with _lock:
        if _follow is None or _follow.is_lost:
            _follow = GrammarProcess("follow", _FOLLOW_BYTES)
        return _follow


def _trials() -> Trials:
    global _tried
    with _lock:
        _tried = _tried or Trials()
        return _tried


def processes() -> list[GrammarProcess]:
    """All that run: the one that follows, and those in which grammars are tried."""
    with _lock:
        follow, tried = _follow, _tried
    return [*([follow] if follow else ()), *(tried.processes() if tried else ())]


def statistics() -> dict[str, int]:
    """As Trials.statistics."""
    with _lock:
        tried = _tried
    return tried.statistics() if tried else {"trials": 0}


_users = 0


def hold() -> None:
    """Somebody uses grammars from now on; pair it with release."""
    global _users
    with _lock:
        _users += 1


def release() -> None:
    """Somebody does no longer. The last one ends the grammar processes."""
    global _users
    with _lock:
        _users -= 1
        left = _users
    if not left:
        close()


@atexit.register
def close() -> None:
    """End the grammar processes. They start again when they are needed."""
    global _follow, _tried
    with _lock:
        follow, _follow = _follow, None
        tried, _tried = _tried, None
    if tried is not None:
        tried.close()
    if follow is not None:
        follow.kill()


def _tokenizer_of(process: GrammarProcess, tokenizer: Tokenizer) -> int:
    number, reason = process.tokenizer(tokenizer)
    if reason is not None:
        raise RequestError(
            f"this model's tokenizer cannot be used for structured output: {reason}.", param="response_format"
        )
    return number


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    what, _, hint = reason.partition(HINT)
    return RequestError(
        f"the {constraint.kind} of this request is refused: {what}.", param="response_format", hint=hint or None
    )


def _check_library() -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise RequestError(
            "structured output needs llguidance, which is not installed here.",
            param="response_format",
            hint='pip install -e ".[serve]", in the repository.',
        )
