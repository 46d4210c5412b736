"""The iteration-level scheduler: what each step does. It knows neither devices, nor depth, nor text.

Continuous batching (Orca, Yu et al. 2022) over a paged cache (vLLM, Kwon et al. 2023), with chunked prefill mixed into
decode steps (Sarathi-Serve, Agrawal et al. 2024). Every step:

    1. each decoding request gets one token; if blocks run out, the least important newest gives way (running.py)
    2. what is left of max_batch_tokens goes to prompts, by the fairness rule of prefill.py; beside decodes it is as
       much as target_step_s has time for, by the measured speed (pace.py)

Planning moves counters only: a request that sampled is *owed* a token until commit, and planned on regardless. An end
by length is known ahead; an end by a stop token is seen at commit, and rows planned meanwhile are ghosts.
"""

from collections import deque
from dataclasses import dataclass

from tandem.errors import CapacityError, ContextLengthError, RequestError, SettingError
from tandem.kv.ledger import Ledger, LedgerStatistics
from tandem.plan import Changes, Mask, StepPlan, StepResult
from tandem.request import Change, Request, checked_priority
from tandem.schedule.decode import plan_decodes
from tandem.schedule.draft import Draft, Flight
from tandem.schedule.lockstep import Crew
from tandem.schedule.pace import Pace
from tandem.schedule.prefill import plan_prefills
from tandem.schedule.progress import Progress
from tandem.schedule.running import Running
from tandem.schedule.settle import settle
from tandem.schedule.undo import undo
from tandem.schedule.waiting import WaitingQueue

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Gauges of now; num_steps, num_preemptions and kv's totals since the start.

    chunk_tokens  most prompt tokens of a step with decodes.
    """

    num_waiting: int
    num_running: int
    num_prefilling: int
    num_in_flight: int
    num_steps: int
    num_preemptions: int
    kv: LedgerStatistics
    chunk_tokens: int


class Scheduler:
    """Implements plan.Planner.

    num_blocks, block_size  the KV pool.            num_rows     most requests in a step.
    max_batch_tokens        most tokens in a step, at least num_rows.
    max_length              longest prompt plus answer; max_tokens None means up to it, or to what the pool holds.
    policy                  "fcfs", or "priority": smaller Request.priority first. Then clients and their bundles take
                            turns, and within a bundle arrival counts (turns.py).
    max_waiting             most requests that may wait; more are refused with code "queue_full".
    target_step_s           seconds that a step with decodes should take: prompts' chunks follow; 0: no such target.

    A request whose prompt and max_tokens can never be in the pool together is refused when it comes; it is not cut
    short later. The last token sampled needs no place in the cache.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        max_batch_tokens: int,
        max_length: int,
        *,
        policy: str = "fcfs",
        prefix_cache: bool = True,
        max_waiting: int = 65536,
        target_step_s: float = 0.0,
    ) -> None:
        if policy not in POLICIES:
            raise SettingError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}.")
        if max_batch_tokens < num_rows:
            raise SettingError(
                f"max_batch_tokens is {max_batch_tokens}, less than the {num_rows} rows; each may need a token a step.",
                hint=f"set max_batch_tokens to at least {num_rows}.",
            )
        self.max_batch_tokens = max_batch_tokens
        self.max_length = max_length
        self.max_waiting = max_waiting
        self.ledger = Ledger(num_blocks, block_size, prefix_cache)
        self._num_slots = num_blocks * block_size
        self._by_priority = policy == "priority"
        self._waiting = WaitingQueue()
        self._running = Running(self.ledger, self._waiting, num_rows)
        self._pace = Pace(target_step_s) if target_step_s else None
        self._flights: deque[Flight] = deque()
        self._last_crew: Crew | None = None
        self._num_added = 0

    def add(self, request: Request, mask: Mask | None = None) -> None:
        """Take a request in. Raises RequestError if it can never run or the queue is full; nothing is kept then."""
        limit = self._limit(request)
        if request.id in self._running.requests:
            raise RequestError(f"a request with the id {request.id!r} is live already.", param="id")
        if self._num_waiting >= self.max_waiting:
            raise RequestError(
                f"{self._num_waiting} requests wait already; the limit is {self.max_waiting}.",
                code="queue_full",
                hint="try again later.",
            )
        importance = checked_priority(request.priority) if self._by_priority else 0
        chain = self.ledger.chain(request.salt)
        self._running.enter(Progress(request, mask, chain, importance, self._num_added + 1, limit))
        self._num_added += 1

    def _limit(self, request: Request) -> int:
        """The length of prompt and answer at which the request ends."""
        length, wanted = len(request.prompt), request.params.max_tokens
        if not length:
            raise RequestError("the prompt is empty; at least one token is needed.", param="prompt")
        limit = length + (wanted or 1)
        param = "prompt" if length >= min(self.max_length, self._num_slots + 1) else "max_tokens"
        if limit > self.max_length:
            raise ContextLengthError(
                f"the prompt has {length} tokens and {wanted or 1} more may be generated, together {limit}; "
                f"the context limit is {self.max_length}.",
                param=param,
                hint="shorten the prompt or lower max_tokens.",
            )
        if limit - 1 > self._num_slots:
            raise CapacityError(
                f"the prompt has {length} tokens and {wanted or 1} more may be generated; the KV pool holds "
                f"{self._num_slots} tokens ({self.ledger.pool.num_blocks} blocks of {self.ledger.block_size}).",
                param=param,
                hint="shorten the prompt, lower max_tokens, or give the engine more memory (kv_cache_memory).",
            )
        return limit if wanted is not None else min(self.max_length, self._num_slots + 1)

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting) + self._running.num_parked

    def abort(self, request: str) -> Change | None:
        """End a request now, in whatever state; None if it is unknown or has ended."""
        progress = self._running.requests.get(request)
        if progress is None:
            return None
        self._running.end(progress)
        return Change(request, finish="abort", cached=0 if progress.spoke else max(progress.cached, 0))

    def plan(self) -> StepPlan | None:
        """What the next step does; None if nothing can be computed until a commit, an add, or a grammar is ready."""
        running = self._running
        draft = Draft(running.step + 1)
        running.beat.step = draft.step  # nobody follows it if the last plan came to nothing
        running.tidy()
        if running.leaving:
            running.resolve_leaving()
        plan_decodes(running, draft)
        plan_prefills(running, draft, self._prefill_budget(draft.num_decodes))
        if not draft.spans and not draft.crew.owners:
            assert not draft.copies and not draft.masks, "a copy or a mask without a span"
            return None
        return self._finish(draft)

    def _prefill_budget(self, num_decodes: int) -> int:
        left = self.max_batch_tokens - num_decodes
        return min(left, self._pace.chunk) if self._pace is not None and self._running.decoding else left

    def _finish(self, draft: Draft) -> StepPlan:
        running, flight = self._running, draft.flight()
        departed, running.departed = running.departed, []
        preempted, running.preempted = running.preempted, []
        pure = not draft.spans
        still = not (draft.arrivals or departed or draft.copies or draft.masks)
        steady = pure and still and draft.crew is self._last_crew
        self._last_crew = draft.crew if pure else None
        running.step = draft.step
        self._flights.append(flight)
        for progress in draft.owners[draft.num_alone :]:
            assert progress.table is not None
            self.ledger.learn(progress.table, progress.tokens, progress.computed)
            if progress.siblings and progress.prompt_step >= 0:
                running.unpark(progress)
        for progress in draft.ending:
            running.give_row(progress)
        return StepPlan(
            draft.step, flight.spans, draft.arrivals, departed, draft.copies, draft.masks,
            draft.num_decodes, steady, preempted, draft.held,
        )  # fmt: skip

    def commit(self, result: StepResult) -> Changes:
        """Settle the oldest step in flight. One change a request that has news; ghosts have none."""
        flight = self._flights.popleft()
        assert flight.step == result.step, f"step {flight.step} was to come home, not {result.step}"
        if result.failed:
            undo(self._running, flight, self._flights, result.failed)
        self.ledger.settle(flight.step)
        if self._pace is not None:
            times = result.times
            self._pace.tell(flight.num_decodes, flight.num_prefill, times.computed_s - times.began_s)
        return settle(self._running, flight, result)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._running.requests and not self._flights

    def reset_prefix(self) -> None:
        """Forget all cached K and V: the weights were swapped. Call it when idle; what runs goes on with its own."""
        self.ledger.reset_prefix()

    def statistics(self) -> SchedulerStatistics:
        running = self._running
        return SchedulerStatistics(
            num_waiting=self._num_waiting,
            num_running=sum(len(part) for part in (running.decoding, running.prefilling, running.leaving)),
            num_prefilling=len(running.prefilling),
            num_in_flight=len(self._flights),
            num_steps=running.step,
            num_preemptions=running.num_preemptions,
            kv=self.ledger.statistics(),
            chunk_tokens=self._prefill_budget(0),
        )

    def check(self) -> None:
        """Assert the invariants. When idle, everything taken must be home."""
        self._running.check()
        if self.idle:
            kv = self.ledger.statistics()
            assert kv.num_owned == kv.num_pending == kv.num_tables == 0, f"idle, yet blocks are owned: {kv}"
            assert len(self._running.free_rows) == self._running.num_rows
            assert not self._num_waiting
