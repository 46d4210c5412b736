"""How many prompt tokens a step may have beside decodes, by what recent steps took. It knows times only as numbers.

A stream beside a long prompt waits as long as a step takes. A device that is done with 512 tokens in milliseconds needs
no pace; a CPU takes a second for them.

    time of a step ≈ decodes' part + prompt tokens / rate        chunk = (target - decodes' part) · rate

rate falls with the length of the context and rises with the size of the chunk, so it is not a constant of the machine:
it is taken from the latest steps of about the same size. Where the formula no longer moves the chunk, a step takes the
target's time, whatever the true law is.
"""

FIRST_CHUNK = 32
LEAST_CHUNK = 16
"""A prompt goes on at least so fast, even if decodes alone take longer than the target."""

WEIGHT = 0.5


class Pace:
    """A pure function of what it was told. target_s: seconds that a step with decodes should take at most."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.rate: float | None = None
        self.decode_s = 0.0
        self._largest: float | None = None

    def tell(self, num_decodes: int, num_prefill: int, duration_s: float) -> None:
        """A step is home; duration_s: what it took on the device. Steps whose time is unknown (0) say nothing."""
        if duration_s <= 0:
            return
        if not num_prefill:
            self.decode_s += (duration_s - self.decode_s) * (WEIGHT if self.decode_s else 1.0)
        elif not num_decodes:
            if self.rate is None:
                self.rate = num_prefill / duration_s
        elif duration_s > self.target_s or 2 * num_prefill >= self.chunk:  # else it is mostly what any step costs
            own_s = max(duration_s - self.decode_s, duration_s / 4)
            rate = num_prefill / own_s
            self.rate = rate if self._largest is None or self.rate is None else self.rate + (rate - self.rate) * WEIGHT
            self._largest = 2.0 * num_prefill

    @property
    def chunk(self) -> int:
        """Prompt tokens of the next step with decodes."""
        if self.rate is None:
            return FIRST_CHUNK
        wanted = (self.target_s - self.decode_s) * self.rate
        if self._largest is not None:
            wanted = min(wanted, self._largest)
        return max(LEAST_CHUNK, int(wanted))
