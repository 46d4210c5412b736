"""Grammars are tried before they are taken: which one when, for how long, and for whom. It knows no requests.

    fresh ──► quick lane, oldest first ┐ half a second each ──► fits / refused
          └─► quick lane, newest first ┘         │ still at it
                                                 └────────────► slow lane, one at a time ──► fits / refused

Whoever comes last is next in one of the lanes, so a line of grammars that take long holds up no cheap one. A trial has
a process to itself: a process can be ended, a compilation cannot. It is ended when nobody waits for it any more.
"""

import contextlib
import hashlib
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import RequestError
from tandem.request import Constraint
from tandem.sampling.grammar_limits import GrammarLimits
from tandem.sampling.grammar_process import GrammarProcess, LostError, Tokenizer
from tandem.sampling.grammar_text import HINT, SIMPLER

QUICK_S = 0.5  # the largest real schemas take 0.3 s
MAX_SLOW = 8
MAX_REMEMBERED = 1024
REFUSED_S = 60.0
_LOOK_S = 0.02  # how soon it is noticed that nobody waits any more

_OLDEST, _NEWEST, _SLOW = range(3)


class LeftError(Exception):
    """Whoever waited for the grammar has left."""


class Turn:
    """Somebody waits for a grammar, until it is there or he leaves. One wait at a time."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.is_left = False

    def leave(self) -> None:
        """Wait no longer. From any thread."""
        self.is_left = True
        self.event.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until event is set. Raises LeftError, TimeoutError."""
        if not self.event.wait(timeout_s):
            raise TimeoutError
        if self.is_left:
            raise LeftError

    def again(self) -> threading.Event:
        """The event, cleared for another wait."""
        self.event.clear()
        if self.is_left:
            raise LeftError
        return self.event


@dataclass(slots=True, eq=False)
class _Trial:
    """reason: why it is refused, None if it fits. error: why nothing is known. process, asked: where it runs."""

    key: bytes
    constraint: Constraint
    tokenizer: Tokenizer
    limits: GrammarLimits
    turns: set[Turn] = field(default_factory=set)
    reason: str | None = None
    error: Exception | None = None
    took_s: float = 0.0
    is_done: bool = False
    process: GrammarProcess | None = None
    asked: "Future[tuple[Any, str | None]] | None" = None


class Trials:
    """The lines and lanes. Thread-safe."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._trials: dict[bytes, _Trial] = {}
        self._fresh: deque[_Trial] = deque()
        self._slow: deque[_Trial] = deque()
        self._busy: dict[int, _Trial] = {}
        self._fit: OrderedDict[bytes, float] = OrderedDict()
        self._unfit: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._lanes: set[int] = set()
        self._processes: set[GrammarProcess] = set()
        self._is_closed = False

    def seconds(self, constraint: Constraint, tokenizer: Tokenizer, limits: GrammarLimits, turn: Turn) -> float:
        """Try a grammar, unless it is known: the seconds that it takes to compile. Blocks.

        Raises RefusedError, RequestError if too many wait, LeftError, LostError.
        """
        key = _key(constraint, tokenizer, limits)
        with self._news:
            known = self._known(key)
            if known is not None:
                return known
            if self._is_closed:
                raise LostError
            trial = self._trials.get(key)
            if trial is None:
                trial = self._trials[key] = _Trial(key, constraint, tokenizer, limits)
                self._fresh.append(trial)
                self._open(_OLDEST)
                if len(self._fresh) > 1 or _OLDEST in self._busy:
                    self._open(_NEWEST)
                self._news.notify_all()
            trial.turns.add(turn)
        try:
            turn.wait()
        finally:
            with self._news:
                trial.turns.discard(turn)
                if not trial.turns:
                    self._drop(trial)
        if trial.error is not None:
            raise trial.error
        if trial.reason is not None:
            raise RefusedError(trial.reason)
        return trial.took_s

    def statistics(self) -> dict[str, int]:
        """trials: grammars that are being tried, or are in line for it."""
        with self._news:
            return {"trials": len(self._trials)}

    def processes(self) -> list[GrammarProcess]:
        with self._news:
            return list(self._processes)

    def close(self) -> None:
        """End the processes; whoever waits gets a LostError."""
        with self._news:
            self._is_closed = True
            for trial in list(self._trials.values()):
                self._end(trial, error=LostError())
            processes, self._processes = self._processes, set()
            self._news.notify_all()
        for process in processes:
            process.kill()

    def _known(self, key: bytes) -> float | None:
        unfit = self._unfit.get(key)
        if unfit is not None:
            reason, until_s = unfit
            if time.monotonic() < until_s:
                raise RefusedError(reason)
            del self._unfit[key]
        return self._fit.get(key)

    def _drop(self, trial: _Trial) -> None:
        """Nobody waits for it any more: out of the line; a lane that is at it looks for itself."""
        if self._trials.get(trial.key) is trial:
            del self._trials[trial.key]
        for line in (self._fresh, self._slow):
            with contextlib.suppress(ValueError):
                line.remove(trial)

    def _end(self, trial: _Trial, reason: str | None = None, error: Exception | None = None) -> None:
        if trial.is_done:
            return
        trial.reason, trial.error, trial.is_done = reason, error, True
        for line in (self._fresh, self._slow):
            with contextlib.suppress(ValueError):
                line.remove(trial)
        if self._trials.get(trial.key) is trial:
            del self._trials[trial.key]
        if error is None:
            memory: OrderedDict[bytes, Any] = self._fit if reason is None else self._unfit
            memory[trial.key] = trial.took_s if reason is None else (reason, time.monotonic() + REFUSED_S)
            while len(memory) > MAX_REMEMBERED:
                memory.popitem(last=False)
        for turn in trial.turns:
            turn.event.set()

    def _open(self, lane: int) -> None:
        if lane not in self._lanes:
            self._lanes.add(lane)
            threading.Thread(target=self._work, args=(lane,), name=f"tandem-grammar-try-{lane}", daemon=True).start()

    def _work(self, lane: int) -> None:
        process: GrammarProcess | None = None
        while (trial := self._take(lane)) is not None:
            if trial.process is not None:  # it goes on where it has begun
                self._discard(process)
                process = trial.process
            process = self._try(lane, trial, process)
            if lane != _SLOW:
                process = self._prepared(trial, process)
            with self._news:
                self._busy.pop(lane, None)
                self._news.notify_all()
        self._discard(process)

    def _take(self, lane: int) -> _Trial | None:
        """The next trial of a lane. The newest is for the second lane only while the first one is at work."""
        with self._news:
            while not self._is_closed:
                line = self._slow if lane == _SLOW else self._fresh
                if line and (lane != _NEWEST or _OLDEST in self._busy):
                    trial = self._busy[lane] = line.pop() if lane == _NEWEST else line.popleft()
                    self._news.notify_all()
                    return trial
                self._news.wait()
            return None

    def _try(self, lane: int, trial: _Trial, process: GrammarProcess | None) -> GrammarProcess | None:
        """Run one trial; the lane's process afterwards, None if it is gone."""
        limits, began_s = trial.limits, time.monotonic()
        try:
            process = self._process(process, limits.compile_bytes)
            if trial.asked is None:
                number, reason = process.tokenizer(trial.tokenizer)
                if reason is not None:
                    raise RequestError(
                        f"this model's tokenizer cannot be used for structured output: {reason}.",
                        param="response_format",
                    )
                if not trial.turns:
                    return process
                trial.process = process
                trial.asked = process.ask("try", number, trial.constraint.kind, trial.constraint.text, limits)
                trial.took_s = 0.0
            began_s = time.monotonic() - trial.took_s
            until_s = began_s + (limits.compile_s if lane == _SLOW else min(QUICK_S, limits.compile_s))
            reason = self._result(trial, until_s)
            trial.took_s = time.monotonic() - began_s
        except LostError:  # it was alone there, so it is its own fault
            reason = f"compiling it takes more memory than {limits.compile_bytes >> 20} MiB{HINT}{SIMPLER}"
        except LeftError:
            self._discard(process)
            return None
        except TimeoutError:
            trial.took_s = time.monotonic() - began_s
            self._overdue(lane, trial, process)
            return None
        except RequestError as error:
            with self._news:
                self._end(trial, error=error)
            return process
        with self._news:
            self._end(trial, reason)
        return process

    def _overdue(self, lane: int, trial: _Trial, process: GrammarProcess | None) -> None:
        """It has had its time: refused, or on to the slow lane, where it goes on at once if that lane is free."""
        with self._news:
            is_free = _SLOW not in self._busy and not self._slow
            if lane == _SLOW or trial.limits.compile_s <= QUICK_S:
                limit_s = trial.limits.compile_s
                self._end(trial, f"compiling it takes longer than {limit_s:g} s{HINT}{SIMPLER}")
            elif not trial.turns:
                pass
            elif len(self._slow) >= MAX_SLOW:
                self._end(trial, error=RequestError(
                    f"{len(self._slow)} grammars that take long to compile are in line before this one.",
                    param="response_format", code="overloaded", hint="try again later, or make it simpler.",
                ))  # fmt: skip
            else:
                self._slow.append(trial)
                self._open(_SLOW)
                if is_free:
                    return
                trial.process = trial.asked = None
        self._discard(process)

    def _result(self, trial: _Trial, until_s: float) -> str | None:
        """The reason of a refusal. Raises LostError, LeftError, TimeoutError."""
        assert trial.asked is not None
        while trial.turns:
            try:
                return trial.asked.result(max(0.0, min(_LOOK_S, until_s - time.monotonic())))[1]
            except TimeoutError:
                if time.monotonic() > until_s:
                    raise
        raise LeftError

    def _prepared(self, trial: _Trial, process: GrammarProcess | None) -> GrammarProcess | None:
        """A process that has read the tokenizer before the next trial is chosen: who comes meanwhile is the newest."""
        try:
            process = self._process(process, trial.limits.compile_bytes)
            process.tokenizer(trial.tokenizer)
        except LostError:
            self._discard(process)
            return None
        return process

    def _process(self, process: GrammarProcess | None, limit_bytes: int) -> GrammarProcess:
        if process is not None and not process.is_lost and process.limit_bytes == limit_bytes:
            return process
        self._discard(process)
        with self._news:
            if self._is_closed:
                raise LostError
            process = GrammarProcess("try", limit_bytes)
            self._processes.add(process)
            return process

    def _discard(self, process: GrammarProcess | None) -> None:
        if process is not None:
            process.kill()
            with self._news:
                self._processes.discard(process)


class RefusedError(Exception):
    """A grammar is refused; the reason, without a full stop."""


def _key(constraint: Constraint, tokenizer: Tokenizer, limits: GrammarLimits) -> bytes:
    """A digest: what is remembered of a grammar is not its text."""
    what = repr((constraint.kind, constraint.text, tokenizer[1:], limits))
    return hashlib.sha256(what.encode("utf-8", "surrogatepass")).digest()
