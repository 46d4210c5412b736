"""A line in which clients take turns."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.line import Line, LineOfKinds


@dataclass(frozen=True)
class Item:
    client: str
    number: int


def come_or_leave(line: Line[Item] | LineOfKinds[Item], inside: list[Item], item: Item, what: str) -> None:
    """Into both, or the last one of the same client out of both."""
    own = [other for other in inside if other.client == item.client]
    if what == "append":
        line.append(item)
        inside.append(item)
    elif what == "remove" and own:
        line.remove(own[-1])
        inside.remove(own[-1])


def line_of(clients: str) -> Line[Item]:
    line: Line[Item] = Line()
    for number, client in enumerate(clients):
        line.append(Item(client, number))
    return line


def test_clients_take_turns() -> None:
    line = line_of("aaaaabbc")
    assert "".join(line.popleft().client for _ in range(8)) == "abcabaaa" and not len(line)


def test_the_last_quarter_is_for_clients_with_less_of_it() -> None:
    line = line_of("aabbbb")
    assert [line.limit_of(client, 16) for client in "abc"] == [16, 12, 16]


def test_who_comes_during_a_turn_stands_before_whose_it_was() -> None:
    line = line_of("aaa")
    line.popleft()
    line.append(Item("b", 3))
    line.put_last("a")
    line.put_last("c")
    assert "".join(line.popleft().client for _ in range(3)) == "baa"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["append", "pop", "remove"])), max_size=40))
@settings(max_examples=100, deadline=None)
def test_each_comes_once_and_a_client_s_own_in_order(actions: list[tuple[str, str]]) -> None:
    line, inside, came = Line[Item](), list[Item](), list[Item]()
    for number, (client, what) in enumerate(actions):
        come_or_leave(line, inside, Item(client, number), what)
        if what == "pop" and inside:
            item = line.popleft()
            assert item == next(other for other in inside if other.client == item.client)
            inside.remove(item)
            came.append(item)
        line.check()
        assert sorted(line, key=lambda item: item.number) == inside and len(line) == len(inside)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["append", "pop", "remove"])), max_size=40))
@settings(max_examples=100, deadline=None)
def test_kinds_of_a_client_share_its_turns(actions: list[tuple[str, str]]) -> None:
    """Each comes once, those of a client and kind in order; nobody has two turns while another waits."""
    line, inside, turn = LineOfKinds[Item](lambda item: str(item.number % 3)), list[Item](), Item("", 0)
    for number, (client, what) in enumerate(actions):
        come_or_leave(line, inside, Item(client, number), what)
        if what == "pop" and inside:
            line.put_last(turn)  # it took until now
            item = line.popleft()
            kind = [other for other in inside if (other.client, other.number % 3) == (item.client, item.number % 3)]
            assert item == kind[0]
            assert item.client != turn.client or {other.client for other in inside} == {turn.client}
            inside.remove(item)
            turn = item
        line.check()
        assert sorted(line, key=lambda item: item.number) == inside and len(line) == len(inside)
