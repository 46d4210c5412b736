"""The null runner keeps the contract, and betrays every mistake in a plan by wrong tokens or by name."""

import threading
import time

import pytest

from tandem.errors import TandemError
from tandem.plan import Arrival, Span, StepPlan
from tandem.request import SamplingParams
from tandem.runner.null import Faults, NullRunner, VirtualClock

PROMPT = (5, 6, 7, 8, 9, 10)


def arrival(row: int = 0, tokens: tuple[int, ...] = PROMPT, name: str = "a", **fields: object) -> Arrival:
    cached = fields.pop("cached", 0)
    eos = fields.pop("eos", ())
    return Arrival(name, row, tokens, len(tokens), SamplingParams(**fields), eos, cached)  # type: ignore[arg-type]


def run(runner: NullRunner, *plans: StepPlan) -> list[list[int]]:
    return [list(runner.collect(runner.submit(plan)).tokens) for plan in plans]


def prefill(step: int, blocks: list[int], one: Arrival | None = None) -> StepPlan:
    one = one or arrival()
    length = len(one.tokens) - one.cached
    return StepPlan(step, [Span(one.request, one.row, one.cached, length, blocks, True)], [one])


def decode(step: int, start: int, blocks: tuple[int, ...] = (), **fields: object) -> StepPlan:
    return StepPlan(step, [Span("a", 0, start, 1, blocks, True)], num_decodes=1, **fields)  # type: ignore[arg-type]


def reference(num_tokens: int, verify: bool = False) -> list[int]:
    runner = NullRunner(8, 4, 2, depth=1, verify=verify)
    decodes = [decode(i + 2, 6 + i, (6,) if i == 2 else ()) for i in range(num_tokens - 1)]
    return [tokens[0] for tokens in run(runner, prefill(1, [3, 1]), *decodes)]


def test_tokens_are_the_same_in_chunks_in_other_blocks_and_verified() -> None:
    want = reference(5)
    assert want == reference(5, verify=True) and len(set(want)) == 5
    runner = NullRunner(8, 4, 2, depth=1)
    one = arrival()
    first = StepPlan(1, [Span("a", 0, 0, 2, [7, 2], False)], [one])
    second = StepPlan(2, [Span("a", 0, 2, 4, (), True)])
    tokens = run(runner, first, second, decode(3, 6), decode(4, 7), decode(5, 8, (0,)))
    assert tokens == [[], *([token] for token in want[:4])]


@pytest.mark.parametrize("verify", [False, True])
def test_a_resumed_row_reads_what_is_cached_and_a_wrong_block_gives_wrong_tokens(verify: bool) -> None:
    want = reference(3)
    runner = NullRunner(8, 4, 4, depth=1, verify=verify)
    run(runner, prefill(1, [3, 1]))
    right = arrival(1, (*PROMPT, want[0]), cached=4)
    wrong = arrival(2, (*PROMPT, want[0]), cached=4)
    never = arrival(3, (*PROMPT, want[0]), cached=4)
    assert run(runner, prefill(2, [3, 5], right)) == [[want[1]]]
    assert run(runner, prefill(3, [1, 6], wrong)) != [[want[1]]]
    assert run(runner, prefill(4, [7, 0], never)) != [[want[1]]]


def test_verify_sees_a_block_overwritten_behind_a_rows_back() -> None:
    want = reference(3)
    runner = NullRunner(8, 4, 2, depth=1, verify=True)
    other = arrival(1, (1, 2, 3), "b")
    tokens = run(runner, prefill(1, [3, 1]), prefill(2, [3], other), decode(3, 6))
    assert tokens[2] != [want[1]]


def test_block_copies_come_before_the_step_and_a_lost_one_shows() -> None:
    want = reference(1)
    for copies, same in (([(1, 4)], True), ([], False)):
        runner = NullRunner(8, 4, 2, depth=1)
        run(runner, prefill(1, [3, 1]))
        twin = prefill(2, [3, 4], arrival(1, name="b", cached=5))
        twin.block_copies = copies
        assert (run(runner, twin) == [want]) == same


def test_seeds_part_siblings_and_masks_bind() -> None:
    first = run(NullRunner(depth=1), prefill(1, [0], arrival(seed=1)))
    assert first != run(NullRunner(depth=1), prefill(1, [0], arrival(seed=2)))
    plan = prefill(1, [0])
    plan.masks = [(0, (1 << 77).to_bytes(4000, "little"))]
    assert run(NullRunner(depth=1), plan) == [[77]]
    plan.masks = [(0, bytes(4000))]
    runner = NullRunner(depth=1)
    assert "no token" in runner.collect(runner.submit(plan)).failed["a"]


def test_scripts_are_spoken_and_end_with_eos() -> None:
    runner = NullRunner(depth=1, script=[41, 42])
    tokens = run(runner, prefill(1, [0], arrival(eos=(2,))), decode(2, 6), decode(3, 7))
    assert tokens == [[41], [42], [2]]
    by_request = NullRunner(depth=1, script=lambda one: [9] if one.request == "a" else None)
    assert run(by_request, prefill(1, [0])) == [[9]]
    assert run(by_request, prefill(2, [1], arrival(1, name="b"))) == [reference(1)]


def test_logprobs_are_made_up_when_asked_for() -> None:
    runner = NullRunner(depth=1)
    result = runner.collect(runner.submit(prefill(1, [0], arrival(logprobs=3, prompt_logprobs=0))))
    (entry,) = result.logprobs[0]
    assert entry.token == result.tokens[0] and entry.rank == 1
    assert entry.top[0][0] == entry.token and len({token for token, _ in entry.top}) == 3
    assert sorted((value for _, value in entry.top), reverse=True) == [value for _, value in entry.top]
    assert [entry.token for entry in result.prompt_logprobs[0]] == list(PROMPT[1:])
    plain = runner.collect(runner.submit(prefill(2, [1], arrival(1, name="b"))))
    assert not plain.logprobs and not plain.prompt_logprobs


def test_steps_queue_up_on_virtual_time() -> None:
    clock = VirtualClock()
    runner = NullRunner(depth=2, step_time=lambda plan: 0.02 + 0.001 * plan.num_tokens, clock=clock, sleep=clock.sleep)
    tickets = [runner.submit(prefill(1, [0])), runner.submit(decode(2, 6))]
    assert clock() == 0.0, "submit returns at once"
    first, second = (runner.collect(ticket).times for ticket in tickets)
    assert (first.began_s, first.home_s) == (0.0, pytest.approx(0.026))
    assert (second.began_s, second.home_s) == (pytest.approx(0.026), pytest.approx(0.047))


def test_real_time_is_slept() -> None:
    runner = NullRunner(depth=1, step_time=0.03)
    began = time.perf_counter()
    run(runner, prefill(1, [0]), decode(2, 6))
    assert time.perf_counter() - began >= 0.06


def test_tickets_redeem_once_in_order_and_no_more_than_depth() -> None:
    runner = NullRunner(depth=2)
    one, two = runner.submit(prefill(1, [0])), runner.submit(decode(2, 6))
    assert {one.slot, two.slot} == {0, 1}
    with pytest.raises(TandemError, match="depth is 2"):
        runner.submit(decode(3, 7))
    with pytest.raises(TandemError, match="oldest"):
        runner.collect(two)
    runner.collect(one)
    with pytest.raises(TandemError, match="once"):
        runner.collect(one)


def test_faults_raise_hang_and_fail_when_told() -> None:
    runner = NullRunner(depth=1, faults=Faults(raise_at=2))
    run(runner, prefill(1, [0]))
    with pytest.raises(TandemError, match="step 2"):
        run(runner, decode(2, 6))
    runner = NullRunner(depth=1, faults=Faults(fail=lambda one: f"{one.request} is bad"))
    assert runner.collect(runner.submit(prefill(1, [0]))).failed == {"a": "a is bad"}
    runner = NullRunner(depth=1, faults=Faults(hang_at=1))
    ticket = runner.submit(prefill(1, [0]))
    threading.Timer(0.05, runner.close).start()
    with pytest.raises(TandemError, match="hanging"):
        runner.collect(ticket)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (decode(2, 7), "not at 6"),
        (decode(2, 6, departures=[1]), "nobody holds it"),
        (StepPlan(2, [Span("a", 0, 6, 1, (), True)]), "decodes come first"),
        (decode(2, 6, arrivals=[arrival()]), "row 0 is taken"),
        (decode(3, 6), "behind step 1"),
        (StepPlan(2, [Span("b", 0, 6, 1, (), True)], num_decodes=1), "another's"),
        (decode(2, 6, (1,)), "twice in a table"),
        (decode(2, 6, steady=True), "steady"),
        (StepPlan(2, []), "without spans"),
        (prefill(2, [1], arrival(1, name="b", tokens=(1, 2, 3))), "two spans"),
    ],
)
def test_verify_names_what_is_wrong_with_a_plan(plan: StepPlan, message: str) -> None:
    runner = NullRunner(8, 4, 2, depth=1, verify=True)
    run(runner, prefill(1, [3, 1]))
    if message == "two spans":
        plan = StepPlan(2, [*decode(2, 6).spans, *plan.spans], plan.arrivals, num_decodes=1)
    with pytest.raises(AssertionError, match=message):
        runner.submit(plan)
