"""Hooks for whoever wants to watch the engine. A failing observer is removed and logged; the run goes on.

It knows which moments can be watched; it does not know what anybody makes of them.
"""

import logging
from collections.abc import Sequence
from typing import Any

from tandem.plan import StepPlan, StepResult
from tandem.request import Change, Request

log = logging.getLogger("tandem.observer")


class Observer:
    """Override what you need. Called on the loop's thread: be quick. Times are time.perf_counter seconds."""

    def request_added(self, request: Request, now_s: float) -> None: ...

    def request_refused(self, request: Request, error: Exception, now_s: float) -> None: ...

    def request_aborted(self, request: str, now_s: float) -> None: ...

    def step_submitted(self, plan: StepPlan, began_s: float, planned_s: float, submitted_s: float) -> None:
        """The host planned from began_s to planned_s and handed the step over until submitted_s."""

    def step_collected(
        self,
        plan: StepPlan,
        result: StepResult,
        changes: Sequence[Change],
        began_s: float,
        home_s: float,
        settled_s: float,
    ) -> None:
        """The host waited from began_s to home_s, then committed and delivered until settled_s."""

    def closed(self) -> None: ...


class Observers:
    """Calls each observer in turn; one that raises is dropped."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def tell(self, moment: str, *what: Any) -> None:
        """Call the method named moment of every observer with these arguments."""
        for observer in tuple(self._observers):
            try:
                getattr(observer, moment)(*what)
            except Exception:
                log.exception("observer %r failed at %s and was removed", observer, moment)
                self._observers.remove(observer)
