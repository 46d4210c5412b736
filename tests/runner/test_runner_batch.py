"""Packer and Assembler against a sequence-by-sequence account of what each step must feed the model."""

import random
from collections import deque

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_drive import Drive, greedy

from tandem.plan import StepResult
from tandem.runner.batch import Assembler, Packer
from tandem.runner.rows import DeviceRows

BLOCK_SIZE = 4


class Account:
    """A made-up runner: samples position-dependent tokens, and checks every tensor of every batch."""

    def __init__(self, depth: int, num_rows: int, max_blocks: int) -> None:
        self.depth = depth
        self.packer = Packer(num_rows, max_blocks)
        self.rows = DeviceRows.allocate(num_rows, max_blocks, torch.device("cpu"))
        self.assembler = Assembler(self.rows, BLOCK_SIZE)
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.queue: deque = deque()
        self.num_reused = 0

    def submit(self, plan):
        self.queue.append(self.packer.pack(plan))

    def collect(self, _ticket):
        packed = self.queue.popleft()
        plan = packed.plan
        for arrival in plan.arrivals:
            self.tables[arrival.row], self.tokens[arrival.row] = [], list(arrival.tokens)
        self.rows.grow(torch.tensor((packed.places_C, packed.blocks_C), dtype=torch.int32))
        self.num_reused += packed.layout is None
        batch = self.assembler.assemble(packed)
        self.check(plan, batch)
        home = []
        for span in plan.spans:
            if span.samples:
                token = 1000 + 7 * (span.start + span.length) + len(span.request)
                self.rows.last_R[span.row] = token
                del self.tokens[span.row][span.start + span.length :]
                self.tokens[span.row].append(token)
                home.append(token)
        return StepResult(plan.step, home)

    def check(self, plan, batch):
        ids, positions, slots, starts = [], [], [], [0]
        for index, span in enumerate(plan.spans):
            self.tables[span.row] += span.blocks
            table = self.tables[span.row]
            for position in range(span.start, span.start + span.length):
                ids.append(self.tokens[span.row][position])
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(len(ids))
            used = -(-(span.start + span.length) // BLOCK_SIZE)
            assert batch.tables_SB[index, :used].tolist() == table[:used]
        assert batch.ids_T.tolist() == ids
        assert batch.positions_T.tolist() == positions
        assert batch.slots_T.tolist() == slots
        assert batch.query_starts_S1.tolist() == starts
        assert batch.lengths_S.tolist() == [s.start + s.length for s in plan.spans]
        assert batch.host_spans == [(s.start, s.length) for s in plan.spans]
        assert batch.max_query >= max(s.length for s in plan.spans)
        assert batch.max_length >= max(s.start + s.length for s in plan.spans)
        wanted = [starts[i + 1] - 1 for i, s in enumerate(plan.spans) if s.samples]
        got = list(range(len(ids))) if batch.sampled_R is None else batch.sampled_R.tolist()
        assert got[: len(wanted)] == wanted


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([None, 1, 3, 5]))
def test_batches_are_what_the_sequences_say(seed, depth, chunk):
    rng = random.Random(seed)
    requests = [
        (f"r{i}", [rng.randrange(500) for _ in range(rng.randint(1, 17))], greedy(rng.randint(1, 12))) for i in range(6)
    ]
    drive = Drive(requests, 4, 64, BLOCK_SIZE, chunk=chunk, seed=seed, preempt=0.1, join=0.5)
    account = Account(depth, 4, 12)
    outputs = drive.run(account)
    for id, prompt, params in requests:
        expected = [1000 + 7 * (len(prompt) + i) + len(id) for i in range(params.max_tokens)]
        assert outputs[id] == expected


def test_steady_steps_reuse_the_batch():
    drive = Drive([("a", [1, 2, 3], greedy(20)), ("b", [4, 5], greedy(20))], 2, 32, BLOCK_SIZE)
    account = Account(2, 2, 12)
    drive.run(account)
    assert account.num_reused == drive.num_steady > 15


def test_prompt_logprobs_add_rows_behind_the_samples():
    params = greedy(1, prompt_logprobs=2)
    drive = Drive([("a", [1, 2, 3, 4, 5], params), ("b", [9, 8], greedy(1))], 2, 32, BLOCK_SIZE, chunk=3)
    packer = Packer(2, 8)
    first, second = packer.pack(drive.plan()), packer.pack(drive.plan())
    assert first.num_samples == 1 and first.layout.sampled_R.tolist() == [4, 0, 1, 2]
    assert [(s.span, s.first, s.num_positions, s.targets.tolist()) for s in first.layout.stretches] == [
        (0, 1, 3, [2, 3, 4])
    ]
    (stretch,) = second.layout.stretches
    assert (stretch.num_positions, stretch.targets.tolist()) == (1, [5])  # position 4 predicts no prompt token
