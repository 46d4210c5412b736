"""The prefill chunks of a step: how the tokens that decodes leave over are shared. It holds the fairness rule.

1. The *first in line* (most important, then the one whose turn came first, of those that prefill or wait) is promised
   half of what the decodes leave. So every prompt gets to the front and then finishes. Clients take turns (turns.py).
2. The rest goes to those with a shorter prompt left than the first in line has, the shortest first (under "priority":
   within the same importance); of those that wait only if their client's turn has come. So a short prompt passes a long
   one within a few steps.
3. What they leave goes to the first in line, and only then to the others. So equal prompts are not split, which would
   end all of them later and none sooner, and a whole prompt is attended faster than one in two parts.
4. If the first in line waits for blocks, shorter ones that fit may overtake it, MAX_OVERTAKES times; then nobody
   joins before it. So it cannot starve either.
"""

from collections.abc import Iterator

from tandem.plan import Arrival, Span
from tandem.schedule.draft import Draft
from tandem.schedule.progress import Progress
from tandem.schedule.running import Running

MAX_OVERTAKES = 32


def plan_prefills(running: Running, draft: Draft, budget: int) -> None:
    """Share budget tokens out; sets draft.held if the first waiting request could not join."""
    waiting = running.waiting
    if not running.prefilling and not len(waiting):
        return
    if budget <= 0 or (not running.prefilling and not running.free_rows):
        draft.held = "" if not len(waiting) else "rows" if not running.free_rows else "tokens"
        return
    head = _first_in_line(running, draft)
    blocked = waiting.first() if draft.held == "blocks" else None
    joiners = _Door(running, draft, blocked)
    others = sorted((p for p in running.prefilling if p is not head and _is_ready(p)), key=_size)
    rest = budget
    if head is not None:
        mine = (head.importance, head.remaining)
        shorter = [p for p in others if _size(p)[:2] < mine]
        others = others[len(shorter) :]
        promised = min(head.remaining, (budget + 1) // 2)
        rest = promised + _share(running, draft, _shortest_first(shorter, joiners, mine), budget - promised)
        rest -= _plan_chunk(running, head, draft, rest)
    _share(running, draft, _shortest_first(others, joiners), rest)
    if len(waiting) and not draft.held:
        draft.held = "tokens" if running.free_rows else "rows"
    running.tidy()


def _share(running: Running, draft: Draft, takers: Iterator[Progress], budget: int) -> int:
    """Give each as much as it can use, in order; returns what is left."""
    while budget > 0 and (progress := next(takers, None)) is not None:
        budget -= _plan_chunk(running, progress, draft, budget)
    return budget


def _first_in_line(running: Running, draft: Draft) -> Progress | None:
    """Whoever is promised a share; admitted if it waits and there is room."""
    head = min((p for p in running.prefilling if _is_ready(p)), key=_rank, default=None)
    first = running.waiting.first()
    if first is not None:
        running.call(first)
    if first is not None and (head is None or first.rank < head.rank):
        if not running.free_rows:
            draft.held = "rows"
        elif running.admit(first, draft):
            return first
        else:
            draft.held = "blocks"
    return head


class _Door:
    """Lets the shortest waiting request in, while there are rows and blocks and nobody is overtaken too often."""

    def __init__(self, running: Running, draft: Draft, blocked: Progress | None) -> None:
        self._running, self._draft, self._blocked = running, draft, blocked
        self._shut = False

    @property
    def next(self) -> Progress | None:
        blocked = self._blocked
        if self._shut or not self._running.free_rows or (blocked and blocked.num_overtakes >= MAX_OVERTAKES):
            return None
        shortest = self._running.waiting.shortest()
        return None if shortest is blocked else shortest

    def admit(self, progress: Progress) -> bool:
        self._shut = not self._running.admit(progress, self._draft)
        if self._shut:
            self._draft.held = "blocks"
        elif self._blocked is not None:
            self._blocked.num_overtakes += 1
        return not self._shut


def _shortest_first(others: list[Progress], door: _Door, below: tuple[int, int] | None = None) -> Iterator[Progress]:
    """Others and those whom the door lets in, by size; below: of these only who is under it (importance, tokens)."""
    for progress in others:
        while (joiner := door.next) is not None and (joiner.importance, joiner.size) < _size(progress)[:2]:
            if door.admit(joiner):
                yield joiner
        yield progress
    while (joiner := door.next) is not None and (below is None or (joiner.importance, joiner.size) < below):
        if door.admit(joiner):
            yield joiner


def _plan_chunk(running: Running, progress: Progress, draft: Draft, budget: int) -> int:
    """Compute up to budget of the request's tokens; returns how many. The last one samples, if its grammar can."""
    length = min(progress.remaining, budget)
    samples = length == progress.remaining
    if samples and progress.mask is not None:
        allowed = progress.mask_now()
        if allowed is not None:
            draft.masks.append((progress.row, allowed))
        elif progress.error is None:
            length, samples = length - 1, False
    if length <= 0:
        return 0
    if not progress.arrived:
        progress.arrived = True
        draft.arrivals.append(_arrival(progress))
    draft.spans.append(Span(progress.id, progress.row, progress.computed, length, progress.new_blocks, samples))
    draft.owners.append(progress)
    progress.new_blocks = ()
    progress.computed += length
    if progress.prompt_step < 0 and progress.computed >= progress.prompt_length:
        progress.prompt_step = draft.step
    if samples:
        if len(progress.tokens) + 1 >= progress.limit:
            running.begin_ending(progress, draft)
        else:
            running.begin_decoding(progress)
    return length


def _arrival(progress: Progress) -> Arrival:
    request = progress.request
    return Arrival(
        progress.id,
        progress.row,
        tuple(progress.tokens),
        progress.prompt_length,
        request.params,
        tuple(request.eos),
        progress.computed,
        progress.num_preemptions > 0,
        progress.place,
    )


def _is_ready(progress: Progress) -> bool:
    """It has something to compute now: more than a last token that waits for its grammar."""
    return (
        progress.mask is None or progress.remaining > 1 or progress.mask_now() is not None or progress.error is not None
    )


def _rank(progress: Progress) -> tuple[int, int]:
    return progress.rank


def _size(progress: Progress) -> tuple[int, int, int]:
    return progress.importance, progress.remaining, progress.place
