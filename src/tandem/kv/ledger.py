"""Who owns which KV block. It knows requests by name and tokens by value, but not when anything runs.

A request *opens* a table (taking what the prefix cache already holds), *extends* it as it grows, lets the cache
*learn* its full blocks, and *releases* it. Siblings *fork*: full blocks are shared, a part-filled one is copied.

    prompt of 40 tokens, blocks of 16       first    [ 7 ][ 3 ][ 9 ·8 of 16· ]
                                            sibling  [ 7 ][ 3 ][ 5 ← copy of 9 ]     recomputes token 39 alone

A released block may still be named by a step in flight; it is *pending* until that step is settled.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.kv.pool import Pool
from tandem.kv.prefix import Chain


@dataclass(slots=True, eq=False)
class Table:
    """One request's blocks, in the order of its positions.

    cached   leading tokens whose K and V were there when it was opened.
    learned  leading blocks that the prefix cache was told of.
    epoch    which weights its K and V belong to; see Ledger.reset_prefix.
    first_step  the first step that may name it; whoever opens it says so.
    """

    request: str
    blocks: list[int]
    chain: Chain
    cached: int
    learned: int
    epoch: int
    first_step: int = 0


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """Blocks by state (free + cached + owned = num_blocks; pending ones are owned), and totals since the start."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_owned: int
    num_pending: int
    num_tables: int
    num_asked_tokens: int
    num_hit_tokens: int
    num_evictions: int
    num_copies: int


class Ledger:
    """All tables over one pool of num_blocks blocks of block_size tokens."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = Pool(num_blocks)
        self._tables: dict[str, Table] = {}
        self._pending: dict[int, list[Table]] = {}
        self._settled_step = 0  # steps count from 1
        self._epoch = 0
        self._num_asked = self._num_hit = self._num_copies = 0

    @property
    def num_available(self) -> int:
        return self.pool.num_available

    @property
    def has_pending(self) -> bool:
        """Blocks will come home when a step in flight is settled."""
        return bool(self._pending)

    def chain(self, salt: str) -> Chain:
        return Chain(salt, self.block_size)

    def match(self, tokens: Sequence[int], chain: Chain) -> list[int]:
        """Blocks that hold the beginning of tokens; never all of them: at least one token is left to compute."""
        if not self.prefix_cache:
            return []
        found: list[int] = []
        find = self.pool.find
        for index in range((len(tokens) - 1) // self.block_size):
            block = find(chain.digest(index, tokens))
            if block is None:
                break
            found.append(block)
        return found

    def open(
        self, request: str, tokens: Sequence[int], chain: Chain, *, reuse: bool = True, reserve: int = 0
    ) -> Table | None:
        """A table that holds all of tokens, or None if fewer than reserve blocks would be left for others."""
        assert request not in self._tables, f"request {request} has a table already"
        shared = self.match(tokens, chain) if reuse else []
        pool = self.pool
        num_fresh = -(-len(tokens) // self.block_size) - len(shared)
        num_woken = sum(map(pool.is_cached, shared))
        if num_fresh + num_woken + reserve > pool.num_available:
            return None
        pool.share(shared)
        fresh = pool.take(num_fresh)
        assert fresh is not None
        cached = len(shared) * self.block_size
        if reuse and self.prefix_cache:
            self._num_asked += len(tokens)
            self._num_hit += cached
        table = Table(request, shared + fresh, chain, cached, len(shared), self._epoch)
        self._tables[request] = table
        return table

    def extend(self, table: Table, num_tokens: int) -> list[int] | None:
        """Blocks added so that the table holds num_tokens tokens ([] if it does already), or None: too few."""
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing <= 0:
            return []
        fresh = self.pool.take(missing)
        if fresh is not None:
            table.blocks += fresh
        return fresh

    def learn(self, table: Table, tokens: Sequence[int], num_computed: int) -> None:
        """Let others find the full blocks among the first num_computed tokens: known to the host, and computed by
        the steps planned so far (a later step reads them behind those on the same stream)."""
        if not self.prefix_cache or table.epoch != self._epoch:
            return
        for index in range(table.learned, min(num_computed, len(tokens)) // self.block_size):
            self.pool.name(table.blocks[index], table.chain.digest(index, tokens))
            table.learned = index + 1

    def can_fork(self, parent: Table) -> bool:
        """The parent's K and V belong to the weights of now."""
        return parent.epoch == self._epoch

    def fork(
        self, parent: Table, request: str, prompt_length: int, chain: Chain, *, reserve: int = 0
    ) -> tuple[Table, list[tuple[int, int]]] | None:
        """A sibling's table over prompt_length tokens, and the copies (from, to) that it needs; None: too few blocks.

        All but the last prompt token count as cached; the block of the last one is the sibling's own, since it will
        be written. The copies' sources must not be released before the step that copies (see release).
        """
        assert request not in self._tables, f"request {request} has a table already"
        num_shared, part = divmod(prompt_length - 1, self.block_size)
        if 1 + reserve > self.pool.num_available:
            return None
        shared = parent.blocks[:num_shared]
        self.pool.share(shared)
        fresh = self.pool.take(1)
        assert fresh is not None
        copies = [(parent.blocks[num_shared], fresh[0])] if part else []
        self._num_copies += len(copies)
        table = Table(request, shared + fresh, chain, prompt_length - 1, min(parent.learned, num_shared), self._epoch)
        self._tables[request] = table
        return table, copies

    def release(self, table: Table, last_step: int, *, forget: bool = False) -> None:
        """Give the table back once last_step, the last step that names it, is settled.

        forget: its content is not to be trusted; what the cache learned from it is not found again.
        """
        del self._tables[table.request]
        if forget:
            self._forget(table, table.cached, {})
        if last_step <= self._settled_step:
            self.pool.drop(table.blocks)
        else:
            self._pending.setdefault(last_step, []).append(table)

    def settle(self, step: int) -> None:
        """The step came home; steps are settled in order."""
        self._settled_step = step
        for table in self._pending.pop(step, ()):
            self.pool.drop(table.blocks)

    def spoil(self, failed: Iterable[tuple[str, int]], step: int, copies: Sequence[tuple[int, int]]) -> set[str]:
        """A step, not settled yet, did not write what it should have: nobody finds it, nor what was computed on it.

        failed  pairs (request, first position that is not there), of requests that the step named.
        copies  pairs (from, to) of blocks, copied by later steps.
        Returns whose open tables began, when they were opened, with what is not there.
        """
        tables = [*self._tables.values(), *(table for tables in self._pending.values() for table in tables)]
        missing: dict[int, int] = {}  # block → first position in it that is not there
        for request, position in failed:
            named = [table for table in tables if table.request == request and table.first_step <= step]
            self._forget(max(named, key=lambda table: table.first_step), position, missing)
        spoiled: set[str] = set()
        before: dict[int, int] = {}
        while before != missing:  # who shares with whom shares is no better off
            before = dict(missing)
            for source, target in copies:
                if source in missing:
                    missing[target] = min(missing[source], missing.get(target, missing[source]))
            for table in tables:
                begun = table.blocks[: -(-table.cached // self.block_size)]
                if any(missing.get(block, table.cached) < table.cached for block in begun):
                    self._forget(table, table.cached, missing)
                    if table is self._tables.get(table.request):
                        spoiled.add(table.request)
        return spoiled

    def _forget(self, table: Table, position: int, missing: dict[int, int]) -> None:
        """Nobody finds what was computed into the table; what is missing of it begins at the position."""
        for index in range(table.cached // self.block_size, len(table.blocks)):
            block, first = table.blocks[index], max(position, index * self.block_size)
            self.pool.forget(block)
            if first < (index + 1) * self.block_size:
                missing[block] = min(first, missing.get(block, first))

    def reset_prefix(self) -> None:
        """Forget all cached content (the weights were swapped). Open tables go on, but teach the cache no more."""
        self.pool.forget_all()
        self._epoch += 1

    def statistics(self) -> LedgerStatistics:
        pool = self.pool
        return LedgerStatistics(
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            num_cached=pool.num_cached,
            num_owned=pool.num_blocks - pool.num_available,
            num_pending=sum(len(table.blocks) for tables in self._pending.values() for table in tables),
            num_tables=len(self._tables),
            num_asked_tokens=self._num_asked,
            num_hit_tokens=self._num_hit,
            num_evictions=pool.num_evictions,
            num_copies=self._num_copies,
        )

    def check(self) -> None:
        """Assert that every block's count is the number of tables, open or pending, that hold it."""
        owners: Counter[int] = Counter()
        for table in self._tables.values():
            owners.update(table.blocks)
        for step, tables in self._pending.items():
            assert step > self._settled_step, f"blocks wait for step {step}, which was settled"
            for table in tables:
                owners.update(table.blocks)
        self.pool.check(owners)
