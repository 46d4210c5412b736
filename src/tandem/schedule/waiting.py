"""The waiting requests: who is first in line, and who is shortest. It knows neither blocks nor budgets.

Two heaps over the same requests. An entry is good while the request's stamp is the entry's, so leaving is O(1) and
the heaps forget lazily: each operation is O(log n), whatever the number of requests that wait.
"""

import heapq

from tandem.schedule.progress import Progress, Status

_Entry = tuple[int, int, int, int, Progress]


class WaitingQueue:
    """Smaller keys are first in line. The shortest is the one with the fewest tokens, within the same importance."""

    def __init__(self) -> None:
        self._line: list[_Entry] = []
        self._sizes: list[_Entry] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, progress: Progress, num_tokens: int) -> None:
        """num_tokens: what it would have to compute. If it raises, nothing is kept."""
        progress.status = Status.WAITING
        progress.stamp += 1
        progress.size = num_tokens
        importance, number = progress.key
        try:
            heapq.heappush(self._line, (importance, number, 0, progress.stamp, progress))
            heapq.heappush(self._sizes, (importance, num_tokens, number, progress.stamp, progress))
        except BaseException:  # a key that cannot be compared stays in the heap, and would fail those who come later
            progress.stamp += 1
            self._line, self._sizes = _sweep(self._line), _sweep(self._sizes)
            raise
        self._num_waiting += 1

    def remove(self, progress: Progress) -> None:
        progress.stamp += 1
        self._num_waiting -= 1
        limit = 2 * self._num_waiting + 64
        if len(self._line) > limit:
            self._line = _sweep(self._line)
        if len(self._sizes) > limit:
            self._sizes = _sweep(self._sizes)

    def first(self) -> Progress | None:
        return _top(self._line)

    def shortest(self) -> Progress | None:
        return _top(self._sizes)

    def check(self) -> None:
        for heap in (self._line, self._sizes):
            good = [entry[4] for entry in heap if entry[3] == entry[4].stamp]
            assert len(good) == len(set(good)) == self._num_waiting, "the queue has lost count"
            assert all(progress.status is Status.WAITING for progress in good)
            assert len(heap) <= 2 * self._num_waiting + 64, "the queue keeps what has left it"


def _top(heap: list[_Entry]) -> Progress | None:
    while heap:
        entry = heap[0]
        if entry[3] == entry[4].stamp:
            return entry[4]
        heapq.heappop(heap)
    return None


def _sweep(heap: list[_Entry]) -> list[_Entry]:
    kept = [entry for entry in heap if entry[3] == entry[4].stamp]
    heapq.heapify(kept)
    return kept
