"""The loop on a planner and a runner that do nothing: order, depth, mail, failures, calls."""

import threading
import time
from concurrent.futures import Future

import pytest
from engine_fakes import FakePlanner, FakeRunner, made_up

from tandem.engine.contract import Abort, Add, Call, Close
from tandem.engine.loop import Errand, Loop
from tandem.engine.mailbox import LocalMailbox
from tandem.errors import EngineDeadError, RequestError, TandemError
from tandem.observer import Observer
from tandem.request import Constraint, Request, SamplingParams


class Collector:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.errors: dict[str, tuple[str, str | None]] = {}
        self.batches: list[int] = []
        self.ended: list[TandemError | None] = []

    def news(self, changes) -> None:
        self.batches.append(len(changes))
        for change in changes:
            assert change.request not in self.finish, "news behind the last news"
            self.tokens.setdefault(change.request, []).extend(change.tokens)
            if change.finish:
                self.finish[change.request] = change.finish
            if change.error:
                self.errors[change.request] = (change.error, change.code)

    def stopped(self, error) -> None:
        self.ended.append(error)


def make(depth: int = 2, **options):
    collector, runner, planner = Collector(), FakeRunner(depth), FakePlanner()
    mailbox = LocalMailbox(collector)
    return Loop(planner, runner, mailbox, **options), collector, mailbox


def ask(name: str, prompt: list[int], max_tokens: int = 4, **params) -> Add:
    return Add(Request(name, prompt, SamplingParams(max_tokens=max_tokens, **params)))


def turn_until_idle(loop: Loop) -> None:
    for _ in range(10_000):
        if not loop.turn() and (loop.idle or loop.error):
            return
    raise AssertionError("the loop never came to rest")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_same_tokens_and_full_flight_at_every_depth(depth: int) -> None:
    loop, collector, mailbox = make(depth)
    for number in range(5):
        mailbox.put(ask(f"r{number}", [10 + number], max_tokens=1 + 3 * number))
    turn_until_idle(loop)
    for number in range(5):
        assert collector.tokens[f"r{number}"] == [made_up([10 + number], i) for i in range(1 + 3 * number)]
        assert collector.finish[f"r{number}"] == "length"
    assert loop.runner.most_out == depth
    assert max(collector.batches) == 5, "the changes of one step cross together"
    loop.check()


def test_the_next_step_is_submitted_before_the_oldest_is_collected() -> None:
    loop, _, mailbox = make(2)
    seen = []
    loop.runner.before_collect = lambda plan: seen.append((plan.step, len(loop.runner.out)))
    mailbox.put(ask("a", [9], max_tokens=5))
    turn_until_idle(loop)
    assert seen == [(1, 2), (2, 2), (3, 2), (4, 2), (5, 1)]


def test_refused_and_defective_requests_harm_nobody_else() -> None:
    loop, collector, mailbox = make()
    for item in (ask("big", [1]), ask("odd", [2]), ask("good", [5])):
        mailbox.put(item)
    turn_until_idle(loop)
    assert collector.errors["big"] == ("it is larger than the whole pool of 0 blocks.", "kv_capacity_exceeded")
    assert collector.errors["odd"] == ("a defect on the way in", None)
    assert len(collector.tokens["good"]) == 4 and loop.error is None


def test_a_runner_that_raises_ends_the_engine_and_every_live_request() -> None:
    loop, collector, mailbox = make()

    def fail(plan) -> None:
        if plan.step == 3:
            raise RuntimeError("device lost")

    loop.runner.before_collect = fail
    for item in (ask("a", [5], 50), ask("b", [6], 50), ask("short", [7], 1)):
        mailbox.put(item)
    loop.run()
    assert isinstance(loop.error, EngineDeadError) and "device lost" in str(loop.error)
    assert set(collector.errors) == {"a", "b"} and collector.errors["a"][1] == "engine_dead"
    assert len(collector.tokens["a"]) == 2 and collector.finish["short"] == "length"
    assert collector.ended == [loop.error] and loop.runner.closed


def test_aborts_at_any_moment_end_a_request_once() -> None:
    loop, collector, mailbox = make()
    mailbox.put(ask("a", [5], 100))
    mailbox.put(ask("b", [6], 8))
    mailbox.put(Abort("unknown"))
    for _ in range(4):
        loop.turn()
    for _ in range(2):
        mailbox.put(Abort("a"))
    mailbox.put(ask("c", [7], 8))
    mailbox.put(Abort("c"))
    turn_until_idle(loop)
    mailbox.put(Abort("b"))
    turn_until_idle(loop)
    assert collector.finish == {"a": "abort", "b": "length", "c": "abort"}
    assert collector.tokens["b"] == [made_up([6], i) for i in range(8)]


def test_idle_loop_blocks_and_wakes_at_once() -> None:
    loop, collector, mailbox = make()
    turns = []
    inner = loop.turn
    loop.turn = lambda: turns.append(0) or inner()  # type: ignore[method-assign]
    thread = threading.Thread(target=loop.run)
    thread.start()
    time.sleep(0.3)
    assert len(turns) <= 3, "an idle loop must not spin"
    began_s = time.perf_counter()
    mailbox.put(ask("a", [5], 2))
    while "a" not in collector.finish:
        assert time.perf_counter() - began_s < 1.0
        time.sleep(0.001)
    assert mailbox.statistics["finished"] in (0, 1)
    mailbox.put(Close())
    thread.join(2.0)
    assert not thread.is_alive() and collector.ended == [None] and loop.runner.closed


def test_close_ends_what_runs_and_collects_what_is_in_flight() -> None:
    loop, collector, mailbox = make(3)
    mailbox.put(ask("a", [5], 100))
    loop.turn(), loop.turn()
    loop.close()
    loop.close()
    assert collector.finish == {"a": "abort"} and not loop.runner.out and loop.runner.closed
    assert collector.ended == [None]


def test_observers_hear_each_moment_and_a_failing_one_is_dropped() -> None:
    heard: list[str] = []

    class Watcher(Observer):
        def request_added(self, request, now_s) -> None:
            heard.append(f"added {request.id}")

        def request_aborted(self, request, now_s) -> None:
            heard.append(f"aborted {request}")

        def request_refused(self, request, error, now_s) -> None:
            heard.append(f"refused {request.id}")

        def step_submitted(self, plan, began_s, planned_s, submitted_s) -> None:
            assert began_s <= planned_s <= submitted_s
            heard.append(f"submitted {plan.step}")

        def step_collected(self, plan, result, changes, began_s, home_s, settled_s) -> None:
            assert began_s <= home_s <= settled_s and plan.step == result.step
            heard.append(f"collected {plan.step} {len(changes)}")

        def closed(self) -> None:
            heard.append("closed")

    class Failing(Observer):
        def step_submitted(self, plan, began_s, planned_s, submitted_s) -> None:
            raise ValueError("no")

    loop, _, mailbox = make(1, observers=[Failing(), Watcher()])
    for item in (ask("a", [5], 2), ask("big", [1]), ask("c", [6], 9), Abort("c")):
        mailbox.put(item)
    turn_until_idle(loop)
    loop.close()
    assert heard == [
        "added a", "refused big", "added c", "aborted c", "submitted 1", "collected 1 1", "submitted 2",
        "collected 2 1", "closed",
    ]  # fmt: skip


def test_a_call_that_drains_waits_for_what_runs_and_holds_back_what_comes() -> None:
    log: list[object] = []
    planner_seen: list[bool] = []

    def reload(source: str) -> str:
        planner_seen.append(loop.planner.idle)
        log.append(source)
        return "done"

    loop, collector, mailbox = make(2, errands={"reload": Errand(reload, drains=True)})
    mailbox.put(ask("old", [5], 6))
    loop.turn()
    call, future = mailbox.calls.open("reload", "new weights")
    for item in (call, ask("new", [6], 2), ask("gone", [7], 2), Abort("gone")):
        mailbox.put(item)
    loop.turn()
    assert not log and not future.done() and collector.finish == {"gone": "abort"}
    turn_until_idle(loop)
    assert future.result(0) == "done" and planner_seen == [True]
    assert len(collector.tokens["old"]) == 6 and len(collector.tokens["new"]) == 2


def test_a_call_that_fails_or_is_unknown_answers_with_an_error() -> None:
    def fail(_: str) -> None:
        raise KeyError("odd")

    loop, _, mailbox = make(errands={"fail": Errand(fail)})
    calls = [mailbox.calls.open("fail", ""), mailbox.calls.open("nothing", "")]
    for call, _future in calls:
        mailbox.put(Call(*call))
    loop.turn()
    for _call, future in calls:
        with pytest.raises(TandemError):
            future.result(0)
    assert loop.error is None


class Compiler:
    """compile_mask of a loop: asked, and answered when told to."""

    def __init__(self) -> None:
        self.asked: dict[str, Future] = {}
        self._texts: dict[str, str] = {}

    def __call__(self, request: Request) -> Future:
        text = request.params.constraint.text
        if text == "refused":
            raise RequestError("refused at once.", code="unsupported_value")
        self._texts[request.id] = text
        return self.asked.setdefault(request.id, Future())

    def answer(self) -> None:
        for request, future in self.asked.items():
            if self._texts[request] == "bad" and not future.done():
                future.set_exception(ValueError("no such grammar"))
            elif not future.done():
                future.set_result(AnyMask())

    @property
    def left(self) -> set[str]:
        return {request for request, future in self.asked.items() if future.cancelled()}


class AnyMask:
    def allowed(self) -> bytes:
        return b""

    def accept(self, tokens) -> None: ...


def bound(name: str, text: str, max_tokens: int = 3) -> Add:
    return ask(name, [5], max_tokens, constraint=Constraint("regex", text))


def test_grammars_are_compiled_beside_the_loop() -> None:
    compiler = Compiler()
    loop, collector, mailbox = make(compile_mask=compiler)
    for name, text in (("g", "good"), ("bad", "bad"), ("gone", "good"), ("refused", "refused"), ("last", "other")):
        mailbox.put(bound(name, text))
    mailbox.put(ask("plain", [6], 3))
    for _ in range(6):
        loop.turn()
    assert collector.finish == {"plain": "length", "refused": "error"} and not loop.idle
    assert collector.errors["refused"] == ("refused at once.", "unsupported_value")
    loop._reported_s = 0.0
    loop._rest()
    assert mailbox.statistics["compiling"] == 4, "told of while nothing else happens"
    mailbox.put(Abort("gone"))
    mailbox.put(Abort("last"))
    loop.turn()
    assert compiler.left == {"last"} and collector.finish.pop("last") == "abort"
    mailbox.put(bound("last", "good"))  # the same name again
    loop.turn()
    compiler.asked.pop("last")
    compiler.answer()
    loop.turn()
    compiler.answer()
    turn_until_idle(loop)
    assert collector.finish == {"refused": "error", "plain": "length", "g": "length", "bad": "error", "gone": "abort",
                                "last": "length"}  # fmt: skip
    loop.close()


def test_a_grammar_that_many_wait_for_is_compiled_once_and_fails_for_all() -> None:
    compiler = Compiler()
    loop, collector, mailbox = make(compile_mask=compiler)
    for text in ("bad", "good"):
        for number in range(20):
            mailbox.put(bound(f"{text}{number}", text, 2))
    loop.turn()
    assert set(compiler.asked) == {"bad0", "good0"}
    for name in ("good0", "good3", "bad0", "bad7"):  # whoever is first may leave: the next one goes on with it
        mailbox.put(Abort(name))
    loop.turn()
    assert set(compiler.asked) == {"bad0", "bad1", "good0", "good1"} and compiler.left == {"bad0", "good0"}
    while not loop.idle:
        compiler.answer()
        loop.turn()
    left = {"good0", "good3", "bad0", "bad7"}
    kinds = {"good": "length", "bad": "error"}
    assert collector.finish == {
        f"{text}{n}": "abort" if f"{text}{n}" in left else kinds[text] for text in kinds for n in range(20)
    }
    assert sum(name.startswith("bad") for name in compiler.asked) == 2, "an error is an error for all"
    loop.close()


def test_a_mask_that_never_comes_is_waited_for_no_longer_than_told(monkeypatch) -> None:
    compiler = Compiler()
    loop, collector, mailbox = make(compile_mask=compiler)
    monkeypatch.setattr("tandem.engine.admission.MAX_WAIT_S", 0.05)
    for name, text in (("first", "same"), ("second", "same")):
        mailbox.put(bound(name, text))
    loop.turn()
    monkeypatch.setattr("tandem.engine.admission.MAX_WAIT_S", 60.0)
    mailbox.put(bound("third", "same"))
    loop.turn()
    time.sleep(0.06)
    loop._is_reported = True
    loop.turn()
    assert collector.finish == {"first": "error", "second": "error"} and compiler.left == {"first", "second"}
    assert not loop._is_reported, "a refusal is news to those who read the statistics"
    assert collector.errors["first"][1] == "overloaded" and "hint: try again" in collector.errors["first"][0]
    compiler.answer()
    turn_until_idle(loop)
    assert collector.finish["third"] == "length"
    loop.close()


def test_a_loop_that_closes_leaves_its_grammars() -> None:
    compiler = Compiler()
    loop, collector, mailbox = make(compile_mask=compiler)
    mailbox.put(bound("waits", "same"))
    loop.turn()
    loop.close()
    assert compiler.left == {"waits"} and collector.finish == {"waits": "abort"}
