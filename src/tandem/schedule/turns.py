"""Turns between the clients that wait with requests of one importance. It knows neither blocks nor budgets.

Fair queueing in rounds (virtual time of WFQ, Demers, Keshav and Shenker 1989; eligibility as in WF²Q, Bennett and Zhang
1996), where each answer costs one round:

    client a  ─►  bundle 1: · · · ·      A client's next turn begins a round behind its last one, or now if it is new.
                  bundle 2: ·            Among the clients the earliest turn is first; within a client the bundles (the
    client b  ─►  bundle 7: ·            answers of one of its requests) take turns by the same rule.

While n clients wait, each answer taken moves the time on by 1/n round. So whoever comes new waits for one answer of
each client that waits already, and for one of each bundle of its own; and time goes on for those who wait, however many
come new, so nobody starves. Every operation is O(log n); heaps forget lazily.
"""

import heapq
import itertools

from tandem.schedule.progress import Progress

ROUND = 1 << 20
BEFORE_ALL = -1
_Entry = tuple[int, int, int, Progress]


class Line:
    """One client's waiting requests: in turn, and by size.

    start     its next turn; the client may not go through the door before.
    returned  those who were made to leave: before all others, in the order in which they once came in.

    The size counts as often as answers of the same bundle stand before it: many short ones are a long one.
    """

    __slots__ = ("_bundles", "_in_turn", "_now", "_num_alone", "_sizes", "name", "num", "returned", "serial", "start")

    def __init__(self, name: str, serial: int, *, returned: bool = False) -> None:
        self.name, self.serial, self.returned = name, serial, returned
        self.start = BEFORE_ALL
        self.num = self._num_alone = 0
        self._now = 0
        self._bundles: dict[str, list[int]] = {}  # name → its next turn, how many of it wait
        self._in_turn: list[_Entry] = []
        self._sizes: list[_Entry] = []

    def push(self, progress: Progress, num_tokens: int) -> None:
        """If it raises, what is left in the heaps is not good; see ``sweep``."""
        turn, request = self._now, progress.request
        if self.returned:
            turn = progress.place
        elif (bundle := self._bundles.get(request.bundle)) is not None:
            turn = max(turn, bundle[0])
        elif request.fork_of is not None and not request.bundle:
            turn = min(turn, progress.turn)  # its first sibling's
        progress.turn = turn
        progress.weight = num_tokens * (1 + max(0, turn - self._now) // ROUND)
        number, stamp = progress.number, progress.stamp
        heapq.heappush(self._in_turn, (progress.turn, number, stamp, progress))
        heapq.heappush(self._sizes, (progress.weight, number, stamp, progress))

    def count(self, progress: Progress) -> None:
        """It is in."""
        self.num += 1
        name = progress.request.bundle
        if name and not self.returned:
            bundle = self._bundles.setdefault(name, [0, 0])
            bundle[0], bundle[1] = progress.turn + ROUND, bundle[1] + 1
        else:
            self._num_alone += 1

    def leave(self, progress: Progress, *, served: bool) -> None:
        """Its stamp is another one already."""
        num_bundles = len(self._bundles) + self._num_alone  # a request without a bundle is one of its own
        self.num -= 1
        if served and not self.returned:
            now = max(self._now, progress.turn) + ROUND // num_bundles
            self._now = max(self._now, min(now, self.first().turn + ROUND - 1)) if self.num else now
        name = progress.request.bundle
        if name and not self.returned:
            bundle = self._bundles[name]
            bundle[1] -= 1
            if not bundle[1]:
                del self._bundles[name]
        else:
            self._num_alone -= 1
        if max(len(self._in_turn), len(self._sizes)) > 2 * self.num + 64:
            self.sweep()

    def first(self) -> Progress:
        return _top(self._in_turn)

    def shortest(self) -> Progress:
        return _top(self._sizes)

    def sweep(self) -> None:
        for heap in (self._in_turn, self._sizes):
            heap[:] = [entry for entry in heap if entry[2] == entry[3].stamp]
            heapq.heapify(heap)

    def check(self) -> list[Progress]:
        """Those who wait."""
        for heap in (self._in_turn, self._sizes):
            good = [entry[3] for entry in heap if entry[2] == entry[3].stamp]
            assert len(good) == len(set(good)) == self.num, "a line has lost count"
            assert len(heap) <= 2 * self.num + 64, "a line keeps what has left it"
        alone = sum(not progress.request.bundle or self.returned for progress in good)
        assert alone == self._num_alone == self.num - sum(bundle[1] for bundle in self._bundles.values())
        return good


_LineEntry = tuple[int, int, int, Line]  # the third tells lines apart


class Turns:
    """The lines of all clients.

    _starts  lines by their next turn.      _ready   those whose turn has come, by their shortest request.
    _later   those whose turn comes later, or who are remembered until it would have come.
    """

    def __init__(self) -> None:
        self.num = 0
        self._num_lines = 0
        self._now = 0
        self._serials = itertools.count()
        self._lines: dict[tuple[bool, str], Line] = {}
        self._starts: list[_LineEntry] = []
        self._ready: list[_LineEntry] = []
        self._later: list[_LineEntry] = []

    def push(self, progress: Progress, num_tokens: int) -> None:
        """If it raises, nothing is kept."""
        returned, name = self._name(progress)
        line = self._lines.get((returned, name)) or Line(name, next(self._serials), returned=returned)
        start = line.start
        if not line.num:
            start = BEFORE_ALL if line.returned else max(start, self._now)
        try:
            line.push(progress, num_tokens)
            if not line.num:
                heapq.heappush(self._starts, (start, progress.number, line.serial, line))
            if start <= self._now and (not line.num or line.shortest() is progress):
                heapq.heappush(self._ready, (progress.weight, progress.number, line.serial, line))
        except BaseException:  # what cannot be compared stays in a heap, and would fail those who come later
            progress.stamp += 1
            line.sweep()
            self._sweep()
            raise
        self._lines[returned, name] = line
        self._num_lines += not line.num
        line.start = start
        line.count(progress)
        self.num += 1
        self._tidy()

    def leave(self, progress: Progress, *, served: bool) -> None:
        """served: it has been let in, which costs its client a turn. Its stamp is another one already."""
        line = self._lines[self._name(progress)]
        now = max(self._now, line.start) + ROUND // self._num_lines
        line.leave(progress, served=served)
        self.num -= 1
        self._num_lines -= not line.num
        if served and not line.returned:
            line.start += ROUND
            number = line.first().number if line.num else progress.number
            if line.num:
                heapq.heappush(self._starts, (line.start, number, line.serial, line))
            self._pass(now)
            if line.start > self._now:
                heapq.heappush(self._later, (line.start, number, line.serial, line))
        if not line.num and line.start <= self._now:
            del self._lines[self._name(progress)]
        self._promote()
        self._tidy()

    def first(self) -> Progress:
        """The first in line; there must be one."""
        self._wake()
        return self._starts[0][3].first()

    def shortest(self) -> Progress:
        """The shortest of those whose turn has come; there must be one."""
        self._wake()
        while True:
            weight, number, _, line = self._ready[0]
            if not line.num or line.start > self._now:
                heapq.heappop(self._ready)
                continue
            progress = line.shortest()
            if (progress.weight, progress.number) == (weight, number):
                return progress
            heapq.heapreplace(self._ready, (progress.weight, progress.number, line.serial, line))

    @staticmethod
    def _name(progress: Progress) -> tuple[bool, str]:
        """Those who return stand in one line, whoever they are."""
        return progress.returns, "" if progress.returns else progress.request.client

    def _wake(self) -> None:
        """If nobody's turn has come, it is the next one's."""
        start = self._earliest()
        if start > self._now:
            self._now = start
            self._promote()

    def _earliest(self) -> int:
        """The first turn of all; drops what is no first any more."""
        while True:
            start, _, _, line = self._starts[0]
            if line.num and line.start == start:
                return start
            heapq.heappop(self._starts)

    def _pass(self, now: int) -> None:
        """Time goes on, but not by a round beyond anybody's turn: else who comes new would wait for two of his."""
        if self._num_lines and (earliest := self._earliest()) != BEFORE_ALL:
            now = min(now, earliest + ROUND - 1)
        self._now = max(self._now, now)

    def _promote(self) -> None:
        """Those whose turn has come may go through the door; whoever has nothing waiting by then is forgotten."""
        while self._later and self._later[0][0] <= self._now:
            line = heapq.heappop(self._later)[3]
            if line.num:
                progress = line.shortest()
                heapq.heappush(self._ready, (progress.weight, progress.number, line.serial, line))
            else:
                del self._lines[line.returned, line.name]

    def _tidy(self) -> None:
        limit = 2 * self._num_lines + 64
        if len(self._starts) > limit or len(self._ready) > limit:
            self._sweep()

    def _sweep(self) -> None:
        waiting = [line for line in self._lines.values() if line.num]
        self._starts = [(line.start, line.first().number, line.serial, line) for line in waiting]
        ready = [(line.shortest(), line) for line in waiting if line.start <= self._now]
        self._ready = [(progress.weight, progress.number, line.serial, line) for progress, line in ready]
        heapq.heapify(self._starts)
        heapq.heapify(self._ready)

    def check(self) -> list[Progress]:
        """Those who wait."""
        found = [progress for line in self._lines.values() for progress in line.check()]
        waiting = [line for line in self._lines.values() if line.num]
        assert len(found) == self.num and len(waiting) == self._num_lines, "the turns have lost count"
        limit = 2 * self._num_lines + 64
        assert max(len(self._starts), len(self._ready)) <= limit, "the turns keep what has left them"
        assert len(self._later) == sum(line.start > self._now for line in self._lines.values())
        assert all(line.num or line.start > self._now for line in self._lines.values()), "a line is kept in vain"
        assert all(line.start <= self._now + ROUND for line in self._lines.values()), "a turn lies too far ahead"
        return found


def _top(heap: list[_Entry]) -> Progress:
    while heap[0][2] != heap[0][3].stamp:
        heapq.heappop(heap)
    return heap[0][3]
