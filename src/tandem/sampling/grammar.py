"""Grammars as bitmasks of allowed ids, by way of llguidance. It knows no logits and needs no torch.

    Constraint ─compile─► GrammarMask:  allowed() → mask     accept(tokens)
                                          ▲                     │            each returns at once; a mask takes
                                          └── another process ◄─┘            0.01 to 2 ms, and the loop never waits

A grammar is first tried in one process, in which it may explode, and then followed in another, which never saw those
that did. Both may be killed without harm to the engine. Reasons: grammar_worker.py. Limits: grammar_limits.py.
"""

import atexit
import importlib.util
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from tandem.errors import GrammarError, RequestError
from tandem.request import Constraint
from tandem.sampling.grammar_limits import GrammarLimits
from tandem.sampling.grammar_process import GrammarProcess, LostError, Tokenizer
from tandem.sampling.grammar_text import HINT, SIMPLER

__all__ = ["GrammarLimits", "GrammarMask", "compile_constraint", "hold", "release"]

_FOLLOW_BYTES = 8 << 30
_MAX_KNOWN = 1024


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
    process = _process("follow", _FOLLOW_BYTES)
    process.bring(tokenizer)  # both processes read it at once
    what = constraint.kind, constraint.text, limits
    if (tokenizer[1:], what) not in _known:
        _try(constraint, tokenizer, limits)
        _known[tokenizer[1:], what] = None
        while len(_known) > _MAX_KNOWN:
            _known.popitem(last=False)
    try:
        mask = GrammarMask(process, _tokenizer_of(process, tokenizer), what)
        mask.wait(limits.compile_s)
    except (LostError, TimeoutError):
        raise RequestError(
            "the process that follows grammars was lost, and this request with it.",
            code="internal_error", hint="try again.",
        ) from None  # fmt: skip
    return mask


class GrammarMask:
    """Follows one request's grammar (plan.Mask). Called from one thread; the work is done elsewhere, in order."""

    def __init__(self, process: GrammarProcess, tokenizer: int, what: tuple[Any, ...]) -> None:
        self._process = process
        self._news = _News()
        self._num_tokens = 0
        self._number = process.open(self._news, "follow", tokenizer, *what)
        weakref.finalize(self, process.close_place, self._number).atexit = False

    def wait(self, timeout_s: float) -> None:
        """Until the first mask is there. Raises RequestError, LostError, TimeoutError."""
        if not self._news.first.wait(timeout_s):
            raise TimeoutError
        if self._news.is_lost:
            raise LostError
        self.allowed()

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

    def __init__(self) -> None:
        self.latest: tuple[int, bytes | None] = (0, None)
        self.reason: str | None = None
        self.is_lost = False
        self.first = threading.Event()

    def hear(self, num_tokens: int, value: Any, reason: str | None) -> None:
        if reason is not None:
            self.reason = reason
        else:
            self.latest = num_tokens, value
        self.first.set()

    def lose(self) -> None:
        self.is_lost = True
        self.first.set()


_known: OrderedDict[tuple[Any, ...], None] = OrderedDict()
_processes: dict[str, GrammarProcess] = {}
_lock, _alone = threading.Lock(), threading.Lock()


def _process(name: str, limit_bytes: int) -> GrammarProcess:
    """The process of that name; a new one if it was lost."""
    with _lock:
        process = _processes.get(name)
        if process is None or process.is_lost:
            process = _processes[name] = GrammarProcess(name, limit_bytes)
        return process


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
    with _lock:
        while _processes:
            _processes.popitem()[1].kill()


def _tokenizer_of(process: GrammarProcess, tokenizer: Tokenizer) -> int:
    number, reason = process.tokenizer(tokenizer)
    if reason is not None:
        raise RequestError(
            f"this model's tokenizer cannot be used for structured output: {reason}.", param="response_format"
        )
    return number


def _try(constraint: Constraint, tokenizer: Tokenizer, limits: GrammarLimits) -> None:
    """Compile it and follow it for some tokens where that may go wrong. Raises RequestError."""
    process = _process("try", limits.compile_bytes)
    try:
        reason = _tried(process, constraint, tokenizer, limits)
    except LostError:  # for this grammar's fault, or a neighbour's: alone, it can only be its own
        with _alone:
            process = GrammarProcess("try alone", limits.compile_bytes)
            try:
                reason = _tried(process, constraint, tokenizer, limits)
            except LostError:
                reason = f"compiling it takes more memory than {limits.compile_bytes >> 20} MiB{HINT}{SIMPLER}"
            finally:
                process.kill()
    if reason is not None:
        raise _refusal(constraint, reason)


def _tried(process: GrammarProcess, constraint: Constraint, tokenizer: Tokenizer, limits: GrammarLimits) -> str | None:
    number = _tokenizer_of(process, tokenizer)
    asked = process.ask("try", number, constraint.kind, constraint.text, limits)
    try:
        return asked.result(limits.compile_s)[1]
    except TimeoutError:
        process.kill()  # nothing else ends it
        return f"compiling it takes longer than {limits.compile_s:g} s{HINT}{SIMPLER}"


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
