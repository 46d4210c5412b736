"""Blocks change state as drawn, and digests name contents so that nobody can forge them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kv.pool import Pool
from tandem.kv.prefix import Chain


def test_takes_all_or_nothing_and_gives_back() -> None:
    pool = Pool(3)
    assert pool.take(4) is None and pool.num_available == 3
    blocks = pool.take(3)
    assert blocks is not None and sorted(blocks) == [0, 1, 2]
    assert pool.take(1) is None
    pool.check(dict.fromkeys(blocks, 1))
    pool.drop(blocks)
    pool.check({})
    with pytest.raises(AssertionError):
        pool.drop([0])


def test_named_blocks_stay_findable_until_evicted_least_recently_used_first() -> None:
    pool = Pool(3)
    blocks = pool.take(3)
    assert blocks is not None
    for block in blocks:
        pool.name(block, b"%d" % block)
    pool.drop(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (0, 3, 3)
    pool.share([blocks[2]])  # used again, so it is the youngest
    pool.drop([blocks[2]])
    assert pool.take(1) == [blocks[1]], "the tail goes before the prefix, the least recently used first"
    assert pool.find(b"%d" % blocks[1]) is None and pool.find(b"%d" % blocks[0]) == blocks[0]
    assert pool.take(1) == [blocks[0]]
    assert pool.num_evictions == 2
    pool.forget_all()
    assert pool.num_free == 1 and pool.find(b"%d" % blocks[2]) is None


def test_the_first_block_of_a_content_keeps_its_name() -> None:
    pool = Pool(2)
    one, two = pool.take(1), pool.take(1)
    assert one and two
    pool.name(one[0], b"x")
    pool.name(two[0], b"x")
    assert pool.find(b"x") == one[0]
    pool.drop(two)
    assert pool.num_free == 1 and pool.num_cached == 0
    pool.forget(one[0])
    pool.drop(one)
    assert pool.num_free == 2
    pool.check({})


tokens = st.lists(st.integers(0, 2**31), min_size=4, max_size=24)


@given(tokens, tokens, st.text(max_size=3), st.text(max_size=3))
@settings(deadline=None, max_examples=100)
def test_digests_are_equal_just_when_salt_and_all_tokens_before_are(
    one: list[int], two: list[int], salt: str, other: str
) -> None:
    first, second = Chain(salt, 4), Chain(other, 4)
    for index in range(min(len(one), len(two)) // 4):
        same = salt == other and one[: 4 * index + 4] == two[: 4 * index + 4]
        assert (first.digest(index, one) == second.digest(index, two)) == same


def test_the_same_block_behind_another_prefix_has_another_digest() -> None:
    assert Chain("", 2).digest(1, [1, 2, 3, 4]) != Chain("", 2).digest(1, [1, 1, 3, 4])
    assert Chain("", 2).digest(0, [3, 4]) != Chain("", 2).digest(1, [1, 2, 3, 4])


def test_only_full_blocks_have_a_digest() -> None:
    with pytest.raises(AssertionError):
        Chain("", 4).digest(1, [1, 2, 3, 4, 5])
