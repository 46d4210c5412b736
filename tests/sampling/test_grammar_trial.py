"""Lines and lanes of the trials, with children that do as they are told."""

from multiprocessing import Pipe

import pytest
from grammar_drive import EOS, NUM_LOGITS, TOKENIZER_JSON
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.sampling import grammar_trial
from tandem.sampling.grammar_child import GoneError, KilledError, OverdueError
from tandem.sampling.grammar_limits import GrammarLimits
from tandem.sampling.grammar_trial import MAX_HEAVY, SLICES_S, Trials

ENDS = {"overdue": OverdueError, "gone": GoneError, "killed": KilledError}
OUTCOMES = ("fits", "unfit", *ENDS)


class FakeChild:
    """work: what it was told to do, until it has said what came of it."""

    def __init__(self, tokenizers, limit_bytes, niceness, inherited) -> None:
        self.limit_bytes, self.is_ended, self.work = limit_bytes, False, None
        self.connection, self._theirs = Pipe()

    def begin(self, *what) -> None:
        assert self.work is None and not self.is_ended
        self.work = what

    def say(self, outcome: str) -> None:
        self._theirs.send(outcome)
        self.work = None

    def result(self):
        outcome = self.connection.recv()
        if outcome in ENDS:
            self.end()
            raise ENDS[outcome]
        return None if outcome == "fits" else "it is unfit"

    def end(self) -> None:
        assert not self.is_ended
        self.is_ended = True
        self.connection.close()
        self._theirs.close()


class Driven:
    """Trials, and what was heard of each number."""

    def __init__(self) -> None:
        self.ours, theirs = Pipe()
        self.trials = Trials(theirs)
        self.heard: dict[int, tuple] = {}
        self.asked: dict[int, str] = {}
        self.forgotten: set[int] = set()
        self.order(0, "tokenizer", 0, TOKENIZER_JSON, NUM_LOGITS, (EOS,))
        assert self.heard.pop(0) is None

    def order(self, number: int, what: str, *rest) -> None:
        self.ours.send((what, number, *rest))
        self.turn()

    def ask(self, text: str, client: str = "", **limits) -> int:
        number = len(self.asked) + 1
        self.asked[number] = text
        self.order(number, "try", 0, "regex", text, GrammarLimits(**limits), client)
        return number

    def forget(self, number: int) -> None:
        if number in self.asked:
            self.forgotten.add(number)
            self.order(number, "forget")

    def say(self, lane: int, outcome: str) -> str:
        """The child at work in that lane is done; with which text."""
        child = self.trials._lanes[lane].child
        text = child.work[2]
        child.say(outcome)
        self.turn()
        return text

    def turn(self) -> None:
        self.trials.turn(0)
        self.trials.check()
        while self.ours.poll():
            number, _, verdict, _ = self.ours.recv()
            assert number not in self.heard, "told twice"
            assert number not in self.forgotten, "told to nobody"
            self.heard[number] = verdict

    def at_work(self) -> dict[int, str]:
        lanes = self.trials._lanes
        return {lane.index: lane.child.work[2] for lane in lanes if lane.trial is not None}

    def close(self) -> None:
        for lane in self.trials._lanes:
            lane.end_child()
        self.ours.close()
        self.trials._connection.close()


@pytest.fixture
def driven(monkeypatch):
    monkeypatch.setattr(grammar_trial, "Child", FakeChild)
    driven = Driven()
    yield driven
    driven.close()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 30), st.sampled_from("abc")),
        st.tuples(st.just("forget"), st.integers(1, 60)),
        st.tuples(st.just("say"), st.integers(0, len(SLICES_S) - 1), st.sampled_from(OUTCOMES)),
        st.tuples(st.just("wait"), st.integers(0, len(SLICES_S) - 1)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(ACTIONS)
def test_everybody_is_told_once_whatever_comes_of_it(actions):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_trial, "Child", FakeChild)
        driven = Driven()
        for what, *rest in actions:
            if what == "ask":
                driven.ask(f"text {rest[0]}", rest[1], max_line=8)
            elif what == "forget":
                driven.forget(rest[0])
            elif rest[0] in driven.at_work():
                if what == "say":
                    driven.say(*rest)
                else:
                    driven.trials._lanes[rest[0]].until_s = 0.0  # it never got its slice
                    driven.turn()
        while at_work := driven.at_work():
            driven.say(min(at_work), "fits")
        told = set(driven.heard) | driven.forgotten
        assert told >= set(driven.asked)
        driven.close()


def test_what_had_its_slice_waits_behind_none_that_had_not(driven):
    for number in range(10):
        driven.ask(f"long {number}")
    driven.ask("cheap")
    assert driven.at_work() == {0: "long 0"}
    for number in range(10):
        assert driven.say(0, "overdue") == f"long {number}"
    assert driven.at_work() == {0: "cheap", 1: "long 0"}
    driven.say(0, "fits")
    assert driven.heard == {11: ("fits", 0)}
    for lane in (1, 2):
        driven.say(lane, "overdue")
    assert driven.at_work() == {1: "long 1", 3: "long 0"}
    driven.say(3, "fits")
    assert driven.heard[1] == ("fits", 3)
    driven.say(1, "unfit")
    assert driven.heard[2] == ("refused", "it is unfit")
    driven.say(1, "gone")
    assert driven.heard[3][0] == "refused" and "more memory than 2048 MiB" in driven.heard[3][1]


def test_what_is_known_stands_in_no_line(driven):
    driven.ask("good")
    driven.say(0, "fits")
    driven.ask("bad")
    driven.say(0, "unfit")
    for number in range(5):
        driven.ask(f"new {number}")
    assert driven.heard[driven.ask("good")] == ("fits", 0)
    assert driven.heard[driven.ask("bad")] == ("refused", "it is unfit")


def test_what_took_long_before_begins_where_it_was(driven):
    for _ in range(2):
        number = driven.ask("long")
        driven.say(min(driven.at_work()), "overdue")
        driven.forget(number)
        assert not driven.at_work()
    driven.ask("long")
    assert driven.at_work() == {2: "long"}


def test_one_limit_of_time_holds_in_each_lane(driven):
    driven.ask("short of time", compile_s=SLICES_S[1])
    driven.say(0, "overdue")
    driven.say(1, "overdue")
    [(what, why)] = driven.heard.values()
    assert what == "refused" and "longer than 0.06 s of processor time" in why


def test_each_line_has_its_bound(driven):
    asked = [driven.ask(f"long {number}", str(number), max_line=3) for number in range(5)]
    what, why = driven.heard[asked[4]]
    assert what == "overloaded" and "3 new grammars are in line before this one; the limit is 3" in why
    assert driven.heard.keys() == {asked[4]}
    for _ in range(MAX_HEAVY[1] + 2):  # one of them is at work
        driven.say(0, "overdue")
        driven.ask(f"long {len(driven.asked)}", str(len(driven.asked)), max_line=3)
    whys = {why for _, why in driven.heard.values()}
    limit = MAX_HEAVY[1]
    assert any(f"{limit} grammars that take long to compile are in line before this one" in why for why in whys)


def test_children_that_have_not_read_a_tokenizer_are_not_asked(driven):
    driven.ask("first")
    driven.say(0, "fits")
    old = driven.trials._lanes[0].child
    driven.ask("busy")
    driven.order(99, "tokenizer", 1, TOKENIZER_JSON, NUM_LOGITS, (EOS,))
    assert driven.heard.pop(99) is None and not old.is_ended
    driven.order(98, "try", 1, "regex", "second", GrammarLimits(), "")
    driven.say(0, "fits")
    assert driven.at_work() == {0: "second"}
    assert driven.trials._lanes[0].child is not old and old.is_ended


def test_clients_take_turns_in_line(driven):
    for number in range(4):
        driven.ask(f"a{number}", "a")
    driven.ask("b0", "b")
    driven.ask("c0", "c")
    driven.ask("b1", "b")
    assert [driven.say(0, "fits") for _ in range(7)] == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


def test_nobody_may_fill_a_line(driven):
    driven.ask("at work", "a", max_line=8)
    many = [driven.ask(f"a{number}", "a", max_line=8) for number in range(8)]
    assert [number for number in many if number in driven.heard] == many[6:], "a quarter is for those who have little"
    assert driven.heard[many[6]][0] == "overloaded" and "6 new grammars" in driven.heard[many[6]][1]
    others = [driven.ask(f"{client}0", client, max_line=8) for client in "bcd"]
    assert [number for number in others if number in driven.heard] == others[2:], "the line is full"


def test_a_child_that_was_killed_is_nobodys_fault(driven):
    number = driven.ask("honest")
    driven.say(0, "killed")
    assert driven.heard[number] == ("overloaded", "the process that compiled it was killed")
    again = driven.ask("honest")
    driven.say(0, "fits")
    assert driven.heard[again] == ("fits", 0), "nothing is remembered of it"
