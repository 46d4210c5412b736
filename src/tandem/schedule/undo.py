"""What a failed span takes with it: those who were planned on blocks that it did not write. It knows no device.

A prompt's blocks are shared as soon as the step that computes them is planned, since later steps read behind it. If
that step then leaves the prompt out, whoever shares the blocks reads what is not there:

    step 7  a: prompt, blocks 3 4 5    ─► fails at commit 7
    step 8  b: shares 3 4, goes on     ─► in flight; its token is nonsense
    step 9  c: shares 3 4 and b's 8    ─► in flight, nonsense too

They are put back, as if preempted, with the tokens that are home; those in flight are ghosts' from now on.
"""

from collections import deque

from tandem.kv.prefix import Chain
from tandem.request import Request, SamplingParams
from tandem.schedule.draft import Flight
from tandem.schedule.progress import Progress, Status
from tandem.schedule.running import Running

_GHOST = Progress(Request("", (), SamplingParams()), None, Chain("", 1), 0, 0, 0)
_GHOST.status = Status.ENDED
"""Stands in a flight where one stood who must not get the token."""


def undo(running: Running, flight: Flight, later: deque[Flight], failed: dict[str, str]) -> None:
    """Put back who was planned on what the flight's failed spans should have written; before the flight is settled.

    Also of those who have ended or left since: their blocks are found by others all the same.
    """
    owners = flight.owners
    places = [place for place, progress in enumerate(owners) if progress.id in failed]
    starts = [(owners[place].id, flight.spans[place].start) for place in places]
    copies = [pair for one in later for pair in one.copies]
    ending = {id(owners[place]) for place in places}
    for name in running.ledger.spoil(starts, flight.step, copies):
        progress = running.requests[name]
        if id(progress) not in ending:
            running.put_back(progress)
            for place, one in enumerate(later):
                later[place] = _without(one, progress)


def _without(flight: Flight, progress: Progress) -> Flight:
    """The flight, with a ghost in the place of one of its owners."""
    crew = flight.crew
    return flight._replace(
        crew=crew._replace(owners=[_GHOST if owner is progress else owner for owner in crew.owners]),
        others=[_GHOST if owner is progress else owner for owner in flight.others],
    )
