"""Handed cases that the bookkeeping alone can answer, on the null runner."""

import pytest
from null_drive import Drive, alone, request

from tandem.errors import CapacityError, ContextLengthError

DEPTHS = [1, 2, 3, 4]


@pytest.mark.parametrize("depth", DEPTHS)
def test_c01_preempted_and_resumed_with_prefix_caching(depth: int) -> None:
    drive = Drive(depth, num_blocks=24, block_size=16, num_rows=8, budget=512)
    everyone = [request(f"r{i}", 64, 64, ignore_eos=True) for i in range(8)]
    drive.add(*everyone)
    answers = drive.run(5000)
    assert drive.scheduler.statistics().num_preemptions >= 1
    assert any(arrival.resumed for plan in drive.plans for arrival in plan.arrivals)
    for one in everyone:
        assert len(answers[one.id].tokens) == 64 and answers[one.id].finish == "length"
        assert answers[one.id].tokens == alone(one).tokens
    arrivals = [arrival for plan in drive.plans for arrival in plan.arrivals]
    assert {arrival.prompt_length for arrival in arrivals} == {64}
    assert drive.scheduler.ledger.num_available == 24


@pytest.mark.parametrize("depth", DEPTHS)
def test_c04_what_can_never_fit_is_refused_at_once_and_blocks_nobody(depth: int) -> None:
    drive = Drive(depth, num_blocks=32, block_size=16, max_length=2048)
    for prompt, max_tokens in ((600, 5), (500, 100), (600, None), (513, 1)):
        with pytest.raises(CapacityError, match="512 tokens"):
            drive.add(request("big", prompt, max_tokens))
    with pytest.raises(ContextLengthError, match="2048"):
        drive.add(request("long", 2040, 9))
    drive.add(request("full", 500, 13))  # 512 in the cache, and a last token that needs no place there
    drive.add(small := request("small", 5, 5))
    answers = drive.run(1000)
    assert len(answers["full"].tokens) == 13 and answers["full"].finish == "length"
    assert answers["small"].tokens == alone(small).tokens and answers["small"].last_step < 40


@pytest.mark.parametrize("depth", DEPTHS)
def test_c04_two_prompts_that_do_not_fit_together(depth: int) -> None:
    drive = Drive(depth, num_blocks=32, block_size=16, budget=64)
    drive.add(request("one", 300, 50), request("two", 300, 50), request("small", 5, 5))
    answers = drive.run(1000)
    assert len(answers["one"].tokens) == len(answers["two"].tokens) == 50
    assert drive.num_prefilled["one"] + drive.num_prefilled["two"] <= 2 * 600
    assert drive.scheduler.statistics().num_preemptions <= 2
    assert answers["small"].last_step <= 10 + depth


def test_max_tokens_none_goes_on_to_the_context_limit_or_what_the_pool_holds() -> None:
    drive = Drive(num_blocks=8, block_size=4, max_length=20)
    drive.add(request("context", 5, None))
    assert len(drive.run()["context"].tokens) == 15
    drive = Drive(num_blocks=8, block_size=4, max_length=2000)
    drive.add(request("pool", 5, None))
    assert len(drive.run()["pool"].tokens) == 28 and drive.answers["pool"].finish == "length"


@pytest.mark.parametrize("depth", DEPTHS)
def test_c05_a_long_prompt_stalls_neither_decodes_nor_short_ones_and_still_ends(depth: int) -> None:
    drive = Drive(depth, num_blocks=600, block_size=16, num_rows=32, budget=64, max_length=8192)
    drive.add(request("stream", 10, 400))
    drive.run(until=lambda: len(drive.answers["stream"].tokens) > 3)
    drive.add(request("long", 4000, 1))
    for _ in range(3):
        drive.turn()
    begin = drive.steps
    drive.add(*(request(f"short{i}", 10, 8) for i in range(10)))
    answers = drive.run(until=lambda: all(drive.answers[f"short{i}"].first_step for i in range(10)))
    assert max(answers[f"short{i}"].first_step for i in range(10)) - begin <= 6 + depth
    # a steady flow of short ones, more than their half can take, does not starve the long one
    for number in range(2000):
        if answers["long"].finish:
            break
        drive.add(*(request(f"flow{number}.{i}", 17, 2) for i in range(5)))
        drive.turn()
    assert answers["long"].finish == "length" and answers["long"].last_step - begin <= 4000 / 16
    in_flight = [plan for plan in drive.plans if any(span.request == "long" for span in plan.spans)]
    assert all(any(span.request == "stream" for span in plan.spans) for plan in in_flight), "the stream had to wait"
    drive.run()


def test_equal_prompts_are_not_split_and_shorter_ones_still_pass() -> None:
    drive = Drive(1, num_blocks=600, block_size=16, num_rows=8, budget=64, max_length=512)
    drive.add(*(request(f"p{i}", 64, 1) for i in range(4)))
    drive.run()
    assert [[span.length for span in plan.spans] for plan in drive.plans] == [[64]] * 4
    drive.add(request("long", 200, 1), request("same", 200, 1), request("short", 10, 1))
    drive.run()
    spans = [[(span.request, span.length) for span in plan.spans] for plan in drive.plans[4:]]
    assert spans[0] == [("short", 10), ("long", 54)] and spans[1:3] == [[("long", 64)]] * 2
    assert spans[3] == [("long", 18), ("same", 46)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_c35_a_prompt_that_is_wholly_cached(depth: int) -> None:
    drive = Drive(depth, num_blocks=64, block_size=16)
    prompt = request("x", 48, 1).prompt
    lengths = [32, 32, 31, 33, 48, 32, 32]
    for number, length in enumerate(lengths):
        drive.add(request(f"r{number}", prompt[:length], 12, logprobs=2))
        if number < 5:
            drive.run()
    drive.run()  # the last two together
    for number, length in enumerate(lengths):
        answer, want = drive.answers[f"r{number}"], alone(request("w", prompt[:length], 12, logprobs=2))
        assert answer.tokens == want.tokens and answer.logprobs == want.logprobs
        assert answer.cached <= length - 1
    assert [drive.answers[f"r{number}"].cached for number in range(7)] == [0, 16, 16, 32, 32, 16, 16]
    assert drive.scheduler.statistics().kv.num_owned == 0


def test_c36_after_a_swap_of_weights_nothing_is_reused() -> None:
    drive = Drive(num_blocks=64)
    drive.add(request("one", [1] * 40))
    drive.run()
    drive.scheduler.reset_prefix()
    drive.add(request("two", [1] * 40))
    drive.run()
    drive.add(request("three", [1] * 40))
    assert [answer.cached for answer in drive.run().values()] == [0, 0, 32]
