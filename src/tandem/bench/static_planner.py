"""Static batching, the baseline that the field left behind, as a Planner. It does not know the scheduler.

It takes a fixed number of requests, pads all prompts to the longest, and computes every row until the slowest has
finished; only then does the next batch begin. Model, kernels and cache are the ones that tandem batching uses, so a
comparison shows batching alone. Padding is computed for good, as it would be with padded tensors:

    row 0   prompt prompt prompt prompt   token token token token        ░ padding of a short prompt: a row of its own,
    row 1   prompt prompt ░░░░░░ ░░░░░░   token ····· ····· ·····          so that no real position moves
    row 2   prompt prompt prompt ░░░░░░   token token ····· ·····        · a row that has finished and is still computed
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.errors import CapacityError, RequestError, SettingError
from tandem.plan import Arrival, Mask, Span, StepPlan, StepResult
from tandem.request import Change, Request, SamplingParams

PADDING_ID = 0


@dataclass(slots=True)
class _Row:
    """One row of the running batch: a request, or the padding of another row's prompt (request None)."""

    name: str
    row: int
    tokens: Sequence[int]
    params: SamplingParams
    eos: Sequence[int]
    request: Request | None
    computed: int = 0
    num_out: int = 0
    num_blocks: int = 0
    done: bool = False


class StaticStatistics(NamedTuple):
    """Tokens computed: those that somebody wanted, padding of prompts, and rows that had finished."""

    num_useful_tokens: int
    num_prompt_padding: int
    num_row_padding: int

    @property
    def padding_share(self) -> float:
        total = sum(self)
        return (self.num_prompt_padding + self.num_row_padding) / total if total else 0.0


@dataclass(slots=True)
class _Batch:
    """The requests that run together, and the padding rows beside them."""

    rows: list[_Row]
    padding: list[_Row]
    longest: int
    max_out: int
    arrived: bool = False
    decoded: int = 0
    flight: deque[StepPlan] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        return all(row.done for row in self.rows)


class StaticPlanner:
    """A plan.Planner with batches of batch_size that run to the end of the slowest.

    num_blocks, block_size, num_rows, max_length   of the runner.      max_tokens   most tokens in one step.
    first_block   the first block id that may be used.
    A batch takes up to two rows a request: its own and one for the padding of its prompt.
    """

    def __init__(
        self, batch_size: int, *, num_blocks: int, block_size: int, num_rows: int, max_length: int, max_tokens: int,
        first_block: int = 0,
    ) -> None:  # fmt: skip
        if 2 * batch_size > num_rows:
            raise SettingError(
                f"static batching of {batch_size} needs {2 * batch_size} rows, padding included; there are {num_rows}.",
                hint=f"raise max_num_seqs to {2 * batch_size} or lower the batch.",
            )
        self._batch_size, self._block_size = batch_size, block_size
        self._num_blocks, self._first_block = num_blocks - first_block, first_block
        self._max_length, self._max_tokens = max_length, max(max_tokens, batch_size)
        self._waiting: dict[str, Request] = {}
        self._batch: _Batch | None = None
        self._departures: list[int] = []
        self._step = 0
        self._next_block = first_block
        self._useful = self._prompt_padding = self._row_padding = 0
        self._last: tuple[int, ...] = ()

    def add(self, request: Request, mask: Mask | None = None) -> None:
        if mask is not None:
            raise RequestError("static batching has no grammars.", param="response_format")
        wanted = len(request.prompt) + (request.params.max_tokens or self._max_length - len(request.prompt))
        if self._blocks_for(wanted) > self._num_blocks:
            raise CapacityError(f"{wanted} tokens need more than the pool's {self._num_blocks} blocks.")
        self._waiting[request.id] = request

    def abort(self, request: str) -> Change | None:
        if self._waiting.pop(request, None) is not None:
            return Change(request, finish="abort")
        for row in self._batch.rows if self._batch else ():
            if row.name == request and not row.done:
                row.done = True
                return Change(request, finish="abort")
        return None

    def plan(self) -> StepPlan | None:
        batch = self._batch
        if batch is not None and batch.done:
            if batch.flight:
                return None
            self._departures += [row.row for row in batch.rows + batch.padding]
            self._batch = batch = None
        if batch is None:
            if not self._waiting:
                return None
            self._batch = batch = self._form()
        spans, num_decodes = self._spans(batch)
        if not spans:
            return None
        arrivals: list[Arrival] = []
        if not batch.arrived:
            batch.arrived = True
            arrivals = [
                Arrival(row.name, row.row, row.tokens, len(row.tokens), row.params, tuple(row.eos))
                for row in batch.rows + batch.padding
            ]
        steady = not arrivals and num_decodes == len(spans) and self._last == tuple(s.row for s in spans)
        self._last = tuple(s.row for s in spans) if num_decodes == len(spans) else ()
        self._step += 1
        plan = StepPlan(self._step, spans, arrivals, tuple(self._departures), num_decodes=num_decodes, steady=steady)
        self._departures = []
        batch.flight.append(plan)
        return plan

    def commit(self, result: StepResult) -> list[Change]:
        batch = self._batch
        assert batch is not None
        plan = batch.flight.popleft()
        rows = {row.name: row for row in batch.rows}
        changes: list[Change] = []
        index = 0
        for span in plan.spans:
            row = rows.get(span.request)
            if span.samples:
                token, index = result.tokens[index], index + 1
            if row is None or row.done:
                continue
            if span.request in result.failed:
                row.done = True
                changes.append(Change(row.name, finish="error", error=result.failed[span.request]))
            elif span.samples:
                changes.append(self._sampled(row, token))
        return changes

    @property
    def idle(self) -> bool:
        return not self._waiting and (self._batch is None or (self._batch.done and not self._batch.flight))

    def statistics(self) -> StaticStatistics:
        return StaticStatistics(self._useful, self._prompt_padding, self._row_padding)

    def _sampled(self, row: _Row, token: int) -> Change:
        row.num_out += 1
        params = row.params
        limit = params.max_tokens or self._max_length - len(row.tokens)
        finish = None
        ends = token in params.stop_token_ids or (token in row.eos and not params.ignore_eos)
        if ends and row.num_out >= params.min_tokens:
            finish = "stop"
        if finish is None and row.num_out >= limit:
            finish = "length"
        row.done = finish is not None
        return Change(row.name, (token,), finish)  # type: ignore[arg-type]

    def _form(self) -> _Batch:
        """Take the next batch_size requests, or as many as the pool holds padded."""
        chosen: list[Request] = []
        longest = max_out = 0
        for request in self._waiting.values():
            length = max(longest, len(request.prompt))
            out = max(max_out, request.params.max_tokens or self._max_length - len(request.prompt))
            blocks = self._blocks_for(min(length + out, self._max_length)) + self._blocks_for(length)
            if len(chosen) == self._batch_size or (chosen and (len(chosen) + 1) * blocks > self._num_blocks):
                break
            chosen.append(request)
            longest, max_out = length, out
        rows: list[_Row] = []
        padding: list[_Row] = []
        for index, request in enumerate(chosen):
            del self._waiting[request.id]
            rows.append(_Row(request.id, index, request.prompt, request.params, tuple(request.eos), request))
            if missing := longest - len(request.prompt):
                tokens = [PADDING_ID] * missing
                row = len(chosen) + len(padding)
                greedy = SamplingParams(temperature=0.0)
                padding.append(_Row(f"{request.id} padding", row, tokens, greedy, (), None))
        self._next_block = self._first_block
        return _Batch(rows, padding, longest, max_out)

    def _spans(self, batch: _Batch) -> tuple[list[Span], int]:
        """The next piece of the batch's prefill, or one token a row."""
        left = self._max_tokens
        spans: list[Span] = []
        for row in batch.rows + batch.padding:
            length = min(left, len(row.tokens) - row.computed)
            if length > 0:
                last = row.computed + length == len(row.tokens)
                spans.append(self._span(row, length, samples=last))
                left -= length
                self._useful += length if row.request is not None else 0
                self._prompt_padding += length if row.request is None else 0
        if spans:
            return spans, 0
        if batch.decoded >= batch.max_out - 1:
            return [], 0
        batch.decoded += 1
        for row in batch.rows:
            if row.computed < self._max_length:
                self._useful += not row.done
                self._row_padding += row.done
                spans.append(self._span(row, 1, samples=True))
        return spans, len(spans)

    def _span(self, row: _Row, length: int, samples: bool) -> Span:
        missing = self._blocks_for(row.computed + length) - row.num_blocks
        blocks = tuple(range(self._next_block, self._next_block + missing))
        self._next_block += missing
        row.num_blocks += missing
        span = Span(row.name, row.row, row.computed, length, blocks, samples)
        row.computed += length
        return span

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
