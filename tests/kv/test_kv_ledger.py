"""The ledger: sharing, copying, pending blocks, forgetting; and by hypothesis, that nothing is ever lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kv.ledger import Ledger, Table

PROMPT = list(range(100, 140))


def opened(ledger: Ledger, name: str, tokens: list[int], **how: object) -> Table:
    table = ledger.open(name, tokens, ledger.chain(""), **how)  # type: ignore[arg-type]
    assert table is not None
    return table


def test_a_second_request_shares_full_blocks_and_never_all_tokens() -> None:
    ledger = Ledger(16, 16)
    first = opened(ledger, "a", PROMPT[:32])
    ledger.learn(first, PROMPT[:32], 32)
    second = opened(ledger, "b", PROMPT[:32])
    assert second.cached == 16 and second.blocks[0] == first.blocks[0] and second.blocks[1] != first.blocks[1]
    third = opened(ledger, "c", PROMPT[:33])
    assert third.cached == 32
    assert opened(ledger, "d", PROMPT[:33], reuse=False).cached == 0
    assert ledger.open("e", PROMPT, ledger.chain("someone else's")).cached == 0  # type: ignore[union-attr]
    ledger.check()


def test_only_computed_and_known_blocks_are_learned() -> None:
    ledger = Ledger(16, 16)
    table = opened(ledger, "a", PROMPT)
    ledger.learn(table, PROMPT, 31)
    assert len(ledger.match(PROMPT, ledger.chain(""))) == 1
    ledger.extend(table, 64)
    ledger.learn(table, PROMPT, 64)  # 64 computed, but 40 known
    assert len(ledger.match([*PROMPT, *range(64)], ledger.chain(""))) == 2


def test_blocks_of_a_step_in_flight_come_home_when_it_is_settled() -> None:
    ledger = Ledger(3, 16)
    table = opened(ledger, "a", PROMPT)
    ledger.release(table, last_step=2)
    ledger.settle(1)
    assert ledger.has_pending and ledger.num_available == 0 and ledger.open("b", [1], ledger.chain("")) is None
    ledger.check()
    ledger.settle(2)
    assert not ledger.has_pending and ledger.num_available == 3
    ledger.release(opened(ledger, "b", PROMPT), last_step=2)  # long since settled
    assert ledger.num_available == 3


def test_a_fork_shares_full_blocks_and_copies_the_part_filled_one() -> None:
    ledger = Ledger(8, 16)
    parent = opened(ledger, "a", PROMPT)
    forked = ledger.fork(parent, "b", 40, ledger.chain(""))
    assert forked is not None
    table, copies = forked
    assert table.blocks[:2] == parent.blocks[:2] and copies == [(parent.blocks[2], table.blocks[2])]
    assert table.cached == 39
    ledger.check()
    ledger.release(parent, 0)
    ledger.settle(0)
    assert ledger.num_available == 8 - 3
    ledger.check()


def test_a_fork_of_one_token_more_than_full_blocks_copies_nothing_and_of_full_blocks_copies_the_last() -> None:
    for length, num_shared, num_copies in ((33, 2, 0), (32, 1, 1), (1, 0, 0)):
        ledger = Ledger(8, 16)
        parent = opened(ledger, "a", PROMPT[:length])
        forked = ledger.fork(parent, "b", length, ledger.chain(""))
        assert forked is not None
        table, copies = forked
        assert (len(set(table.blocks) & set(parent.blocks)), len(copies)) == (num_shared, num_copies)
        assert table.cached == length - 1


def test_reserve_leaves_blocks_to_others() -> None:
    ledger = Ledger(4, 16)
    assert ledger.open("a", PROMPT, ledger.chain(""), reserve=2) is None
    parent = opened(ledger, "a", PROMPT, reserve=1)
    assert ledger.fork(parent, "b", 40, ledger.chain(""), reserve=1) is None
    assert ledger.statistics().num_owned == 3
    ledger.check()


def test_after_a_reset_nothing_old_is_found_or_learned() -> None:
    ledger = Ledger(16, 16)
    old = opened(ledger, "a", PROMPT)
    ledger.learn(old, PROMPT, 16)
    ledger.reset_prefix()
    assert not ledger.match(PROMPT, ledger.chain("")) and not ledger.can_fork(old)
    ledger.learn(old, PROMPT, 40)
    assert not ledger.match(PROMPT, ledger.chain("")), "K and V of the old weights were learned"
    new = opened(ledger, "b", PROMPT)
    ledger.learn(new, PROMPT, 40)
    assert ledger.match(PROMPT, ledger.chain("")) == new.blocks[:2]
    ledger.check()


def test_what_failed_is_forgotten() -> None:
    ledger = Ledger(8, 16)
    table = opened(ledger, "a", PROMPT)
    ledger.learn(table, PROMPT, 40)
    ledger.release(table, 0, forget=True)
    ledger.settle(0)
    assert not ledger.match(PROMPT, ledger.chain("")) and ledger.statistics().num_free == 8


moves = st.lists(
    st.tuples(
        st.sampled_from(["open", "extend", "learn", "fork", "release", "settle", "reset"]),
        st.integers(0, 7),
        st.integers(1, 30),
    ),
    max_size=60,
)


@given(moves, st.integers(1, 24), st.sampled_from([1, 2, 4]), st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_block_is_always_accounted_for(
    todo: list[tuple[str, int, int]], num_blocks: int, block_size: int, prefix_cache: bool
) -> None:
    ledger = Ledger(num_blocks, block_size, prefix_cache)
    live: dict[str, tuple[Table, list[int]]] = {}
    settled = 0
    for number, (what, who, size) in enumerate(todo):
        name = f"r{who}"
        if what == "open" and name not in live:
            tokens = [i * (1 + size % 2) for i in range(size)]
            table = ledger.open(name, tokens, ledger.chain(""))
            if table is not None:
                assert table.cached < size
                live[name] = table, tokens
        elif what == "fork" and name in live and (other := f"s{number}"):
            parent, tokens = live[name]
            forked = ledger.fork(parent, other, len(tokens), ledger.chain(""))
            if forked is not None:
                live[other] = forked[0], tokens
        elif what == "settle":
            settled += 1
            ledger.settle(settled)
        elif what == "reset":
            ledger.reset_prefix()
        elif name in live:
            table, tokens = live[name]
            if what == "extend":
                before, room = len(table.blocks), ledger.num_available
                fresh = ledger.extend(table, len(tokens) + size)
                assert len(table.blocks) - before == len(fresh or ()) == room - ledger.num_available
            elif what == "learn":
                ledger.learn(table, tokens, size)
            else:
                ledger.release(live.pop(name)[0], settled + size % 3, forget=size == 7)
        ledger.check()
    for table, _ in live.values():
        ledger.release(table, settled)
    for step in range(settled + 1, settled + 4):
        ledger.settle(step)
    ledger.check()
    assert ledger.num_available == num_blocks and ledger.statistics().num_owned == 0
