"""Requests that decode in step: of each of them nothing changes at a step but one number, the same for all.

So nothing is done for each at each step. A member's position is its offset plus the number of the step; who needs
care (a new block, the last token) stands in a calendar under the number of the step where that will be.

    step        7    8    9   10   11        calendar
    offset  3  10   11   12   13 …           10: [this one]  (13 + 3: its block is full)
    offset 20   ·    ·   29   30   31 …      joined at 9
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tandem.schedule.progress import Progress


class Beat:
    """The number that moves the positions of all who follow it."""

    __slots__ = ("step",)

    def __init__(self, step: int) -> None:
        self.step = step


STILL = Beat(0)
"""Who follows it moves by itself."""


class Crew(NamedTuple):
    """The members, as columns that are never changed: who joins or leaves makes a new crew.

    tokens  the lists of what each has; they grow.     stops  ids of which one at least ends or concerns somebody.
    """

    owners: list["Progress"]
    requests: list[str]
    rows: list[int]
    offsets: list[int]
    tokens: list[list[int]]
    stops: frozenset[int]

    @classmethod
    def of(cls, owners: list["Progress"]) -> "Crew":
        return cls(
            owners,
            [progress.id for progress in owners],
            [progress.row for progress in owners],
            [progress.offset for progress in owners],
            [progress.tokens for progress in owners],
            frozenset().union(*{progress.stops for progress in owners}),
        )


NOBODY = Crew.of([])
