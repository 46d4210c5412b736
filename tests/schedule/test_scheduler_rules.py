"""One rule a test: what a plan says, who goes first, how requests end."""

import pytest
from null_drive import NUM_LOGITS, CountingMask, Drive, alone, request

from tandem.errors import GrammarError, RequestError, SettingError
from tandem.plan import Span
from tandem.runner.null import Faults
from tandem.schedule import Scheduler
from tandem.schedule.decode import MAX_LATE

DEPTHS = [1, 2, 3, 4]


def spans_of(drive: Drive, name: str) -> list[Span]:
    return [span for plan in drive.plans for span in plan.spans if span.request == name]


@pytest.mark.parametrize("depth", DEPTHS)
def test_steady_just_when_the_same_rows_go_on(depth: int) -> None:
    drive = Drive(depth, block_size=16)
    drive.add(request("a", 5, 40), request("b", 7, 30))
    drive.run(until=lambda: drive.steps == 10)
    drive.add(request("c", 3, 4))
    drive.run()
    for before, plan in zip(drive.plans, drive.plans[1:], strict=False):
        same = [s.row for s in before.spans] == [s.row for s in plan.spans] and before.num_decodes == len(before.spans)
        assert plan.steady == (same and not plan.arrivals and not plan.departures), plan
    assert sum(plan.steady for plan in drive.plans) > 25
    assert any(plan.steady and any(span.blocks for span in plan.spans) for plan in drive.plans)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_steady_step_makes_nothing_new_for_its_rows(depth: int) -> None:
    """Invariant 9: columns are made when somebody joins or leaves, and shared by the steps between, blocks or not."""
    drive = Drive(depth, block_size=4)
    drive.add(*(request(f"r{i}", 3 + i, 30) for i in range(5)))
    drive.run()
    pairs = list(zip(drive.plans, drive.plans[1:], strict=False))
    steady = [(before.spans, plan.spans) for before, plan in pairs if plan.steady]
    assert len(steady) > 15 and any(spans.blocks for _, spans in steady)
    for before, spans in steady:
        assert spans.rows is before.rows and spans.offsets is before.offsets and spans.requests is before.requests


def test_an_end_by_length_costs_no_ghost_and_an_end_by_a_stop_costs_depth_minus_one() -> None:
    free = alone(request("a", 5, 30)).tokens
    for depth in DEPTHS:
        drive = Drive(depth)
        drive.add(request("a", 5, 30))
        drive.run()
        assert drive.steps == 30
        drive = Drive(depth)
        drive.add(request("a", 5, 30, stop_token_ids=(free[9],)))
        answer = drive.run()["a"]
        assert answer.tokens == free[: free.index(free[9]) + 1] and answer.finish == "stop"
        assert drive.steps == len(answer.tokens) + depth - 1


def test_min_tokens_ignore_eos_and_stop_token_ids() -> None:
    free = alone(request("a", 5, 30)).tokens
    eos = (free[2], free[6])
    cases = (({}, 3), ({"min_tokens": 3}, 7), ({"ignore_eos": True}, 30))
    for fields, count in (*cases, ({"ignore_eos": True, "stop_token_ids": (free[4],)}, 5)):
        drive = Drive()
        drive.add(request("a", 5, 30, eos=eos, **fields))
        assert drive.run()["a"].tokens == free[:count]


def test_a_sibling_shares_the_prompt_copies_its_last_block_and_samples_its_own_first_token() -> None:
    for length, num_copies in ((40, 2), (33, 0), (32, 2)):
        drive = Drive(2, block_size=16)
        first = request("a", length, 20, seed=1)
        twins = [request(f"t{i}", first.prompt, 20, seed=i + 2, fork_of="a") for i in range(2)]
        drive.add(first, *twins)
        answers = drive.run()
        assert sum(len(plan.block_copies) for plan in drive.plans) == num_copies
        assert drive.num_prefilled == {"a": length, "t0": 1, "t1": 1}
        for one in (first, *twins):
            assert answers[one.id].tokens == alone(one).tokens
        assert answers["a"].tokens != answers["t0"].tokens != answers["t1"].tokens
        assert spans_of(drive, "t0")[0].start == length - 1


@pytest.mark.parametrize("after", [0, 1, 2, 3, 30])
def test_siblings_of_one_that_is_gone_prefill_like_anybody(after: int) -> None:
    drive = Drive(2, num_rows=1, budget=16)
    drive.add(request("a", 40, 20))
    drive.add(twin := request("t", request("a", 40, 20).prompt, 20, seed=7, fork_of="a"))
    drive.run(until=lambda: drive.steps >= after)
    if drive.answers["a"].finish is None:
        drive.abort("a")
    assert drive.run()["t"].tokens == alone(twin).tokens


def test_a_false_sibling_gets_nothing_of_anothers_prompt() -> None:
    drive = Drive(2)
    drive.add(request("a", 40, 20), twin := request("t", 40, 20, fork_of="a"))
    assert drive.run()["t"].tokens == alone(twin).tokens


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_grammar_waits_for_its_last_token_and_delays_nobody(depth: int) -> None:
    drive = Drive(depth)
    mask = CountingMask(delay=2)
    drive.add(request("free", 5, 40))
    drive.add(request("bound", 50, 12), mask=mask)
    answers = drive.run()
    assert [token % 7 for token in answers["bound"].tokens] == [i % 7 for i in range(12)]
    assert mask.accepted == answers["bound"].tokens
    assert len(spans_of(drive, "free")) == 40 and answers["free"].last_step <= 40 + depth
    chunks = [span for span in spans_of(drive, "bound") if not span.samples]
    assert sum(span.length for span in chunks) == 49, "all but the last prompt token need no grammar"
    assert sum(len(plan.masks) for plan in drive.plans) == 12


@pytest.mark.parametrize("depth", DEPTHS)
def test_those_bound_by_grammars_share_their_steps(depth: int) -> None:
    """Those who come one by one do not form groups that alternate, each with a step to itself."""
    drive = Drive(depth)
    for number in range(4):
        drive.add(request(f"b{number}", 5, 48), mask=CountingMask(delay=number))
        drive.run(until=lambda name=f"b{number}": len(drive.answers[name].tokens) > 1)
    before = len(drive.plans)
    drive.run()
    shared = [plan.num_decodes for plan in drive.plans[before + 2 :]]
    assert shared[:12] == [4] * 12, shared


@pytest.mark.parametrize("depth", DEPTHS)
def test_whoever_has_slow_masks_holds_the_others_up_once(depth: int) -> None:
    """And nobody waits while somebody unbound needs each step anyway."""
    drive = Drive(depth)
    drive.add(request("slow", 5, 24), mask=CountingMask(delay=20))
    drive.add(request("bound", 5, 24), mask=CountingMask())
    turns = 0
    while drive.answers["bound"].finish is None:
        drive.turn()
        turns += 1
    assert turns <= 24 * 2 + 2 * (MAX_LATE + 1) and len(drive.answers["slow"].tokens) < 12
    drive.run()
    drive.add(request("slow again", 5, 24), mask=CountingMask(delay=20))
    drive.add(request("quick", 5, 8), mask=CountingMask())
    drive.add(request("free", 5, 40))
    answers = drive.run()
    assert len(spans_of(drive, "free")) == 40 and answers["free"].last_step - answers["free"].first_step <= 39 + depth
    assert answers["quick"].last_step < answers["free"].last_step


def test_a_grammar_that_breaks_ends_its_own_request() -> None:
    """A limit is told with its code; a fault of ours is logged, and its class is nobody's business."""

    class Broken(CountingMask):
        def allowed(self) -> bytes | None:
            if len(self.accepted) == 3:
                raise GrammarError("no such rule.", hint="another one.")
            return super().allowed()

    class Deaf(CountingMask):
        def accept(self, tokens: object) -> None:
            raise ValueError("unheard")

    drive = Drive()
    drive.add(request("a", 5, 10), mask=Broken())
    drive.add(request("b", 5, 10), mask=Deaf())
    drive.add(well := request("c", 5, 10))
    answers = drive.run()
    assert answers["a"].finish == answers["b"].finish == "error"
    assert answers["a"].error == "no such rule.\nhint: another one." and answers["a"].code == "grammar_failed"
    assert answers["b"].error == "its grammar failed." and answers["b"].code is None
    assert len(answers["a"].tokens) == 3 and answers["c"].tokens == alone(well).tokens


def test_prompt_logprobs_skip_no_position_and_come_once_also_across_a_preemption() -> None:
    drive = Drive(2, num_blocks=9, block_size=4, num_rows=3, budget=7)
    prompt = request("x", 13, 1).prompt
    drive.add(request("warm", prompt, 1))
    drive.run()
    drive.add(*(request(f"r{i}", prompt, 16, prompt_logprobs=1, ignore_eos=True) for i in range(3)))
    answers = drive.run()
    assert drive.scheduler.statistics().num_preemptions > 0
    want = alone(request("w", prompt, 16, prompt_logprobs=1)).prompt_logprobs
    assert len(want) == 13 and want[0].logprob is None and want[0].token == prompt[0]
    for i in range(3):
        assert answers[f"r{i}"].prompt_logprobs == want and answers[f"r{i}"].cached == 0
    drive.add(request("one", [5], 2, prompt_logprobs=0))
    assert [entry.token for entry in drive.run()["one"].prompt_logprobs] == [5]


def test_a_failed_request_ends_alone_and_what_it_computed_is_not_reused() -> None:
    for depth in DEPTHS:
        faults = Faults(fail=lambda arrival: "bad row" if arrival.request == "bad" else None)
        drive = Drive(depth, budget=32, runner={"faults": faults})
        drive.add(request("bad", [1] * 40, 9), well := request("well", 20, 9))
        answers = drive.run()
        assert (answers["bad"].finish, answers["bad"].error, answers["bad"].tokens) == ("error", "bad row", [])
        assert answers["well"].tokens == alone(well).tokens
        drive.add(request("next", [1] * 40, 9))
        assert drive.run()["next"].cached == 0


def test_abort_in_every_state_and_of_the_unknown() -> None:
    for depth in DEPTHS:
        for after in range(0, 14):
            drive = Drive(depth, num_rows=2, budget=4)
            drive.add(request("a", 9, 5), request("b", 3, 5), request("c", 3, 5))
            drive.run(until=lambda: drive.steps >= after)  # noqa: B023
            for name in "cab":
                if drive.answers[name].finish is None:
                    drive.abort(name)
            assert drive.scheduler.abort("a") is None and drive.scheduler.abort("nobody") is None
            drive.run(depth + 1)


def test_priority_goes_first_and_the_least_important_newest_gives_way() -> None:
    drive = Drive(2, num_blocks=12, block_size=4, num_rows=2, policy="priority", budget=64)
    drive.add(request("old", 8, 24, priority=1), request("less", 8, 24, priority=5), request("more", 8, 24, priority=0))
    answers = drive.run()
    preempted = [name for plan in drive.plans for name in plan.preempted]
    assert preempted and set(preempted) <= {"less", "old"}
    assert answers["more"].last_step < answers["old"].last_step < answers["less"].last_step
    drive = Drive(2, num_blocks=12, block_size=4, num_rows=3, budget=64)
    drive.add(request("a", 8, 24, priority=9), request("b", 8, 24), request("c", 8, 24))
    answers = drive.run()
    assert answers["a"].last_step < answers["b"].last_step < answers["c"].last_step, "fcfs knows no priority"


def test_the_first_in_line_is_overtaken_a_bounded_number_of_times() -> None:
    drive = Drive(2, num_blocks=20, block_size=4, num_rows=4, budget=64)
    drive.add(request("s0", 12, 3), request("s1", 12, 6), request("s2", 12, 9))
    drive.turn()
    drive.add(request("big", 60, 4))
    number = 3
    while drive.answers["big"].first_step is None:  # shorter ones that fit come all the time, and always three run
        drive.add(request(f"s{number}", 12, 9))
        drive.turn()
        number += 1
        assert number < 500, "starved"
    assert sum(drive.answers[f"s{i}"].first_step is not None for i in range(3, number)) == 32
    drive.run()


def test_what_left_the_queue_is_forgotten() -> None:
    scheduler = Scheduler(64, 16, 1, 64, 1000)
    for i in range(2000):
        scheduler.add(request(f"r{i}", 4 + i % 9))
    for i in range(1990):
        assert scheduler.abort(f"r{(i * 7) % 2000}") is not None
    scheduler.check()
    assert scheduler.statistics().num_waiting == 10


def test_held_says_why_the_first_waiting_request_did_not_join() -> None:
    drive = Drive(1, num_blocks=8, block_size=4, num_rows=4, budget=64)
    drive.add(request("a", 16, 8), request("b", 16, 8), request("c", 4, 8), request("d", 4, 8))
    drive.turn()
    assert drive.plans[-1].held == "blocks"
    drive = Drive(1, num_rows=1)
    drive.add(request("a", 4, 4), request("b", 4, 4))
    drive.turn()
    assert drive.plans[-1].held == "rows"
    drive.run()
    assert drive.plans[-1].held == ""


def test_refusals_teach_and_keep_nothing() -> None:
    scheduler = Scheduler(8, 4, 2, 64, 100, max_waiting=2)
    scheduler.add(request("a", 4))
    with pytest.raises(RequestError, match="live already"):
        scheduler.add(request("a", 4))
    scheduler.add(request("b", 4))
    with pytest.raises(RequestError, match="limit is 2") as caught:
        scheduler.add(request("c", 4))
    assert caught.value.code == "queue_full"
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(request("c", []))
    for name in "ab":
        change = scheduler.abort(name)
        assert change is not None and change.finish == "abort"
    scheduler.check()
    assert scheduler.idle and scheduler.plan() is None
    with pytest.raises(SettingError, match="lifo"):
        Scheduler(8, 4, 2, 64, 100, policy="lifo")
    with pytest.raises(SettingError, match="max_batch_tokens"):
        Scheduler(8, 4, 3, 2, 100)


def test_a_step_out_of_order_is_our_own_mistake() -> None:
    drive = Drive(2)
    drive.add(request("a", 4))
    plan = drive.scheduler.plan()
    assert plan is not None
    result = drive.runner.collect(drive.runner.submit(plan))
    result.step += 1
    with pytest.raises(AssertionError, match="come home"):
        drive.scheduler.commit(result)


def test_made_up_ids_are_in_range() -> None:
    assert all(0 <= token < NUM_LOGITS for token in alone(request("a", 4, 200)).tokens)


def test_the_row_of_one_that_ends_by_length_is_retaken_while_its_last_step_is_in_flight() -> None:
    drive = Drive(2, num_rows=1)
    drive.add(request("a", 4, 3), request("b", 4, 3))
    drive.run(until=lambda: drive.steps == 4)
    assert [plan.spans[0].request for plan in drive.plans] == ["a", "a", "a", "b"]
    assert drive.plans[3].departures == [drive.plans[3].arrivals[0].row]
    assert drive.answers["a"].finish is None or drive.answers["a"].last_step == 4
    drive.run()
    assert drive.steps == 6


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_request_that_the_queue_cannot_take_leaves_nothing_behind(fail_at: int, monkeypatch) -> None:
    """Whatever fails on the way in, and however far it came."""
    drive = Drive(num_rows=1, policy="priority")
    drive.add(request("a", 5, 20), request("b", 5, 4), request("c", 6, 3, priority=-1))
    before, calls = drive.scheduler.statistics(), 0

    def push(heap: list, entry: tuple) -> None:
        nonlocal calls
        calls += 1
        heap.append(entry)  # as heapq does, before it compares
        if calls == fail_at:
            raise TypeError("it cannot be compared")
        heap.sort()

    with monkeypatch.context() as patch:
        patch.setattr("tandem.schedule.waiting.heapq.heappush", push)
        with pytest.raises(TypeError):
            drive.scheduler.add(request("bad", 3, 4))
    assert calls == fail_at and drive.scheduler.statistics() == before
    assert "bad" not in drive.scheduler._running.requests and drive.scheduler.abort("bad") is None
    drive.scheduler.check()
    drive.add(request("bad", 3, 4))
    answers = drive.run()
    for name in ("a", "b", "c", "bad"):
        assert answers[name].finish == "length"


@pytest.mark.parametrize("priority", ["x", None, 1.5, 2**63])
def test_a_priority_that_cannot_be_compared_is_refused_even_behind_the_requests_own_check(priority: object) -> None:
    drive = Drive(num_rows=1, policy="priority")
    one = request("bad", 5, 4)
    one.priority = priority  # type: ignore[assignment]
    with pytest.raises(RequestError, check=lambda error: error.param == "priority"):
        drive.scheduler.add(one)
    drive.add(request("good", 5, 4))
    assert drive.run()["good"].finish == "length"
