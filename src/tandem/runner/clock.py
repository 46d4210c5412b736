"""Maps moments of the device to the host's clock without ever stopping either. It knows no plans.

A GPU's events tell only how long it was from one to another. So the clock goes from event to event, one step to the
next, and sets the sum against what the host sees: a result cannot be seen before it is home. The least lag seen in
each window of steps is taken for the time that seeing takes; that keeps the two clocks together for days.
"""

SEEING_S = 5e-6
WINDOW = 512


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
