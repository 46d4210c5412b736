"""Turns the crank on the null runner as the engine's loop does, checking everything after every move."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.plan import StepPlan
from tandem.request import Change, Request, SamplingParams
from tandem.runner.contract import Ticket
from tandem.runner.null import NullRunner
from tandem.schedule import Scheduler

NUM_LOGITS = 997
PATIENCE = 24  # rounds without work that a grammar may need to be ready


class CountingMask:
    """A grammar: token number i of the answer is i modulo 7. It is ready after delay questions each time."""

    def __init__(self, delay: int = 0) -> None:
        self.delay = self._left = delay
        self.accepted: list[int] = []

    def allowed(self) -> bytes | None:
        if self._left > 0:
            self._left -= 1
            return None
        rest = len(self.accepted) % 7
        bits = sum(1 << token for token in range(rest, NUM_LOGITS, 7))
        return bits.to_bytes(-(-NUM_LOGITS // 32) * 4, "little")

    def accept(self, tokens: Sequence[int]) -> None:
        self.accepted += tokens
        self._left = self.delay


def request(name: str, prompt: Sequence[int] | int, max_tokens: int | None = 8, **settings: object) -> Request:
    """A request; prompt may be a length, then its tokens are made of its name."""
    if isinstance(prompt, int):
        seed = sum(ord(c) * 31**i for i, c in enumerate(name))
        prompt = [(seed * 7919 + i * 104729) % NUM_LOGITS for i in range(prompt)]
    fields = {
        key: settings.pop(key) for key in ("eos", "priority", "salt", "fork_of", "client", "bundle") if key in settings
    }
    params = SamplingParams(max_tokens=max_tokens, **settings)  # type: ignore[arg-type]
    return Request(name, prompt, params, **fields)  # type: ignore[arg-type]


@dataclass
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    code: str | None = None
    cached: int | None = None
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    first_step: int | None = None
    last_step: int | None = None


class Drive:
    """A scheduler and a verifying null runner at some depth. Steps are counted; changes become answers."""

    def __init__(
        self, depth: int = 2, num_blocks: int = 64, block_size: int = 16, num_rows: int = 8, budget: int = 64,
        max_length: int = 2048, verify: bool = True, checked: bool = True, runner: dict | None = None,
        **settings: object,
    ) -> None:  # fmt: skip
        self.scheduler = Scheduler(num_blocks, block_size, num_rows, budget, max_length, **settings)  # type: ignore
        self.runner = NullRunner(
            num_blocks, block_size, num_rows, NUM_LOGITS, max_length, depth=depth, verify=verify, **(runner or {})
        )
        self.depth, self.checked = depth, checked
        self.flight: deque[tuple[StepPlan, Ticket, list[list[int]]]] = deque()
        self.answers: dict[str, Answer] = {}
        self.plans: list[StepPlan] = []
        self.steps = 0
        self.num_prefilled: dict[str, int] = {}
        self.num_joins: dict[str, int] = {}
        self._tables: dict[int, list[int]] = {}

    def add(self, *requests: Request, mask: object = None) -> None:
        for one in requests:
            self.scheduler.add(one, mask)  # type: ignore[arg-type]
            self.answers[one.id] = Answer()

    def abort(self, name: str) -> None:
        change = self.scheduler.abort(name)
        assert (change is None) == (self.answers[name].finish is not None)
        if change is not None:
            self._hear(change)
        self._check()

    def turn(self) -> bool:
        """One round of the loop; False if there was nothing to do."""
        plan = self.scheduler.plan() if len(self.flight) < self.depth else None
        self._check()
        if plan is not None:
            self._submit(plan)
        collect = bool(self.flight) and (plan is None or len(self.flight) == self.depth)
        if collect:
            _, ticket, _ = self.flight.popleft()
            for change in self.scheduler.commit(self.runner.collect(ticket)):
                self._hear(change)
            self._check()
        return plan is not None or collect

    def _submit(self, plan: StepPlan) -> None:
        self.steps += 1
        if self.checked:
            self.plans.append(plan)
            for row in plan.departures:
                del self._tables[row]
            for arrival in plan.arrivals:
                self._tables[arrival.row] = []
                self.num_joins[arrival.request] = self.num_joins.get(arrival.request, 0) + 1
            for index, span in enumerate(plan.spans):
                self._tables[span.row] += span.blocks
                if index >= plan.num_decodes:
                    self.num_prefilled[span.request] = self.num_prefilled.get(span.request, 0) + span.length
            assert plan.num_tokens <= self.scheduler.max_batch_tokens
        named = [self._tables[span.row][:] for span in plan.spans] if self.checked else []
        named.append([block for pair in plan.block_copies for block in pair])
        self.flight.append((plan, self.runner.submit(plan), named))

    def _check(self) -> None:
        """The invariants: the scheduler's own, and that no block named by a step in flight is free (4)."""
        if self.checked:
            self.scheduler.check()
            counts = self.scheduler.ledger.pool._counts
            for _, _, tables in self.flight:
                assert all(counts[block] > 0 for table in tables for block in table), "a block in flight is free"

    def _hear(self, change: Change) -> None:
        answer = self.answers[change.request]
        assert answer.finish is None, "news of a request that had ended"
        if answer.cached is None:
            answer.cached = change.cached
        else:
            assert change.cached == 0
        if change.tokens and answer.first_step is None:
            answer.first_step = self.steps
        answer.tokens += change.tokens
        answer.logprobs += change.logprobs or ()
        answer.prompt_logprobs += change.prompt_logprobs or ()
        answer.finish, answer.error, answer.code = change.finish, change.error, change.code
        if change.finish is not None:
            answer.last_step = self.steps

    def run(self, limit: int = 100_000, until: Callable[[], bool] | None = None) -> dict[str, Answer]:
        """Until idle, or until says so. Fails if that takes more than limit turns: no progress."""
        num_still = 0
        for _ in range(limit):
            if until is not None and until():
                return self.answers
            num_still = 0 if self.turn() else num_still + 1
            if num_still and self.scheduler.idle:
                self.scheduler.check()
                return self.answers
            assert num_still <= PATIENCE, f"stuck: {self.scheduler.statistics()}"
        raise AssertionError(f"not done within {limit} turns: {self.scheduler.statistics()}")


def alone(one: Request, mask: object = None) -> Answer:
    """REF: the answer when it runs by itself, synchronously, without a prefix cache, in an ample pool."""
    drive = Drive(depth=1, num_blocks=1024, num_rows=1, budget=4096, max_length=8192, prefix_cache=False)
    drive.add(Request(one.id, one.prompt, one.params, one.eos), mask=mask)
    return drive.run()[one.id]
