"""The loop: takes mail, plans, submits, collects, commits, delivers. The same for every depth, device and planner.

It knows neither text nor sockets nor how a step is computed.

      depth 2       │ plan 1, submit 1 │ collect 0, commit 0, deliver │ plan 2, submit 2 │ collect 1 …
      the device    │ ███ 0 ███████████│██████ 1 █████████████████████│████ 2 ██████████ …
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.engine.admission import Admission, CompileMask, Errand, describe
from tandem.engine.contract import Abort, Add, Call, Mailbox
from tandem.errors import EngineDeadError, TandemError
from tandem.observer import Observer, Observers
from tandem.plan import Planner, StepPlan, others_of
from tandem.request import Change
from tandem.runner.contract import Runner, Ticket

log = logging.getLogger("tandem.engine")

REPORT_S = 0.25
POLL_S = 0.0005
IDLE_CHECK_S = 1.0


class Loop:
    """Turns the crank on one thread. A bad request harms itself; a runner that raises ends the engine.

    planner, runner   the two legs; runner.depth steps may be in flight.
    mailbox           where requests come from and changes go to.
    compile_mask      has a request's grammar mask made (admission.CompileMask); None: grammars are refused.
    errands           what a Call may ask for, by name.
    """

    def __init__(
        self,
        planner: Planner,
        runner: Runner,
        mailbox: Mailbox,
        *,
        observers: Sequence[Observer] = (),
        compile_mask: CompileMask | None = None,
        errands: Mapping[str, Errand] | None = None,
    ) -> None:
        self.planner, self.runner, self.mailbox = planner, runner, mailbox
        self.observers = Observers(observers)
        self.error: TandemError | None = None
        self.progress_s = time.perf_counter()
        self._admission = Admission(planner, mailbox, self.observers, compile_mask, errands or {})
        self._flight: deque[tuple[StepPlan, Ticket]] = deque()
        self._live: set[str] = set()
        self._closing = self._closed = False
        self._reported_s = 0.0
        self._is_reported = False
        self._num_steps = self._num_tokens = self._num_finished = self._num_failed_checks = 0

    def turn(self) -> bool:
        """One round. Returns False if there was nothing to do. Never raises: a failure ends the engine."""
        try:
            return self._turn()
        except Exception as error:
            self._die(error)
            return False

    def _turn(self) -> bool:
        began_s = time.perf_counter()
        mailed = self._take_mail(began_s)

        plan = None
        if len(self._flight) < self.runner.depth and not self._closing:
            plan = self.planner.plan()
        if plan is not None:
            planned_s = time.perf_counter()
            self._flight.append((plan, self.runner.submit(plan)))
            if self.observers:
                self.observers.tell("step_submitted", plan, began_s, planned_s, time.perf_counter())

        collect = bool(self._flight) and (plan is None or len(self._flight) == self.runner.depth)
        if collect:
            self._settle()
        busy = mailed or plan is not None or collect
        self._is_reported &= not busy  # the planner may tidy up behind the last step, too
        return busy

    def _settle(self) -> None:
        """Wait for the oldest step, commit it, deliver its news."""
        plan, ticket = self._flight[0]
        began_s = time.perf_counter()
        result = self.runner.collect(ticket)
        self._flight.popleft()
        self.progress_s = home_s = time.perf_counter()
        changes = self.planner.commit(result)
        self._num_steps += 1
        self._deliver(changes)
        settled_s = time.perf_counter()
        if self.observers:
            self.observers.tell("step_collected", plan, result, changes, began_s, home_s, settled_s)
        if settled_s - self._reported_s >= REPORT_S:
            self._report(settled_s)

    def _take_mail(self, now_s: float) -> bool:
        mail = self.mailbox.take()
        changes: list[Change] = []
        for item in mail:
            if isinstance(item, Add):
                self._live.add(item.request.id)
                change = self._admission.add(item.request, now_s)
            elif isinstance(item, Abort):
                change = self._abort(item.request, now_s)
            else:
                change = None
                if isinstance(item, Call):
                    self._admission.call(item)
                else:
                    self._closing = True
            if change is not None:
                changes.append(change)
        if not self._admission.idle:
            changes += self._admission.advance(now_s, drained=not self._flight and self.planner.idle)
        self._deliver(changes)
        return bool(mail or changes)

    def _abort(self, request: str, now_s: float) -> Change | None:
        change = self._admission.abort(request) if request in self._live else None
        if change is not None and self.observers:
            self.observers.tell("request_aborted", request, now_s)
        return change

    def _deliver(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        others = others_of(changes)
        self._num_tokens += len(changes) - len(others)
        for change in others:
            self._num_tokens += len(change.tokens)
            if change.finish is not None:
                self._live.discard(change.request)
                self._num_finished += 1
        self.mailbox.deliver(changes)

    def run(self) -> None:
        """Turn until told to close or dead; then give everything back. Blocks when idle, without spinning."""
        while self.error is None and not (self._closing and not self._flight):
            if not self.turn() and self.error is None:
                self._rest()
        self.close()

    def _rest(self) -> None:
        """Nothing to do: sleep until mail comes, or briefly while grammars are being compiled."""
        now_s = time.perf_counter()
        if not self.idle:
            if now_s - self._reported_s >= REPORT_S:
                self._report(now_s)
            self.mailbox.wait(POLL_S)
            return
        if not self._is_reported:
            self._report(now_s)
        if now_s - self.progress_s < IDLE_CHECK_S:
            self.mailbox.wait(IDLE_CHECK_S)
            return
        self._check_idle()
        self.mailbox.wait(None)

    def close(self) -> None:
        """End every live request, collect what is in flight, close the runner. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.error is None:
            try:
                self._deliver([c for r in tuple(self._live) if (c := self._abort(r, time.perf_counter()))])
                while self._flight:
                    self._settle()
            except Exception as error:
                self._die(error)
        self._admission.close()
        try:
            self.runner.close()
        except Exception:
            log.exception("closing the runner failed")
        self.observers.tell("closed")
        if self.error is None:
            self.mailbox.stopped(None)

    def _die(self, error: Exception) -> None:
        log.error("the engine stopped", exc_info=error)
        self.error = EngineDeadError(
            f"the engine has stopped: {describe(error)}", hint="the log has the traceback; start the engine anew."
        )
        dead = [Change(r, finish="error", error=str(self.error), code="engine_dead") for r in self._live]
        self._live.clear()
        self._flight.clear()
        if dead:
            self.mailbox.deliver(dead)
        self.mailbox.stopped(self.error)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, compiles or is in flight."""
        return not self._flight and self.planner.idle and self._admission.idle

    def _report(self, now_s: float) -> None:
        self._reported_s, self._is_reported = now_s, True
        self.mailbox.report(self.statistics())

    def statistics(self) -> dict[str, Any]:
        """A snapshot in plain data: the loop's own counters, and the planner's under "planner"."""
        return {
            "steps": self._num_steps,
            "tokens": self._num_tokens,
            "finished": self._num_finished,
            "live": len(self._live),
            "in_flight": len(self._flight),
            "failed_checks": self._num_failed_checks,
            **self._admission.statistics(),
            "planner": snapshot(self.planner),
        }

    def check(self) -> None:
        """Assert the loop's and the planner's invariants."""
        assert len(self._flight) <= self.runner.depth, "more steps in flight than the depth"
        if self.idle:
            assert not self._live, f"idle, yet these requests never ended: {sorted(self._live)[:5]}"
        check = getattr(self.planner, "check", None)
        if check is not None:
            check()

    def _check_idle(self) -> None:
        try:
            self.check()
        except AssertionError:
            self._num_failed_checks += 1
            log.exception("an invariant is broken; the engine goes on")


def snapshot(state: object) -> dict[str, Any]:
    """statistics() of a part as a dictionary; empty for a part that keeps none."""
    statistics = getattr(state, "statistics", None)
    if statistics is None:
        return {}
    value = statistics() if callable(statistics) else statistics
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return dict(value._asdict() if hasattr(value, "_asdict") else value)
