"""Fixed blocks with reference counts: free, owned or cached. It knows neither requests nor tokens.

A block is *owned* while its count is above zero, *cached* while nobody owns it but its content has a digest that the
prefix cache may find, and *free* otherwise. Cached blocks are taken back, least recently used first, when no free
block is left; so both kinds are available.

        take                      drop to zero, with a digest
    free ────► owned ────────────────────────────────────────► cached
     ▲           │ drop to zero, no digest        share │        │
     └───────────┘              owned ◄─────────────────┘        │
     └────────────────────────────────── take (evicts) ──────────┘
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class Pool:
    """num_blocks blocks, named 0 .. num_blocks-1. All operations are O(blocks concerned)."""

    __slots__ = ("_by_digest", "_cached", "_counts", "_digests", "_free", "num_blocks", "num_evictions")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def take(self, num_blocks: int) -> list[int] | None:
        """Own that many blocks, or None and nothing taken if there are too few."""
        free, cached, counts = self._free, self._cached, self._counts
        if num_blocks == 1 and free:
            block = free.pop()
            counts[block] = 1
            return [block]
        if num_blocks > len(free) + len(cached):
            return None
        taken = [free.pop() for _ in range(min(num_blocks, len(free)))]
        for _ in range(num_blocks - len(taken)):
            block, _none = cached.popitem(last=False)
            self.num_evictions += 1
            self.forget(block)
            taken.append(block)
        for block in taken:
            counts[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Own blocks that are owned or cached already, once more each."""
        counts, cached = self._counts, self._cached
        for block in blocks:
            if counts[block] == 0:
                del cached[block]
            counts[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Own each once less. The last ones become the first to be evicted: a prefix outlives what follows it."""
        counts, digests = self._counts, self._digests
        for block in reversed(blocks):
            count = counts[block] - 1
            assert count >= 0, f"block {block} was dropped more often than taken"
            counts[block] = count
            if count == 0:
                if digests[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def find(self, digest: bytes) -> int | None:
        return self._by_digest.get(digest)

    def is_cached(self, block: int) -> bool:
        return self._counts[block] == 0 and block in self._cached

    def name(self, block: int, digest: bytes) -> None:
        """Let an owned block be found by its digest, unless another block with the same content can be."""
        if digest not in self._by_digest and self._digests[block] is None:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def forget(self, block: int) -> None:
        """Never find this block again. It stays owned, if it is."""
        digest = self._digests[block]
        if digest is not None:
            self._digests[block] = None
            del self._by_digest[digest]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def forget_all(self) -> None:
        """Forget every digest; cached blocks become free."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._by_digest.clear()
        self._digests = [None] * self.num_blocks

    def check(self, owners: Mapping[int, int]) -> None:
        """Assert that each block is free, owned or cached, and owned as often as owners says."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        for block, count in enumerate(self._counts):
            assert count == owners.get(block, 0), f"block {block}: count {count}, owners {owners.get(block, 0)}"
            assert (count == 0) == (block in free or block in cached), f"block {block} is lost or doubly used"
            digest = self._digests[block]
            assert digest is None or self._by_digest[digest] == block
            assert (digest is not None) or block not in cached
            assert digest is None or block not in free
        assert len(self._by_digest) == sum(digest is not None for digest in self._digests)
