"""Grammars are tried before they are taken, in a process that forks others for it. It knows no requests, only numbers.

    fresh ──► 15 ms each ──► fits / refused         a line, and one child at work, in each lane; slices are of
                 └──► 60 ms each ──► …              processor time; the lower lanes are nicer
         still at it └──► 0.5 s each ──► …
                             └──► compile_s each ──► …

A cheap grammar waits for the first slices of those before it, and for nothing else; in each line clients take turns.
What has had a slice begins anew in the next lane: slices grow by so much that what is lost is a small part, and nothing
half done holds memory. This one compiles nothing of a client's, so no grammar can end it; a child that is killed is
forked anew within 5 ms.

    parent ═ orders ═► here: (what, number, ...)      news ═► parent: (number, 0, verdict, None)
    verdict: ("fits", lane), ("refused", why), ("overloaded", why), ("unreadable", why the tokenizer is)
"""

import contextlib
import hashlib
import math
import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tandem.line import Line
from tandem.sampling.grammar_child import Child, GoneError, KilledError, OverdueError, try_grammar
from tandem.sampling.grammar_follow import Tokenizers
from tandem.sampling.grammar_limits import GrammarLimits
from tandem.sampling.grammar_text import HINT, SIMPLER, UnfitError
from tandem.sampling.grammar_worker import step_back

SLICES_S = (0.015, 0.06, 0.5, math.inf)  # a usual schema takes 3 to 9 ms in a fresh child, the largest real ones 0.3 s
NICENESS = (0, 5, 14, 14)
MAX_HEAVY = (0, 32, 8, 8)  # in the line of a lower lane
MAX_REMEMBERED = 16384
REFUSED_S = 60.0

Verdict = tuple[str, Any]


@dataclass(slots=True, eq=False)
class _Trial:
    """numbers: who waits for it. client: who asked for it first. lane: where it is in line, or at work."""

    name: bytes
    client: str
    what: tuple[int, str, str, GrammarLimits]
    lane: "_Lane"
    numbers: set[int] = field(default_factory=set)

    @property
    def limits(self) -> GrammarLimits:
        return self.what[3]


@dataclass(slots=True, eq=False)
class _Lane:
    """trial: what its child is at, until until_s at the latest, whatever processor time it got.

    num_known: tokenizers that had come when the child was forked; it knows no later one.
    """

    index: int
    line: Line[_Trial] = field(default_factory=Line)
    trial: _Trial | None = None
    child: Child | None = None
    num_known: int = 0
    until_s: float = 0.0

    def end_child(self) -> None:
        if self.child is not None:
            self.child.end()
            self.child = None


class Trials:
    """Lines and lanes. One thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tokenizers = Tokenizers()
        self._unreadable: dict[int, str] = {}
        self._num_tokenizers = 0
        self._lanes = [_Lane(index) for index in range(len(SLICES_S))]
        self._trials: dict[bytes, _Trial] = {}
        self._waiting: dict[int, _Trial] = {}
        self._fit: OrderedDict[bytes, int] = OrderedDict()
        self._unfit: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._heavy: OrderedDict[bytes, int] = OrderedDict()

    def run(self) -> None:
        """Until the parent closes its end, or is gone. Leaves no child behind."""
        try:
            while True:
                self.turn(None)
        finally:
            for lane in self._lanes:
                lane.end_child()

    def turn(self, timeout_s: float | None) -> None:
        """Wait for an order, a child, or the end of somebody's time, and see to it."""
        busy = [lane for lane in self._lanes if lane.trial is not None and lane.child is not None]
        if busy:
            left_s = max(0.0, min(lane.until_s for lane in busy) - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        ready = wait([self._connection, *(lane.child.connection for lane in busy if lane.child)], timeout_s)
        for lane in busy:
            if lane.child is not None and lane.child.connection in ready:
                self._hear(lane)
            elif time.monotonic() > lane.until_s:
                self._stop(lane)
        if self._connection in ready:
            what, number, *rest = self._connection.recv()
            getattr(self, f"_on_{what}")(number, *rest)
        for lane in self._lanes:
            while lane.trial is None and lane.line:
                self._start(lane, lane.line.popleft())

    def _on_ping(self, number: int, value: int) -> None:
        self._connection.send((number, 0, value, None))

    def _on_tokenizer(self, number: int, key: int, *what: Any) -> None:
        reason = None
        try:
            self._tokenizers.make(key, *what)
            try_grammar(self._tokenizers.get(key), "json_object", "", GrammarLimits())  # what is done once is done here
        except UnfitError as error:
            self._unreadable[key] = reason = str(error)
        self._num_tokenizers += 1
        self._connection.send((number, 0, None, reason))

    def _on_try(self, number: int, key: int, kind: str, text: str, limits: GrammarLimits, client: str) -> None:
        name = _digest(key, kind, text, limits)
        verdict = ("unreadable", self._unreadable[key]) if key in self._unreadable else self._known(name)
        if verdict is not None:
            self._tell(number, verdict)
            return
        trial = self._trials.get(name)
        if trial is None:
            trial = _Trial(name, client, (key, kind, text, limits), self._lanes[self._heavy.get(name, 0)])
            refusal = self._queue(trial)
            if refusal is not None:
                self._tell(number, refusal)
                return
            self._trials[name] = trial
        trial.numbers.add(number)
        self._waiting[number] = trial

    def _on_forget(self, number: int) -> None:
        trial = self._waiting.pop(number, None)
        if trial is None:
            return
        trial.numbers.discard(number)
        if trial.numbers:
            return
        del self._trials[trial.name]
        if trial.lane.trial is trial:
            trial.lane.trial = None
            trial.lane.end_child()
        else:
            trial.lane.line.remove(trial)

    def _known(self, name: bytes) -> Verdict | None:
        unfit = self._unfit.get(name)
        if unfit is not None:
            reason, until_s = unfit
            if time.monotonic() < until_s:
                return "refused", reason
            del self._unfit[name]
        if name not in self._fit:
            return None
        self._fit.move_to_end(name)
        return "fits", self._fit[name]

    def _queue(self, trial: _Trial) -> Verdict | None:
        """Put it at the end of its lane's line; why not, if that is full."""
        line, index = trial.lane.line, trial.lane.index
        limit = line.limit_of(trial.client, MAX_HEAVY[index] or trial.limits.max_line)
        if len(line) >= limit:
            which = "grammars that take long to compile" if index else "new grammars"
            return (
                "overloaded",
                f"{len(line)} {which} are in line before this one; the limit is {limit} for this client",
            )
        line.append(trial)
        return None

    def _start(self, lane: _Lane, trial: _Trial) -> None:
        is_other = lane.child is not None and lane.child.limit_bytes != trial.limits.compile_bytes
        if is_other or lane.num_known < self._num_tokenizers:
            lane.end_child()
        slice_s = min(SLICES_S[lane.index], trial.limits.compile_s)
        for _ in range(2):
            try:
                child = lane.child = lane.child or self._fork(lane, trial)
                child.begin(*trial.what, slice_s)
                break
            except OSError:  # it was ended from outside, while it had nothing to do; or none can be forked
                lane.end_child()
        else:
            self._end(trial, ("overloaded", "this machine has no room for another process"))
            return
        lane.trial, lane.until_s = trial, time.monotonic() + 1 + 4 * slice_s

    def _fork(self, lane: _Lane, trial: _Trial) -> Child:
        lane.num_known = self._num_tokenizers
        inherited = [self._connection, *(other.child.connection for other in self._lanes if other.child is not None)]
        return Child(self._tokenizers, trial.limits.compile_bytes, NICENESS[lane.index], inherited)

    def _hear(self, lane: _Lane) -> None:
        trial, child = lane.trial, lane.child
        assert trial is not None and child is not None
        lane.trial = None
        try:
            reason = child.result()
        except OverdueError:
            lane.child = None
            self._go_on(trial)
            return
        except KilledError:
            lane.child = None
            self._end(trial, ("overloaded", "the process that compiled it was killed"))
            return
        except GoneError:
            lane.child = None
            reason = f"compiling it takes more memory than {trial.limits.compile_bytes >> 20} MiB{HINT}{SIMPLER}"
        self._end(trial, ("fits", lane.index) if reason is None else ("refused", reason))

    def _stop(self, lane: _Lane) -> None:
        """It has not got its slice within the time: others are at the processors, or it does nothing."""
        trial, lane.trial = lane.trial, None
        assert trial is not None
        lane.end_child()
        if SLICES_S[lane.index] < trial.limits.compile_s:
            self._go_on(trial)
        else:
            self._end(trial, ("overloaded", "it could not be compiled in time"))

    def _go_on(self, trial: _Trial) -> None:
        """It has had its slice: to the next lane, if there is one that gives it more."""
        index, limit_s = trial.lane.index, trial.limits.compile_s
        if SLICES_S[index] >= limit_s:
            self._end(
                trial, ("refused", f"compiling it takes longer than {limit_s:g} s of processor time{HINT}{SIMPLER}")
            )
            return
        _keep(self._heavy, trial.name, index + 1)
        trial.lane = self._lanes[index + 1]
        refusal = self._queue(trial)
        if refusal is not None:
            self._end(trial, refusal)

    def _end(self, trial: _Trial, verdict: Verdict) -> None:
        del self._trials[trial.name]
        what, value = verdict
        if what == "fits":
            _keep(self._fit, trial.name, value)
        elif what == "refused":
            _keep(self._unfit, trial.name, (value, time.monotonic() + REFUSED_S))
        for number in trial.numbers:
            del self._waiting[number]
            self._tell(number, verdict)

    def _tell(self, number: int, verdict: Verdict) -> None:
        self._connection.send((number, 0, verdict, None))

    def check(self) -> None:
        """Assert that everybody who waits is in one line or at work, once."""
        placed = [trial for lane in self._lanes for trial in (*lane.line, *((lane.trial,) if lane.trial else ()))]
        assert len(placed) == len(set(placed)) and set(placed) == set(self._trials.values())
        assert all(trial.name == name for name, trial in self._trials.items())
        for lane in self._lanes:
            lane.line.check()
            assert all(trial.lane is lane for trial in lane.line), "in the line of another lane"
            assert lane.trial is None or (lane.trial.lane is lane and lane.child is not None)
            assert lane.trial is not None or not lane.line, "a lane rests while somebody waits"
        assert all(trial.numbers for trial in placed), "a grammar is tried for nobody"
        assert {number: trial for trial in placed for number in trial.numbers} == self._waiting


def _keep(memory: "OrderedDict[bytes, Any]", name: bytes, value: Any) -> None:
    memory[name] = value
    while len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)


def _digest(*what: object) -> bytes:
    """What is remembered of a grammar is not its text."""
    return hashlib.sha256(repr(what).encode("utf-8", "surrogatepass")).digest()


def main(descriptor: int, limit_bytes: int) -> None:
    """Obey until the connection ends. Does not return. limit_bytes: of this process; grammars bring their own."""
    step_back(limit_bytes)
    with contextlib.suppress(EOFError, OSError):
        Trials(Connection(descriptor)).run()
    os._exit(0)
