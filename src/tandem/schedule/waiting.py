"""The waiting requests: who is first in line, and who goes through the door next. It knows neither blocks nor budgets.

The most important ones (smallest number) come first; among equals clients take turns (turns.py). Each operation is
O(log n), whatever the number of requests that wait.
"""

import heapq

from tandem.schedule.progress import Progress, Status
from tandem.schedule.turns import Turns


class WaitingQueue:
    """Who has been made to leave returns before those who have not been in yet, of the same importance."""

    def __init__(self) -> None:
        self._turns: dict[int, Turns] = {}
        self._importances: list[int] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, progress: Progress, num_tokens: int) -> None:
        """num_tokens: what it would have to compute. If it raises, nothing is kept."""
        progress.status = Status.WAITING
        progress.stamp += 1
        progress.size = num_tokens
        progress.returns = progress.place > 0
        turns = self._turns.get(progress.importance)
        if turns is not None:
            turns.push(progress, num_tokens)
        else:
            turns = Turns()
            turns.push(progress, num_tokens)
            heapq.heappush(self._importances, progress.importance)
            self._turns[progress.importance] = turns
        self._num_waiting += 1

    def remove(self, progress: Progress) -> None:
        """It has ended."""
        self._leave(progress, served=False)

    def take(self, progress: Progress) -> None:
        """It has been let in, in its client's turn."""
        self._leave(progress, served=True)

    def _leave(self, progress: Progress, *, served: bool) -> None:
        progress.stamp += 1
        self._num_waiting -= 1
        turns = self._turns[progress.importance]
        turns.leave(progress, served=served)
        if not turns.num:
            del self._turns[progress.importance]
            if len(self._importances) > 2 * len(self._turns) + 64:
                self._importances = sorted(self._turns)

    def first(self) -> Progress | None:
        """Whose turn it is."""
        turns = self._most_important()
        return None if turns is None else turns.first()

    def shortest(self) -> Progress | None:
        """The shortest of those who may come in by now; see turns.Line for what is short."""
        turns = self._most_important()
        return None if turns is None else turns.shortest()

    def _most_important(self) -> Turns | None:
        while self._importances:
            turns = self._turns.get(self._importances[0])
            if turns is not None:
                return turns
            heapq.heappop(self._importances)
        return None

    def check(self) -> None:
        found = [progress for turns in self._turns.values() for progress in turns.check()]
        assert len(found) == len(set(found)) == self._num_waiting, "the queue has lost count"
        assert all(progress.status is Status.WAITING for progress in found)
        assert set(self._turns) <= set(self._importances)
        assert len(self._importances) <= 2 * len(self._turns) + 65, "the queue keeps what has left it"
