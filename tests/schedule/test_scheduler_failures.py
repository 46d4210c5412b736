"""A span that a step leaves out, as when memory runs out: nobody reads the blocks that it did not write."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_drive import Drive, alone, request
from test_scheduler_properties import Guest, guests

from tandem.errors import CapacityError
from tandem.plan import Span, StepResult
from tandem.runner.null import NullRunner

DROPPED = "left out"


class LossyRunner(NullRunner):
    """Leaves spans out, as a runner does for want of memory: nothing of them is written or sampled."""

    def __init__(self, *args, drops, **settings) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **settings)
        self.drops = drops
        self._slots = [12345 + i for i in range(len(self._slots))]

    def _compute_span(self, index: int, span: Span, masks: dict[int, bytes], result: StepResult) -> int | None:
        if not self.drops(result.step, span):
            return super()._compute_span(index, span, masks, result)
        row = self._rows[span.row]
        assert row is not None
        row.blocks += span.blocks
        result.failed[span.request] = DROPPED
        return 0 if span.samples else None


def lossy(drops, depth: int, num_blocks: int, block_size: int, num_rows: int, budget: int, **settings) -> Drive:  # type: ignore[no-untyped-def]
    drive = Drive(depth, num_blocks, block_size, num_rows, budget, max_length=4096, **settings)
    drive.runner = LossyRunner(num_blocks, block_size, num_rows, 997, 4096, depth=depth, verify=True, drops=drops)
    return drive


def comes_home(drive: Drive) -> None:
    kv = drive.scheduler.statistics().kv
    assert (kv.num_owned, kv.num_pending, kv.num_tables) == (0, 0, 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("end", ["fails", "is aborted before it fails", "fails in its second chunk"])
def test_who_shares_a_prompt_that_was_left_out_computes_it_anew(depth: int, end: str) -> None:
    """b comes while a's prompt is in flight, c shares what b computed behind it; d comes when all is over."""
    prompt = list(range(40))
    left_out = 32 if "second" in end else 0
    drive = lossy(
        lambda step, span: span.request == "a" and span.start == left_out, depth, 64, 4, 8, 32 if left_out else 64
    )
    drive.add(request("a", prompt, 6))
    drive.turn()
    if left_out:
        drive.turn()
    longer = [*prompt, 1, 2, 3, 4, 5]
    drive.add(request("b", longer, 6))
    if "aborted" in end and drive.flight:
        drive.abort("a")
    drive.turn()
    drive.add(request("c", [*longer, 6], 6))
    answers = drive.run()
    drive.add(request("d", longer, 6))
    drive.run()
    for name, tokens in (("b", longer), ("c", [*longer, 6]), ("d", longer)):
        assert answers[name].tokens == alone(request(name, tokens, 6)).tokens
        assert answers[name].finish == "length"
    assert answers["b"].cached == 0, "told as cached, and computed"
    comes_home(drive)


def test_a_sibling_of_a_prompt_that_was_left_out_computes_it_itself() -> None:
    """It has a copy of a block that was never written, made in a step behind."""
    drive = lossy(lambda step, span: span.request == "a" and not span.start, 3, 64, 16, 8, 64)
    drive.add(request("a", [5] * 21, 6), request("b", [5] * 21, 6, fork_of="a", seed=3))
    answers = drive.run()
    assert sum(len(plan.block_copies) for plan in drive.plans) == 1, "b was to copy what a failed to write"
    assert answers["a"].error == DROPPED
    assert answers["b"].tokens == alone(request("b", [5] * 21, 6, seed=3)).tokens
    comes_home(drive)


def test_who_returns_keeps_the_place_of_its_first_arrival() -> None:
    drive = Drive(1, num_blocks=8, block_size=4, num_rows=4)
    drive.add(request("a", 10, 18), request("b", 10, 12), request("c", 2, 4))
    drive.run()
    arrivals = [arrival for plan in drive.plans for arrival in plan.arrivals]
    places = {arrival.request: arrival.place for arrival in arrivals if not arrival.resumed}
    assert sorted(places.values()) == [1, 2, 3]
    resumed = [arrival for arrival in arrivals if arrival.resumed]
    assert resumed and all(arrival.place == places[arrival.request] for arrival in resumed)


@given(
    guests(), st.integers(1, 3), st.sampled_from([1, 2, 4, 16]), st.integers(30, 160), st.integers(1, 6),
    st.integers(0, 40), st.integers(0, 1 << 20), st.sampled_from([0.03, 0.1, 0.3]), st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_steps_that_leave_spans_out_change_nobody_elses_tokens(
    everyone: list[Guest], depth: int, block_size: int, num_slots: int, num_rows: int, spare: int, seed: int,
    share: float, cache: bool,
) -> None:  # fmt: skip
    num_blocks, rng = -(-num_slots // block_size), random.Random(seed)
    drive = lossy(
        lambda step, span: rng.random() < share, depth, num_blocks, block_size, num_rows, num_rows + spare,
        prefix_cache=cache,
    )  # fmt: skip
    for turn in range(45):
        for guest in everyone:
            if guest.comes == turn:
                try:
                    drive.add(guest.request, mask=guest.mask())
                except CapacityError:
                    continue
            elif guest.goes == turn and guest.request.id in drive.answers:
                drive.abort(guest.request.id)
        drive.turn()
    answers = drive.run()
    for guest in everyone:
        answer = answers.get(guest.request.id)
        if answer is not None:
            assert answer.finish is not None
            want = alone(guest.request, guest.mask())
            assert answer.tokens == want.tokens[: len(answer.tokens)]
            assert answer.error in (None, DROPPED)
            if answer.finish not in ("abort", "error"):
                assert (answer.tokens, answer.finish) == (want.tokens, want.finish)
                assert answer.logprobs == want.logprobs and answer.prompt_logprobs == want.prompt_logprobs
    comes_home(drive)
