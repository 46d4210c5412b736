"""What lies between the mail and the planner: grammars being compiled, requests held back, calls that wait.

It knows neither steps nor devices. A grammar is compiled elsewhere, once for all who wait for the same one; that holds
no thread, and the loop goes on. A call that needs an idle engine (new weights) holds every later request back until it
is done, so requests that run finish on what they began with: they *drain*.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tandem.engine.contract import Call, Mailbox
from tandem.errors import RequestError, TandemError
from tandem.observer import Observers
from tandem.plan import Mask, Planner
from tandem.request import Change, Constraint, Request
from tandem.sampling import grammar

log = logging.getLogger("tandem.engine")

MAX_WAIT_S = 30.0
"""From a request's coming to its first mask. Lines are bounded, so it is reached where something is stuck."""

CompileMask = Callable[[Request], "Future[Any]"]
"""Has a request's grammar compiled, and returns at once: the future's result is a Mask. Who cancels it leaves."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What a Call may ask for. drains: only when nothing runs."""

    do: Callable[[str], Any]
    drains: bool = False


@dataclass(slots=True, eq=False)
class Compilation:
    """A request that waits for its mask. future: once it is its turn."""

    request: Request
    constraint: Constraint
    until_s: float
    future: Future[Any] | None = None

    def leave(self) -> None:
        if self.future is not None:
            self.future.cancel()


class Admission:
    """Hands requests to the planner, each when it is ready. Loop's thread only."""

    def __init__(
        self,
        planner: Planner,
        mailbox: Mailbox,
        observers: Observers,
        compile_mask: CompileMask | None,
        errands: Mapping[str, Errand],
    ) -> None:
        self._planner, self._mailbox, self._observers = planner, mailbox, observers
        self._compile_mask = compile_mask
        self._errands = errands
        self._compiling: dict[str, Compilation] = {}
        self._lines: dict[Constraint, deque[Compilation]] = {}
        self._compiled: deque[Compilation] = deque()
        self._held: dict[str, tuple[Request, Mask | None]] = {}
        self._calls: deque[Call] = deque()
        self._holds = False

    @property
    def idle(self) -> bool:
        """Nothing compiles, waits or is held back."""
        return not (self._compiling or self._compiled or self._held or self._calls)

    def add(self, request: Request, now_s: float) -> Change | None:
        """Returns the last change if the request was refused."""
        if request.params.constraint is None:
            return self._enter(request, None, now_s)
        if self._compile_mask is None:
            return self._refuse(request, RequestError("this engine has no grammars.", param="response_format"), now_s)
        if not self._holds:
            grammar.hold()
            self._holds = True
        constraint, until_s = request.params.constraint, now_s + MAX_WAIT_S
        waiting = self._compiling[request.id] = Compilation(request, constraint, until_s)
        line = self._lines.setdefault(waiting.constraint, deque())
        line.append(waiting)
        if len(line) == 1:
            self._compile(waiting)
        return None

    def _compile(self, waiting: Compilation) -> None:
        assert self._compile_mask is not None
        try:
            future = self._compile_mask(waiting.request)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        waiting.future = future
        future.add_done_callback(lambda _: self._compiled.append(waiting))

    def _leave_line(self, waiting: Compilation) -> deque[Compilation]:
        """Take it out of the line for its grammar. Returns those behind it, if it was compiled for them too."""
        line = self._lines.get(waiting.constraint, deque())
        if waiting not in line:
            return deque()
        is_first = line[0] is waiting
        line.remove(waiting)
        if not line:
            del self._lines[waiting.constraint]
        return line if is_first else deque()

    def abort(self, request: str) -> Change | None:
        if (waiting := self._compiling.get(request)) is not None:
            self._leave(waiting)
            return Change(request, finish="abort")
        if self._held.pop(request, None):
            return Change(request, finish="abort")
        return self._planner.abort(request)

    def _leave(self, waiting: Compilation) -> None:
        """It waits no longer; others who wait for the same grammar do."""
        del self._compiling[waiting.request.id]
        if behind := self._leave_line(waiting):
            self._compile(behind[0])  # before it leaves, so that what was begun goes on
        waiting.leave()

    def call(self, call: Call) -> None:
        errand = self._errands.get(call.name)
        if errand is None:
            self._mailbox.answer(call.number, None, TandemError(f"the engine knows no call {call.name!r}."))
        elif errand.drains:
            self._calls.append(call)
        else:
            self._run(call, errand)

    def advance(self, now_s: float, drained: bool) -> list[Change]:
        """Take in what has been compiled; if nothing runs any more, do the calls that waited for that."""
        changes = []
        while self._compiled:
            waiting = self._compiled.popleft()
            if self._compiling.get(waiting.request.id) is not waiting:
                continue  # aborted meanwhile
            del self._compiling[waiting.request.id]
            changes += self._take(waiting, now_s)
        while self._compiling and (oldest := next(iter(self._compiling.values()))).until_s < now_s:
            self._leave(oldest)
            changes.append(self._refuse(oldest.request, _late(), now_s))
        if self._calls and drained:
            while self._calls:
                call = self._calls.popleft()
                self._run(call, self._errands[call.name])
            held, self._held = self._held, {}
            changes += [c for r, mask in held.values() if (c := self._enter(r, mask, now_s)) is not None]
        return changes

    def _take(self, waiting: Compilation, now_s: float) -> list[Change]:
        """A mask is there, or none is to be had: others who wait for the same grammar get their own, or the error."""
        assert waiting.future is not None
        behind, error = self._leave_line(waiting), waiting.future.exception()
        if behind:
            del self._lines[waiting.constraint]
        if error is None:
            for other in behind:
                self._compile(other)
            change = self._enter(waiting.request, waiting.future.result(), now_s)
            return [] if change is None else [change]
        for other in behind:
            del self._compiling[other.request.id]
        return [self._refuse(other.request, error, now_s) for other in (waiting, *behind)]

    def close(self) -> None:
        if self._holds:
            for waiting in self._compiling.values():
                waiting.leave()
            self._holds = False
            grammar.release()
        while self._calls:
            self._mailbox.answer(self._calls.popleft().number, None, TandemError("the engine was closed first."))

    def _enter(self, request: Request, mask: Mask | None, now_s: float) -> Change | None:
        if self._calls:
            self._held[request.id] = (request, mask)
            return None
        try:
            self._planner.add(request, mask)
        except Exception as error:
            return self._refuse(request, error, now_s)
        if self._observers:
            self._observers.tell("request_added", request, now_s)
        return None

    def _refuse(self, request: Request, error: BaseException, now_s: float) -> Change:
        if not isinstance(error, TandemError):
            log.error("request %s failed on the way in", request.id, exc_info=error)
        if self._observers:
            self._observers.tell("request_refused", request, error, now_s)
        code = error.code if isinstance(error, RequestError) else None
        return Change(request.id, finish="error", error=str(error) or type(error).__name__, code=code)

    def _run(self, call: Call, errand: Errand) -> None:
        try:
            value = errand.do(call.argument)
        except Exception as error:
            if not isinstance(error, TandemError):
                log.exception("the call %r failed", call.name)
                error = TandemError(f"{call.name} failed: {type(error).__name__}: {error}")
            self._mailbox.answer(call.number, None, error)
        else:
            self._mailbox.answer(call.number, value, None)

    def statistics(self) -> dict[str, int]:
        """compiling: requests whose grammar is not there yet. trials: grammars being tried, for whomever."""
        return {
            "compiling": len(self._compiling), **grammar.statistics(), "held": len(self._held),
            "calls": len(self._calls),
        }  # fmt: skip


def _late() -> RequestError:
    return RequestError(
        f"the grammar's first mask was not there within {MAX_WAIT_S:g} s: there is too much to do.", code="overloaded",
        hint="try again.",
    )  # fmt: skip


def describe(error: BaseException, limit: int = 400) -> str:
    """One line about a failure that nobody foresaw."""
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return text if len(text) <= limit else f"{text[:limit]}…"
