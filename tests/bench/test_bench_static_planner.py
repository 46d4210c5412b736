"""Static batching on the null runner, against the scheduler on the same one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.bench.drive import SharedRunner, drive, requests_of
from tandem.bench.static_planner import StaticPlanner
from tandem.bench.workload import Asked, Workload, fixed
from tandem.errors import SettingError
from tandem.plan import StepPlan, StepResult
from tandem.request import Request, SamplingParams
from tandem.runner.null import NullRunner
from tandem.schedule.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0)


def static(batch: int, runner: NullRunner, max_tokens: int = 64) -> StaticPlanner:
    facts = runner.facts
    return StaticPlanner(
        batch, num_blocks=facts.num_blocks, block_size=runner.block_size, num_rows=facts.num_rows,
        max_length=facts.max_length, max_tokens=max_tokens,
    )  # fmt: skip


def scheduler(rows: int, runner: NullRunner, max_tokens: int = 64) -> Scheduler:
    facts = runner.facts
    return Scheduler(facts.num_blocks, runner.block_size, rows, max_tokens, facts.max_length, prefix_cache=False)


def workload(*sizes: tuple[int, int]) -> Workload:
    asked = tuple(Asked(tuple((7 * i + j) % 900 for j in range(length)), new) for i, (length, new) in enumerate(sizes))
    return Workload("mixed", asked)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(4, 64),
)
def test_static_gives_the_tokens_of_continuous_batching(
    sizes: list[tuple[int, int]], batch: int, depth: int, max_tokens: int
) -> None:
    asked = workload(*sizes)
    runs = []
    for make in (static, scheduler):
        runner = NullRunner(num_blocks=96, block_size=4, num_rows=8, num_logits=1000, max_length=64, verify=True)
        shared = SharedRunner(runner, depth)
        runs.append(drive("x", make(batch, runner, max(max_tokens, batch)), shared, requests_of(asked, GREEDY)))
    assert runs[0].tokens == runs[1].tokens
    assert [len(tokens) for tokens in runs[0].tokens] == [new for _, new in sizes]


def test_padding_is_counted() -> None:
    runner = NullRunner(num_blocks=64, num_rows=4, verify=True)
    planner = static(2, runner)
    run = drive("static", planner, SharedRunner(runner, 1), requests_of(workload((10, 2), (4, 8)), GREEDY))
    figures = planner.statistics()
    assert figures.num_useful_tokens == 10 + 4 + 1 + 7, "prompts, and each token that is fed back"
    assert figures.num_prompt_padding == 6, "the short prompt is padded to the long one"
    assert figures.num_row_padding == 6, "the quick row is computed until the slow one has finished"
    assert run.padding_share == pytest.approx(12 / 34)
    assert run.metrics is not None and run.metrics.num_steps == 8


def test_the_next_batch_waits_for_the_slowest() -> None:
    runner = NullRunner(num_blocks=64, num_rows=4, verify=True)
    plans: list[StepPlan] = []

    class Recorder(SharedRunner):
        def submit(self, plan: StepPlan) -> object:
            plans.append(plan)
            return super().submit(plan)

    drive("static", static(2, runner), Recorder(runner, 2), requests_of(workload((4, 2), (4, 9), (4, 1)), GREEDY))
    arrivals = {arrival.request: plan.step for plan in plans for arrival in plan.arrivals}
    assert arrivals == {"mixed #0": 1, "mixed #1": 1, "mixed #2": 10}
    assert all(len(plan.spans) == 2 for plan in plans[:9]), "both rows run to the end of the slower"
    assert [plan.steady for plan in plans] == [False, False] + [True] * 7 + [False]


def test_an_end_of_sequence_ends_the_batch_early() -> None:
    runner = NullRunner(num_blocks=64, num_rows=4, script=[5, 6, 2, 9], verify=True)
    planner = static(2, runner)
    requests = [Request(name, [1, 2], SamplingParams(temperature=0.0, max_tokens=50), eos=(2,)) for name in "ab"]
    run = drive("static", planner, SharedRunner(runner, 2), requests)
    assert run.tokens == [[5, 6, 2]] * 2
    assert [record.finish for record in run.records] == ["stop"] * 2
    assert planner.idle


def test_aborts_and_failures_harm_nobody_else() -> None:
    runner = NullRunner(num_blocks=64, num_rows=6, verify=True)
    planner = static(3, runner)
    for request in requests_of(workload((4, 6), (4, 6), (4, 6), (4, 6)), GREEDY):
        planner.add(request)
    plan = planner.plan()
    assert plan is not None
    planner.commit(runner.collect(runner.submit(plan)))
    assert planner.abort("mixed #0") is not None and planner.abort("mixed #0") is None
    assert planner.abort("mixed #3") is not None and planner.abort("nobody") is None
    plan = planner.plan()
    assert plan is not None
    result: StepResult = runner.collect(runner.submit(plan))
    result.failed["mixed #1"] = "no"
    changes = planner.commit(result)
    assert {(change.request, change.finish) for change in changes} == {("mixed #1", "error"), ("mixed #2", None)}
    while (plan := planner.plan()) is not None:
        changes = planner.commit(runner.collect(runner.submit(plan)))
    assert [(change.request, change.finish) for change in changes] == [("mixed #2", "length")]
    assert planner.idle


def test_too_few_rows_is_an_error_that_teaches() -> None:
    with pytest.raises(SettingError, match="max_num_seqs to 16"):
        static(8, NullRunner(num_rows=8))


def test_one_runner_serves_planners_in_turn() -> None:
    runner = NullRunner(num_blocks=64, num_rows=8, depth=3)
    asked = fixed(4, 8, 6, 1000)
    taken: set[int] = set()
    tokens = []
    for planner, depth in ((static(4, runner), 1), (scheduler(4, runner), 1), (scheduler(4, runner), 3)):
        shared = SharedRunner(runner, depth, taken)
        tokens.append(drive("x", planner, shared, requests_of(asked, GREEDY)).tokens)
        taken = shared.taken
    assert tokens[0] == tokens[1] == tokens[2]
