"""Chunks of prompts beside decodes follow the measured speed, so that a step takes what it should."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_drive import Drive, alone, request

from tandem.plan import StepPlan
from tandem.runner.null import VirtualClock
from tandem.schedule.pace import FIRST_CHUNK, LEAST_CHUNK, Pace

TARGET_S = 0.2


def paced(per_token_s: float, target_s: float = TARGET_S, depth: int = 2, base_s: float = 0.05, **more) -> Drive:
    """A device that takes base_s a step, per_token_s a prompt token, and more the longer the context is."""

    def step_time(plan: StepPlan) -> float:
        return base_s + sum(per_token_s * s.length * (1 + s.start / 2000) for s in plan.spans[plan.num_decodes :])

    clock = VirtualClock()
    runner = {"step_time": step_time, "clock": clock, "sleep": clock.sleep}
    size = {"num_blocks": 400, "num_rows": 8, "budget": 512, "max_length": 4096, "verify": False, **more}
    drive = Drive(depth, runner=runner, target_step_s=target_s, **size)
    drive.step_time = step_time  # type: ignore[attr-defined]
    return drive


def beside_streams(drive: Drive, length: int = 2000) -> list[StepPlan]:
    """The plans of a long prompt beside four streams."""
    drive.add(*(request(f"stream{i}", 20, 2000) for i in range(4)))
    drive.run(until=lambda: all(len(answer.tokens) > 5 for answer in drive.answers.values()))
    begin = len(drive.plans)
    drive.add(request("long", length, 1))
    drive.run(until=lambda: drive.answers["long"].finish is not None)
    return [plan for plan in drive.plans[begin:] if len(plan.spans) > plan.num_decodes]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("per_token_s", [0.001, 0.002, 0.003])
def test_c05_a_step_with_decodes_takes_what_it_should_and_the_prompt_loses_little(depth, per_token_s) -> None:
    drive = paced(per_token_s, depth=depth)
    plans = beside_streams(drive, 3000)
    times = [drive.step_time(plan) for plan in plans]
    assert max(times) <= 1.25 * TARGET_S and all(plan.num_decodes == 4 for plan in plans)
    settled = times[4 + 2 * depth : -1]
    assert all(0.8 * TARGET_S <= taken <= 1.15 * TARGET_S for taken in settled) and len(settled) >= 3
    assert sum(times) <= 1.7 * sum(per_token_s * s.length * (1 + s.start / 2000) for p in plans for s in p.spans[4:])


def test_without_a_target_the_whole_budget_is_used() -> None:
    plans = beside_streams(paced(0.002, target_s=0.0))
    assert [plan.num_tokens for plan in plans[:3]] == [512] * 3


def test_with_no_decodes_the_whole_budget_is_used() -> None:
    drive = paced(0.002)
    drive.add(request("long", 2000, 1))
    drive.run()
    assert [plan.num_tokens for plan in drive.plans] == [512, 512, 512, 464]
    assert drive.scheduler.statistics().chunk_tokens == 512


def test_a_prompt_goes_on_beside_decodes_that_alone_take_too_long() -> None:
    plans = beside_streams(paced(0.002, base_s=0.3), length=200)
    assert all(plan.num_tokens - 4 >= LEAST_CHUNK for plan in plans[:-1])


def test_what_is_planned_hangs_on_nothing_but_what_was_told() -> None:
    first, second = (beside_streams(paced(0.002)) for _ in range(2))
    assert [plan.spans for plan in first] == [plan.spans for plan in second]


@settings(deadline=None, max_examples=25)
@given(
    laws=st.tuples(st.sampled_from([0.0, 0.01, 0.5]), st.sampled_from([0.0, 1e-5, 0.003, 0.1])),
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=7),
    depth=st.integers(1, 3),
)
def test_the_same_tokens_whatever_the_chunks(laws, lengths, depth) -> None:
    drive = paced(laws[1], depth=depth, base_s=laws[0], verify=True, num_blocks=150)
    everyone = [request(f"r{i}", length, tokens) for i, (length, tokens) in enumerate(lengths)]
    for one in everyone:
        drive.add(one)
        drive.turn()
    answers = drive.run()
    for one in everyone:
        assert answers[one.id].tokens == alone(one).tokens


def test_the_chunk_settles_where_a_step_takes_the_target_whatever_the_law() -> None:
    """Small chunks look slow, since each step costs something: that must not keep them small."""
    for law in (lambda n: 0.08 + 0.002 * n, lambda n: 0.01 * n**0.6, lambda n: 0.05 + 1e-6 * n * n):
        pace = Pace(TARGET_S)
        pace.tell(4, 0, law(0) or 0.01)
        for _ in range(20):
            pace.tell(4, pace.chunk, law(pace.chunk))
        assert law(pace.chunk) == pytest.approx(TARGET_S, rel=0.05)


def test_what_says_little_moves_little() -> None:
    pace = Pace(TARGET_S)
    assert pace.chunk == FIRST_CHUNK
    pace.tell(4, 32, 0.0)  # a device that tells no times
    assert pace.chunk == FIRST_CHUNK
    pace.tell(0, 512, 1.0)
    assert pace.chunk == int(TARGET_S * 512)
    pace.tell(4, 100, 0.2)
    before = pace.chunk
    pace.tell(4, 3, 0.1)  # the end of a prompt: hardly any of its time is its tokens'
    assert pace.chunk == before
    pace.tell(4, 100, 0.05)
    assert before < pace.chunk <= 200, "one quick step may double the chunk, not more"
    pace.tell(4, 3, 5.0)
    assert pace.chunk < 100, "one slow step is heard at once"
