"""Plans are plain data (invariant 1): recorded, pickled and replayed on another runner, they give the same tokens."""

import pickle

from tandem.bench.drive import SharedRunner, drive, requests_of
from tandem.bench.workload import random_lengths
from tandem.observe.requests import RequestLedger
from tandem.observer import Observer
from tandem.plan import StepPlan
from tandem.request import SamplingParams
from tandem.runner.null import NullRunner
from tandem.schedule.scheduler import Scheduler


class Recorder(Observer):
    """Keeps each plan as bytes, and whose tokens came home."""

    def __init__(self) -> None:
        self.pickled: list[bytes] = []
        self.tokens: list[list[int]] = []

    def step_submitted(self, plan: StepPlan, began_s: float, planned_s: float, submitted_s: float) -> None:
        self.pickled.append(pickle.dumps(plan))

    def step_collected(self, plan, result, changes, began_s, home_s, settled_s) -> None:  # type: ignore[no-untyped-def]
        self.tokens.append(list(result.tokens))


def runner(depth: int) -> NullRunner:
    return NullRunner(num_blocks=9, block_size=4, num_rows=4, num_logits=500, max_length=64, depth=depth, verify=True)


def test_recorded_plans_replay_on_another_runner() -> None:
    recorder, ledger = Recorder(), RequestLedger()
    planner = Scheduler(9, 4, 4, 8, 64)
    workload = random_lengths(9, (3, 20), (2, 12), 500)
    run = drive(
        "recorded", planner, SharedRunner(runner(2), 2), requests_of(workload, SamplingParams(temperature=0.0)),
        [recorder, ledger],
    )  # fmt: skip
    assert run.metrics is not None and run.metrics.num_preemptions > 0, "the pool is too small for all at once"
    other = runner(1)
    replayed = []
    for data in recorder.pickled:
        plan = pickle.loads(data)
        replayed.append(list(other.collect(other.submit(plan)).tokens))
    assert replayed == recorder.tokens
    run.metrics.check()
    accounts = ledger.accounts()
    assert len(accounts) == 9
    for account in accounts:
        assert abs(sum(account.parts_s.values()) - account.total_s) <= 1e-6 + 0.01 * account.total_s
    assert sum(account.num_preemptions for account in accounts) == run.metrics.num_preemptions
    assert (
        sum(account.num_tokens for account in accounts) == workload.num_new_tokens == run.metrics.num_generated_tokens
    )
    assert any(set(account.queue_why) & {"rows", "blocks"} for account in accounts)
