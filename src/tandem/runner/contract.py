"""What the engine may ask of a runner. It does not know which device obeys."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.plan import StepPlan, StepResult


@dataclass(slots=True)
class Ticket:
    """The promise of one step's result; redeemed once, in the order of submission."""

    step: int
    slot: int


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What a runner found out when it was built, printed at start.

    num_blocks     KV blocks in the pool.           num_rows    state rows, the most requests in a batch.
    num_logits     rows of the output matrix.       max_length  positions the model or memory allows.
    phases_s       start-up phase → seconds.        notes       lines for the reader (graphs' memory, backends).
    """

    num_blocks: int
    num_rows: int
    num_logits: int
    max_length: int
    phases_s: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Runner(Protocol):
    """Obeys plans in order. Everything a plan touches on the device is ordered on one compute stream (or thread):

    a row may therefore be taken by an arrival while a ghost of its former owner is still in flight, since a runner
    applies arrivals and departures on that stream, never when ``submit`` is called.
    """

    depth: int
    facts: RunnerFacts

    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step and return at once. At most ``depth`` tickets may be out."""

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait until the step is home. The only call that blocks. Raises what the step raised."""

    def close(self) -> None:
        """Give back threads and memory. Idempotent."""


class ReloadableRunner(Runner, Protocol):
    """A runner whose weights can be replaced while it stands; optional, found by the method's presence."""

    def reload(self, source: Any) -> None:
        """Load another checkpoint (weights.source.ModelSource) of the same spec. No step is in flight.

        Whatever the KV cache holds is stale afterwards. A failure raises and leaves the old weights in use.
        """
