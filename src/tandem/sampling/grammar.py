"""Grammars as bitmasks of allowed ids, by way of llguidance. It knows no logits and needs no torch.

    Constraint ─compile─► GrammarMask:  allowed() → mask     accept(tokens)
                                          ▲                     │            each returns at once; a mask takes
                                          └── another process ◄─┘            0.01 to 2 ms, and the loop never waits

A grammar is first tried where it may explode (grammar_trial.py), and then followed in another process, which
never saw those that did (grammar_worker.py). Whoever waits for it holds no thread. Limits: grammar_limits.py.
"""

import atexit
import contextlib
import importlib.util
import threading
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from tandem.errors import GrammarError, RequestError
from tandem.request import Constraint
from tandem.sampling.grammar_limits import GrammarLimits
from tandem.sampling.grammar_process import LOOK_S, MAX_SILENT_LOOKS, GrammarProcess, Tokenizer
from tandem.sampling.grammar_text import HINT

__all__ = ["GrammarLimits", "GrammarMask", "compile_constraint", "compile_later", "hold", "release", "statistics"]

_LATER = "try again in a second; a grammar that was compiled before need not stand in line."


def compile_later(
    constraint: Constraint,
    tokenizer_json: str,
    num_logits: int,
    eos_ids: Collection[int],
    limits: GrammarLimits | None = None,
    client: str = "",
) -> "Future[GrammarMask]":
    """Have a request's grammar compiled, and its first mask computed, in other processes. Returns at once.

    json_object  any JSON object.       json_schema  text is a JSON schema.       regex  text is a pattern.
    choice       text is a JSON list of strings.                                  grammar  text is a Lark grammar.
    num_logits   rows of the output matrix: the width of the masks. Ids that pad it are never allowed.
    eos_ids      allowed where the grammar may end.
    client       who asks: clients take turns in line.

    Whoever cancels the future leaves; what is then for nobody is ended. It raises RequestError, as this call may:
    malformed, not enforceable, impossible to fulfil, too large or too complex, too many before it (code "overloaded"),
    or llguidance is not installed.
    """
    limits = limits or GrammarLimits()
    _check_library()
    if not eos_ids:
        raise _refusal(constraint, "the model has no end-of-sequence token, which ends a constrained answer")
    if len(constraint.text) > limits.max_text_bytes:
        raise _refusal(constraint, f"it has {len(constraint.text)} characters; the limit is {limits.max_text_bytes}")
    answer: Future[GrammarMask] = Future()
    _Compiling(answer, constraint, (tokenizer_json, num_logits, tuple(sorted(eos_ids))), limits, client)
    return answer


def compile_constraint(
    constraint: Constraint,
    tokenizer_json: str,
    num_logits: int,
    eos_ids: Collection[int],
    limits: GrammarLimits | None = None,
) -> "GrammarMask":
    """compile_later, and wait for it: milliseconds or seconds."""
    return compile_later(constraint, tokenizer_json, num_logits, eos_ids, limits).result()


class _Compiling:
    """One grammar on its way: tried, then followed up to its first mask. Goes on with the news of the processes."""

    def __init__(
        self, answer: "Future[GrammarMask]", constraint: Constraint, tokenizer: Tokenizer, limits: GrammarLimits,
        client: str,
    ) -> None:  # fmt: skip
        self._answers = [answer]  # none once it is given: an answer knows this through its callbacks, and its mask
        self._constraint, self._tokenizer, self._limits = constraint, tokenizer, limits
        process = _process("try")
        _process("follow").bring(tokenizer)  # both read it at once
        trial = process.ask("try", process.bring(tokenizer), constraint.kind, constraint.text, limits, client)
        answer.add_done_callback(lambda answer: trial.cancel() if answer.cancelled() else None)
        trial.add_done_callback(lambda trial: self._tried(process, trial))

    def _tried(self, process: GrammarProcess, trial: "Future[tuple[Any, str | None]]") -> None:
        if trial.cancelled():
            return
        if trial.exception() is not None:
            self._fail(_lost(process, "compiles"))
            return
        (verdict, value), _ = trial.result()
        if verdict == "fits":
            self._follow(value)
        elif verdict == "refused":
            self._fail(_refusal(self._constraint, value))
        elif verdict == "overloaded":
            self._fail(RequestError(f"{value}.", code="overloaded", hint=_LATER))
        else:
            self._fail(RequestError(
                f"this model's tokenizer cannot be used for structured output: {value}.", param="response_format"
            ))  # fmt: skip

    def _follow(self, lane: int) -> None:
        process, first = _process("follow"), Future[None]()
        what = process.bring(self._tokenizer), self._constraint.kind, self._constraint.text, self._limits, lane
        mask = GrammarMask(process, what, first)
        number = mask.number
        self._answers[0].add_done_callback(lambda answer: process.close_place(number) if answer.cancelled() else None)
        first.add_done_callback(lambda _: self._give(mask))

    def _give(self, mask: "GrammarMask") -> None:
        try:
            mask.allowed()
        except RequestError as error:
            self._fail(error)
        else:
            with contextlib.suppress(InvalidStateError):  # cancelled
                self._answers.pop().set_result(mask)

    def _fail(self, error: RequestError) -> None:
        with contextlib.suppress(InvalidStateError):
            self._answers.pop().set_exception(error)


class GrammarMask:
    """Follows one request's grammar (plan.Mask). Called from one thread; the work is done elsewhere, in order."""

    def __init__(self, process: GrammarProcess, what: tuple[Any, ...], first: "Future[None]") -> None:
        """what: tokenizer, kind, text, limits, lane of its trial. first: done when the first mask is there."""
        self._process = process
        self._news = _News(first)
        self._num_tokens = 0
        self.number = process.open(self._news, "follow", *what)
        weakref.finalize(self, process.close_place, self.number).atexit = False

    def allowed(self) -> bytes | None:
        """Bitmask of the ids allowed next, little-endian words of 32; None while it is being computed.

        Raises GrammarError if a limit was reached, or a token was not of the grammar.
        """
        news = self._news
        if news.is_lost:
            raise _lost(self._process, "follows")
        if news.reason is not None:
            reason, _, hint = news.reason.partition(HINT)
            raise GrammarError(f"the grammar cannot be followed any further: {reason}.", hint=hint or None)
        num_tokens, mask = news.latest
        return mask if num_tokens == self._num_tokens else None

    def accept(self, tokens: Sequence[int]) -> None:
        """The request sampled these tokens, end-of-sequence included. Returns at once."""
        if tokens:
            self._num_tokens += len(tokens)
            self._process.order("accept", self.number, tuple(tokens))


class _News:
    """What the other process has said last about one grammar. Written by one thread, read by another."""

    def __init__(self, first: "Future[None]") -> None:
        self.latest: tuple[int, bytes | None] = (0, None)
        self.reason: str | None = None
        self.is_lost = False
        self._first: Future[None] | None = first

    def hear(self, num_tokens: int, value: Any, reason: str | None) -> None:
        if reason is not None:
            self.reason = reason
        else:
            self.latest = num_tokens, value
        self._tell()

    def lose(self) -> None:
        self.is_lost = True
        self._tell()

    def _tell(self) -> None:
        first, self._first = self._first, None  # kept no longer: it knows the mask, and a mask nobody holds must go
        if first is not None:
            with contextlib.suppress(InvalidStateError):
                first.set_result(None)


_KINDS = {
    "try": ("tandem.sampling.grammar_trial", 4 << 30),
    "follow": ("tandem.sampling.grammar_worker", 8 << 30),
}
"""Name → module, and bytes that it may take for data."""

_processes: dict[str, GrammarProcess] = {}
_lock = threading.Lock()


def _process(name: str) -> GrammarProcess:
    """The process that tries, or the one that follows; a new one if it was lost."""
    with _lock:
        process = _processes.get(name)
        if process is None or process.is_lost:
            process = _processes[name] = GrammarProcess(name, *_KINDS[name])
        return process


def processes() -> list[GrammarProcess]:
    """All that run."""
    with _lock:
        return list(_processes.values())


def statistics() -> dict[str, int]:
    """trials: grammars that are being tried, or are in line for it."""
    with _lock:
        process = _processes.get("try")
    return {"trials": process.num_open if process is not None else 0}


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
        ended = list(_processes.values())
        _processes.clear()
    for process in ended:
        process.kill()


def _lost(process: GrammarProcess, what: str) -> RequestError:
    if process.is_stuck:
        return RequestError(
            f"the process that {what} grammars did not answer for {MAX_SILENT_LOOKS * LOOK_S:g} s; it was ended, and "
            "this request with it.", code="overloaded", hint="try again.",
        )  # fmt: skip
    return RequestError(
        f"the process that {what} grammars was lost, and this request with it.", code="internal_error",
        hint="try again.",
    )  # fmt: skip


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
