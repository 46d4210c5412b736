"""A runner without a device: it keeps the contract, simulates the KV cache, and makes its tokens up. No torch.

It knows no model. A slot of the simulated cache holds a number made of the token, its position and all that stood
before it; the next token is a hash of what a row *reads back through its block table*, over all its positions. So a
wrong table, a block freed too early, a lost copy or a wrong carry gives wrong tokens, as on a device.

Reading everything back costs O(context), so a row keeps a running hash and only adds what it wrote; with ``verify``
everything is read back every time, and every plan is checked against the contract of plan.py.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from tandem.errors import TandemError
from tandem.plan import Arrival, Span, StepPlan, StepResult, StepTimes
from tandem.request import TokenLogprobs
from tandem.runner.contract import RunnerFacts, Ticket
from tandem.runner.plan_check import PlanCheck

_ROOT = 0x1F3D5B79A2C4E68  # the hash of nothing; hashes of tuples of ints are the same in every process

Script = Callable[[Arrival], Sequence[int] | None]
StepTime = Callable[[StepPlan], float]


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, for tests.

    raise_at  the step whose collect raises.    hang_at  the step whose collect returns only when it is closed.
    fail      says with which message a request fails at its first step, or None.
    """

    raise_at: int | None = None
    hang_at: int | None = None
    fail: Callable[[Arrival], str | None] | None = None


class VirtualClock:
    """Time that passes only when somebody sleeps; give its methods to NullRunner as clock and sleep."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


class _Row:
    """One request's state on the made-up device. hash covers positions 0 .. length-1, read through blocks."""

    __slots__ = ("arrival", "blocks", "hash", "last", "length", "script", "seed", "special")

    def __init__(self, arrival: Arrival, script: Sequence[int] | None) -> None:
        self.arrival = arrival
        self.blocks: list[int] = []
        self.hash = _ROOT
        self.length = 0
        self.last = 0
        self.seed = hash((arrival.params.seed,)) if arrival.params.seed else 0
        self.script = script
        self.special = script is not None or arrival.params.logprobs is not None


class NullRunner:
    """Implements runner.contract.Runner.

    num_logits  made-up ids are 0 .. num_logits-1.
    script      what a request says, token by token, instead of made-up ids: one list for all, or a function of its
                arrival (None: made up). Behind its end come an eos id, if the request has one, or made-up ids. What a
                mask forbids is not said.
    step_time   seconds a step takes, or a function of the plan; steps queue up on the device. 0: no pacing.
    clock, sleep  the host's time; a VirtualClock makes it pass without waiting.
    verify      read everything back every time, and check each plan.
    """

    def __init__(
        self,
        num_blocks: int = 4096,
        block_size: int = 16,
        num_rows: int = 256,
        num_logits: int = 32000,
        max_length: int = 32768,
        *,
        depth: int = 2,
        script: Script | Sequence[int] | None = None,
        step_time: float | StepTime = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        faults: Faults | None = None,
        verify: bool = False,
    ) -> None:
        self.depth = depth
        self.facts = RunnerFacts(num_blocks, num_rows, num_logits, max_length, notes=("made-up tokens, no device",))
        self.block_size = block_size
        self.num_steps = 0
        self._slots = [0] * (num_blocks * block_size)
        self._rows: list[_Row | None] = [None] * num_rows
        self._script = script
        self._step_time = step_time
        self._clock, self._sleep = clock, sleep
        self._free_at_s = 0.0
        self._faults = faults or Faults()
        self._check = PlanCheck(num_blocks, block_size, num_rows) if verify else None
        self._flights: deque[tuple[Ticket, StepResult]] = deque()
        self._closed = threading.Event()

    def submit(self, plan: StepPlan) -> Ticket:
        if len(self._flights) >= self.depth:
            raise TandemError(f"{len(self._flights)} steps are in flight; the depth is {self.depth}.")
        if self._check is not None:
            self._check.take(plan)
        ticket = Ticket(plan.step, self.num_steps % self.depth)
        self.num_steps += 1
        result = self._compute(plan)
        self._pace(plan, result.times)
        self._flights.append((ticket, result))
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        if not self._flights or self._flights[0][0] is not ticket:
            raise TandemError(f"the ticket of step {ticket.step} is not the oldest one out; tickets redeem once.")
        if ticket.step == self._faults.hang_at:
            self._closed.wait()
            raise TandemError(f"step {ticket.step} was hanging when the runner was closed.")
        result = self._flights.popleft()[1]
        if ticket.step == self._faults.raise_at:
            raise TandemError(f"step {ticket.step} failed, as it was told to.")
        times = result.times
        wait_s = times.computed_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)
        times.home_s = self._clock()
        return result

    def close(self) -> None:
        self._closed.set()
        self._flights.clear()
        self._rows = [None] * self.facts.num_rows

    def _pace(self, plan: StepPlan, times: StepTimes) -> None:
        """The made-up device begins when it is free, and is busy for the step's time."""
        now_s = self._clock()
        duration_s = self._step_time(plan) if callable(self._step_time) else self._step_time
        times.submitted_s = times.ready_s = now_s
        times.began_s = max(now_s, self._free_at_s)
        times.computed_s = self._free_at_s = times.began_s + duration_s

    def _compute(self, plan: StepPlan) -> StepResult:
        tokens: list[int] = []
        result = StepResult(plan.step, tokens)
        rows, slots, size = self._rows, self._slots, self.block_size
        for row in plan.departures:
            rows[row] = None
        for arrival in plan.arrivals:
            self._arrive(arrival, result)
        for source, target in plan.block_copies:
            slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]
        masks = dict(plan.masks)
        begin = 0 if self._check is not None or masks else self._decode(plan, tokens)
        # verify: later spans go first, so that none can lean on what another writes in the same step
        order = range(len(plan.spans) - 1, begin - 1, -1) if self._check else range(begin, len(plan.spans))
        sampled = {index: self._compute_span(index, plan.spans[index], masks, result) for index in order}
        tokens += [token for _, token in sorted(sampled.items()) if token is not None]
        return result

    def _arrive(self, arrival: Arrival, result: StepResult) -> None:
        script = self._script(arrival) if callable(self._script) else self._script
        self._rows[arrival.row] = _Row(arrival, script)
        message = self._faults.fail(arrival) if self._faults.fail is not None else None
        if message is not None:
            result.failed[arrival.request] = message

    def _decode(self, plan: StepPlan, tokens: list[int]) -> int:
        """The plain decodes at the front of the spans, in a tight loop; returns how many there were."""
        rows, slots, size, num_logits = self._rows, self._slots, self.block_size, self.facts.num_logits
        add = tokens.append
        for index, (_, r, start, _, blocks, _) in enumerate(islice(plan.spans, plan.num_decodes)):
            row = rows[r]
            if row is None or row.special:
                return index
            table = row.blocks
            if blocks:
                table.extend(blocks)
            before = row.hash
            slots[table[start // size] * size + start % size] = value = hash((before, row.last, start))
            row.hash = after = hash((before, value))
            row.length = start + 1
            row.last = token = (after + row.seed) % num_logits
            add(token)
        return plan.num_decodes

    def _compute_span(self, index: int, span: Span, masks: dict[int, bytes], result: StepResult) -> int | None:
        """Write the span's positions, read back, and sample if it says so."""
        row = self._rows[span.row]
        if row is None:
            raise TandemError(f"step {result.step} has a span on row {span.row}, which nobody holds.")
        row.blocks += span.blocks
        if row.length != span.start or self._check is not None:
            row.hash, row.length = self._read(row.blocks, span.start), span.start
        known, logprobs = row.arrival.tokens, row.arrival.params.prompt_logprobs
        entries: list[TokenLogprobs] = []
        for position in range(span.start, span.start + span.length):
            self._write(row, known[position] if position < len(known) else row.last)
            if logprobs is not None and position + 1 < row.arrival.prompt_length:
                entries.append(self._logprobs(row.hash, known[position + 1], logprobs))
        if entries:
            result.prompt_logprobs[index] = entries
        if not span.samples:
            return None
        token = self._sample(row, masks.get(span.row))
        if token is None:
            result.failed[span.request] = "its grammar allows no token."
            token = 0
        wanted = row.arrival.params.logprobs
        if wanted is not None:
            result.logprobs[index] = [self._logprobs(row.hash, token, wanted)]
        row.last = token
        return token

    def _write(self, row: _Row, token: int) -> None:
        position, size, before = row.length, self.block_size, row.hash
        slot = row.blocks[position // size] * size + position % size
        self._slots[slot] = value = hash((before, token, position))
        row.hash = hash((before, value))
        row.length = position + 1

    def _read(self, blocks: Sequence[int], length: int) -> int:
        """The hash over positions 0 .. length-1, from what the slots hold."""
        size, slots, value = self.block_size, self._slots, _ROOT
        for begin in range(0, length, size):
            slot = blocks[begin // size] * size
            for number in slots[slot : slot + min(size, length - begin)]:
                value = hash((value, number))
        return value

    def _sample(self, row: _Row, mask: bytes | None) -> int | None:
        number = row.hash + row.seed
        said = self._scripted(row)
        if said is not None and (mask is None or mask[said >> 3] >> (said & 7) & 1):
            return said
        if mask is None:
            return number % self.facts.num_logits
        bits = int.from_bytes(mask, "little")
        allowed = [token for token in range(self.facts.num_logits) if bits >> token & 1]
        return allowed[number % len(allowed)] if allowed else None

    @staticmethod
    def _scripted(row: _Row) -> int | None:
        """What the row's script says next, its end included; None: whatever."""
        if row.script is None:
            return None
        index, params = row.length - row.arrival.prompt_length, row.arrival.params
        if index < len(row.script):
            return row.script[index]
        return row.arrival.eos[0] if row.arrival.eos and not params.ignore_eos else None

    def _logprobs(self, number: int, token: int, num_top: int) -> TokenLogprobs:
        """Made-up, but the same for the same context: the token is the best, and the others fall off behind it."""
        first = -1e-3 * (1 + (number >> 7) % 900)
        num_logits = self.facts.num_logits
        top = tuple(((token + i * (1 + number % 7)) % num_logits, first - i) for i in range(min(num_top, num_logits)))
        return TokenLogprobs(token, first, 1, top)
