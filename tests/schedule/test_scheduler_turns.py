"""Clients and their bundles take turns: who comes new waits a round, nobody starves, all come out in the end."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_drive import Drive, request

from tandem.errors import RequestError
from tandem.schedule.progress import Progress
from tandem.schedule.waiting import WaitingQueue


@dataclass
class Line:
    """A queue and what has become of those in it. behind: who was let in since a request came, by client."""

    queue: WaitingQueue = field(default_factory=WaitingQueue)
    waiting: dict[str, Progress] = field(default_factory=dict)
    behind: dict[str, list[str]] = field(default_factory=dict)
    num_added: int = 0
    num_places: int = 0

    def add(self, client: str, bundle: str, size: int = 5, importance: int = 0) -> Progress:
        self.num_added += 1
        made = request(f"{self.num_added}", [1] * size, client=client, bundle=bundle)
        progress = Progress(made, None, None, importance, self.num_added, 100)  # type: ignore[arg-type]
        self.queue.push(progress, size)
        self.waiting[progress.id], self.behind[progress.id] = progress, []
        return progress

    def take(self, progress: Progress) -> None:
        self.queue.take(progress)
        if not progress.place:
            self.num_places += 1
            progress.place = self.num_places
        del self.waiting[progress.id]
        for name in self.waiting:
            self.behind[name].append(progress.request.client)

    def remove(self, progress: Progress) -> None:
        self.queue.remove(progress)
        del self.waiting[progress.id]

    def others(self, client: str) -> set[str]:
        return {progress.request.client for progress in self.waiting.values()} - {client}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "first", "shortest", "first", "return", "abort"]), st.integers(0, 3),
        st.integers(0, 3), st.integers(1, 40), st.integers(0, 1),
    ),
    max_size=80,
)  # fmt: skip


@given(OPERATIONS)
@settings(deadline=None, max_examples=200)
def test_everybody_comes_out_whatever_is_done(operations: list) -> None:
    line, inside = Line(), list[Progress]()
    for kind, client, bundle, size, importance in operations:
        if kind == "add":
            line.add("abcd"[client], ["", "x", "y", "z"][bundle], size, importance)
        elif kind == "return" and inside:
            back = inside.pop(client % len(inside))
            line.queue.push(back, size)
            line.waiting[back.id], line.behind[back.id] = back, []
        elif kind == "abort" and line.waiting:
            line.remove(list(line.waiting.values())[client % len(line.waiting)])
        elif kind in ("first", "shortest") and line.waiting:
            progress = line.queue.first() if kind == "first" else line.queue.shortest()
            assert progress is not None
            best = min(one.importance for one in line.waiting.values())
            assert progress.importance == best, "a less important one came first"
            returned = [p for p in line.waiting.values() if p.returns and p.importance == best]
            if kind == "first" and returned:
                assert progress is min(returned, key=lambda one: one.place)
            earlier = [
                p for p in line.waiting.values()
                if p.number < progress.number and p.request.bundle == progress.request.bundle != ""
                and p.request.client == progress.request.client and p.importance == best and not p.returns
            ]  # fmt: skip
            assert kind == "shortest" or progress.returns or not earlier, "a bundle is in order"
            line.take(progress)
            inside.append(progress)
        line.queue.check()
        assert (line.queue.first() is None) == (line.queue.shortest() is None) == (not line.waiting)
    while (progress := line.queue.first()) is not None:
        line.take(progress)
        line.queue.check()
    assert not line.waiting and len(line.queue) == 0 and not line.queue._turns


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=60), st.lists(st.booleans()),
    st.integers(0, 30),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_whoever_comes_new_waits_one_round(crowd: list, steps: list[bool], later: int) -> None:
    """One answer of each client that waits already, and of the clients that come later none, however many they ask."""
    line = Line()
    for client, bundle in crowd:
        line.add(f"c{client}", f"b{bundle}")
    for is_first in steps:
        if line.waiting:
            line.take(line.queue.first() if is_first else line.queue.shortest())  # type: ignore[arg-type]
    others = line.others("new")
    new = line.add("new", "n", size=1000)
    for number in range(later):
        line.add(f"late{number % 3}", f"{number}", size=1)
    while new.id in line.waiting:
        line.take(line.queue.first())  # type: ignore[arg-type]
    passed = Counter(line.behind[new.id])
    assert set(passed) <= others and all(count == 1 for count in passed.values()), passed


def test_a_bundle_of_one_comes_within_one_round_of_its_clients_bundles() -> None:
    line = Line()
    for bundle in range(30):
        for _ in range(16):
            line.add("a", f"b{bundle}")
    for _ in range(45):
        line.take(line.queue.first())  # type: ignore[arg-type]
    own = line.add("a", "single")
    other = line.add("b", "single")
    order = []
    while own.id in line.waiting:
        order.append(line.queue.first())
        line.take(order[-1])  # type: ignore[arg-type]
    assert order.index(other) <= 1 and order.index(own) <= 31
    bundles = Counter(progress.request.bundle for progress in order[:-1] if progress is not other)
    assert max(bundles.values()) == 1


@pytest.mark.parametrize("door", [False, True])
def test_nobody_starves_beside_clients_that_are_always_new(door: bool) -> None:
    """Two of a client's answers wait while, for each answer let in, another client comes for the first time."""
    line = Line()
    mine = [line.add("a", "x", size=50) for _ in range(3)]
    for number in range(8):
        line.add(f"n{number}", "", size=1)
    for number in range(8, 60):
        line.add(f"n{number}", "", size=1)
        line.take(line.queue.first())  # type: ignore[arg-type]
        if door and (shortest := line.queue.shortest()) is not None:
            line.take(shortest)
    assert not any(progress.id in line.waiting for progress in mine)


def test_a_client_that_asks_for_one_answer_after_the_other_has_no_more_turns_than_others() -> None:
    """Its last turn is remembered while others wait, though nothing of it waits by then."""
    line = Line()
    for _ in range(40):
        line.add("crowd", "x")
        line.add("other", "y")
    taken: Counter[str] = Counter()
    for _ in range(60):
        if "eager" not in line.others(""):
            line.add("eager", "")
        progress = line.queue.first()
        assert progress is not None
        taken[progress.request.client] += 1
        line.take(progress)
    assert max(taken.values()) - min(taken.values()) <= 1, taken
    line.queue.check()


def test_the_shortest_within_a_round_goes_through_the_door() -> None:
    line = Line()
    long, short = line.add("a", "1", size=400), line.add("b", "2", size=7)
    crowd = [line.add("c", "3", size=5) for _ in range(20)]
    taken = []
    while line.waiting:
        taken.append(line.queue.shortest())
        line.take(taken[-1])  # type: ignore[arg-type]
    assert taken[:2] == [crowd[0], short] and taken.index(long) <= 2
    line = Line()  # of one client, too: its many short ones are a long one
    crowd = [line.add("c", "3", size=5) for _ in range(20)]
    single = line.add("c", "4", size=12)
    for _ in range(3):
        line.take(line.queue.shortest())  # type: ignore[arg-type]
    assert single.id not in line.waiting


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("client", ["crowd", "other"])
def test_a_few_tokens_beside_480_answers(depth: int, client: str) -> None:
    """Thirty requests of sixteen prompts; then five tokens of another client, or another request of the same one."""
    drive = Drive(depth, num_blocks=400, num_rows=8, budget=64, checked=False)
    for bundle in range(30):
        drive.add(*(request(f"{bundle}.{i}", 12, 20, client="crowd", bundle=f"b{bundle}") for i in range(16)))
    drive.run(until=lambda: drive.steps >= 60)
    begin, before = drive.steps, sum(answer.finish is not None for answer in drive.answers.values())
    drive.add(request("few", 40, 5, client=client, bundle="few"))
    drive.run(until=lambda: drive.answers["few"].finish is not None)
    after = sum(answer.finish is not None for answer in drive.answers.values())
    # another client: the next row that is free. the same: behind one answer of each of its thirty requests
    assert drive.steps - begin <= (30 if client == "other" else 130), drive.steps - begin
    assert after - before <= (20 if client == "other" else 50)
    answers = drive.run()
    assert all(answer.finish == "length" for answer in answers.values())
    drive.scheduler.check()


def test_a_long_prompt_of_one_client_is_not_starved_by_anothers_crowd() -> None:
    """The crowd is older and each of its prompts is shorter; the long one keeps its place once its turn has come."""
    drive = Drive(2, num_blocks=600, num_rows=8, budget=64)
    drive.add(*(request(f"c{i}", 30, 2, client="crowd", bundle="b") for i in range(300)))
    drive.run(until=lambda: drive.steps >= 10)
    begin = drive.steps
    drive.add(request("long", 1000, 1, client="other"))
    answers = drive.run(until=lambda: drive.answers["long"].finish is not None)
    assert answers["long"].last_step - begin <= 1000 / 32 + 8, answers["long"].last_step - begin
    drive.run()


def test_priorities_come_before_turns() -> None:
    drive = Drive(1, num_rows=1, policy="priority")
    drive.add(*(request(f"a{i}", 5, 2, client="a", bundle="x", priority=-1) for i in range(5)))
    drive.add(*(request(f"b{i}", 5, 2, client=f"b{i}") for i in range(3)))
    answers = drive.run()
    order = sorted(answers, key=lambda name: answers[name].last_step or 0)
    assert order == [f"a{i}" for i in range(5)] + [f"b{i}" for i in range(3)]


def test_siblings_without_a_bundle_follow_their_first() -> None:
    drive = Drive(1, num_rows=1)
    for name in "ab":
        drive.add(request(name, 20, 2), *(request(f"{name}{i}", 20, 2, fork_of=name, seed=i) for i in range(3)))
    answers = drive.run()
    order = sorted(answers, key=lambda name: answers[name].last_step or 0)
    assert [name[0] for name in order] == list("aaaabbbb"), order


@pytest.mark.parametrize("name", ["client", "bundle"])
@pytest.mark.parametrize("value", [5, None, "x" * 300, "\ud800"])
def test_names_that_could_harm_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        request("a", 5, **{name: value})
    assert caught.value.param == name
