"""Many requests: everything comes home, memory stays flat, and a step costs the same however many wait."""

import random
import statistics
import sys
import time
from collections import deque

import pytest
from null_drive import Drive, request

from tandem.request import Request, SamplingParams
from tandem.runner.null import NullRunner
from tandem.schedule import Scheduler


@pytest.mark.slow
def test_100_000_short_requests_with_every_tenth_aborted_leave_nothing_behind() -> None:
    choose = random.Random(0)
    drive = Drive(2, num_blocks=512, num_rows=256, budget=2048, verify=False, checked=False)
    drive.scheduler.max_waiting = 2000
    levels = []
    for batch in range(50):
        names = [f"{batch}.{i}" for i in range(2000)]
        for name in names:
            drive.add(
                request(name, [choose.randrange(9) for _ in range(choose.randrange(1, 20))], choose.randrange(1, 5))
            )
        doomed = deque(choose.sample(names, 200))
        while doomed and drive.turn():
            for _ in range(min(12, len(doomed))):
                drive.abort(doomed.popleft())
        drive.run()
        assert all(drive.answers[name].finish for name in names)
        drive.answers.clear()
        if batch % 10 == 9:
            levels.append(sys.getallocatedblocks())
    drive.scheduler.check()
    assert drive.scheduler.idle and drive.scheduler.statistics().kv.num_owned == 0
    assert not drive.scheduler._running.requests and not drive.scheduler._running.decoding
    assert levels[-1] < levels[0] + 2000, levels  # 80,000 requests later, a fortieth of an object each


def step_cost_s(num_rows: int, num_waiting: int) -> float:
    """Median host time of plan and commit in a pure decode step."""
    num_blocks = 16 * num_rows
    scheduler = Scheduler(num_blocks, 16, num_rows, 8192, 4096)
    runner = NullRunner(num_blocks, 16, num_rows, depth=2)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for i in range(num_rows + num_waiting):
        scheduler.add(Request(f"r{i}", [i % 1000, i // 1000], params))
    flight, costs = deque(), []
    for _ in range(120):
        began = time.perf_counter()
        plan = scheduler.plan()
        cost = time.perf_counter() - began
        assert plan is not None
        flight.append(runner.submit(plan))
        if len(flight) == 2:
            result = runner.collect(flight.popleft())
            began = time.perf_counter()
            scheduler.commit(result)
            costs.append(cost + time.perf_counter() - began)
    return statistics.median(costs[20:])


def test_a_step_costs_the_same_however_many_wait() -> None:
    pairs = [(step_cost_s(256, 0), step_cost_s(256, 50_000)) for _ in range(2)]
    none, many = (min(cost) for cost in zip(*pairs, strict=True))
    assert many < 1.5 * none + 50e-6, f"{none * 1e6:.0f} µs with none waiting, {many * 1e6:.0f} µs with 50,000"
    assert none < 1.5e-3, "ten times the target, so that a busy machine passes"
