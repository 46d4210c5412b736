"""When a step's stages ran on the device, told by the host's clock, without stopping either. It knows no plans.

A GPU's events tell only how long it was from one to another. So the clock goes from event to event, one step to the
next, and sets the sum against what the host sees: a result cannot be seen before it is home. Of the steps that the
host was waiting for, the least lag in each window is taken for the time that seeing takes; that keeps the two clocks
together for days.
"""

from dataclasses import dataclass, field
from time import perf_counter

from tandem.plan import StepTimes
from tandem.runner.streams import Event, Streams

SEEING_S = 5e-6
WINDOW = 512
ANCHOR_S = 1.0


class DeviceClock:
    """now_s of the last event, in seconds of time.perf_counter."""

    def __init__(self) -> None:
        self.now_s: float | None = None
        self._least_lag_s = float("inf")
        self._num_seen = 0

    def anchor(self, host_s: float) -> None:
        """The event happened when the host's clock showed host_s: the device was idle when it was asked."""
        self.now_s = host_s

    def move(self, elapsed_s: float) -> float:
        """Go on to an event that came elapsed_s after the last. Returns its moment on the host's clock."""
        assert self.now_s is not None, "the clock has no anchor"
        self.now_s += elapsed_s
        return self.now_s

    def seen(self, event_s: float, host_s: float) -> float:
        """The host saw at host_s what the clock puts at event_s. Returns the correction made, mostly 0."""
        lag_s = host_s - event_s
        self._least_lag_s = min(self._least_lag_s, lag_s)
        self._num_seen += 1
        if lag_s < 0.0:
            correction_s = lag_s
        elif self._num_seen >= WINDOW:
            correction_s = self._least_lag_s - SEEING_S
        else:
            return 0.0
        assert self.now_s is not None
        self.now_s += correction_s
        self._least_lag_s, self._num_seen = float("inf"), 0
        return correction_s


@dataclass(slots=True)
class Moments:
    """The events of one step: copies in done, arithmetic begun and done, results home.

    sent    something was copied in.        anchor  an event that came at anchored_s, if there is one.
    """

    ready: Event
    began: Event
    computed: Event
    home: Event
    submitted_s: float = 0.0
    sent: bool = False
    anchor: Event | None = None
    anchored_s: float = 0.0


@dataclass(slots=True)
class Timekeeper:
    """Hands out events and turns those that have come into StepTimes.

    There is one set more than there are slots, since a step is timed from the end of the one before.
    """

    streams: Streams
    depth: int
    _sets: list[Moments] = field(init=False)
    _clock: DeviceClock = field(default_factory=DeviceClock)
    _last: Event | None = None
    _num_begun: int = 0
    _anchored_s: float = float("-inf")

    def __post_init__(self) -> None:
        self._sets = [_moments(self.streams) for _ in range(self.depth + 1)]

    def begin(self, idle: bool) -> Moments:
        """Events for the next step. idle: nothing is in flight, so that the device's now is the host's."""
        moments = self._sets[self._num_begun % len(self._sets)]
        self._num_begun += 1
        moments.submitted_s, moments.sent, moments.anchor = perf_counter(), False, None
        if idle and moments.submitted_s - self._anchored_s > ANCHOR_S:
            moments.anchor, moments.anchored_s = self.streams.event(), moments.submitted_s
            self.streams.record(moments.anchor, "compute")
            self._anchored_s = moments.submitted_s
        return moments

    def end(self, moments: Moments, waited: bool) -> StepTimes:
        """Times of a step that is home; steps come in order. waited: the host was waiting when it came."""
        now_s, clock, streams = perf_counter(), self._clock, self.streams
        if moments.anchor is not None:
            clock.anchor(moments.anchored_s)
            self._last = moments.anchor
        assert self._last is not None, "the first step has no anchor"
        began_s = clock.move(streams.elapsed_s(self._last, moments.began))
        ready_s = began_s + streams.elapsed_s(moments.began, moments.ready) if moments.sent else moments.submitted_s
        computed_s = clock.move(streams.elapsed_s(moments.began, moments.computed))
        home_s = computed_s + streams.elapsed_s(moments.computed, moments.home)
        self._last = moments.computed
        if waited:
            clock.seen(home_s, now_s)
        return StepTimes(moments.submitted_s, ready_s, began_s, computed_s, home_s)


def _moments(streams: Streams) -> Moments:
    return Moments(streams.event(), streams.event(), streams.event(), streams.event())
