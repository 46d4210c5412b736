"""The decodes of a step: one carried token for each request that has its prompt behind it.

It knows what needs care, which is little: a new block, the last token, a grammar. The others are not looked at.
"""

from tandem.plan import Span
from tandem.schedule.draft import Draft
from tandem.schedule.progress import Progress, Status
from tandem.schedule.running import Running

MAX_LATE = 8
"""How often a mask may be missing when a step could be planned, until the others wait no longer. Where the device has
nothing to do the loop asks twice a millisecond; a mask takes 0.7 to 1.5 ms with its way there and back."""


def plan_decodes(running: Running, draft: Draft) -> None:
    """Put everybody who can go on into the draft: those in lockstep as they are, the others with a span of their own.

    Blocks are given first, to all who need some, since somebody may have to give way for them.
    """
    due = running.take_due()
    if not _bound_may_go(running, due):
        due = [progress for progress in due if progress.mask is None]
    ready = [progress for progress in due if _prepare(running, progress, draft)]
    draft.crew = running.muster()
    running.beat.step = draft.step + 1
    for progress in ready:
        if progress.status is not Status.DECODE:
            continue  # made to leave, for the sake of another
        if progress.new_blocks:
            draft.blocks[progress.row] = progress.new_blocks
            progress.new_blocks = ()
        running.go_on(progress, draft)
    running.tidy()


def _bound_may_go(running: Running, due: list[Progress]) -> bool:
    """Whether those bound by grammars are planned now, or wait until they can share a step.

    Where nobody else needs one, each step that some of them have to themselves is one that the others sit out: two
    groups that alternate have half the speed. So all wait until every token is home and every mask there, but not for
    whose last mask took long. Somebody unbound needs each step anyway, so then nobody waits.
    """
    if running.crew.owners or running.prefilling or (len(running.waiting) and running.free_rows):
        return True
    bound, are_together = [], True
    for progress in due:
        if progress.mask is None:
            return True
        if progress.status is Status.DECODE:
            bound.append(progress)
    for progress in bound:
        if not progress.owed:
            if progress.mask_now() is not None or progress.error is not None:
                continue
            progress.num_late += 1
        are_together &= progress.is_slow or progress.num_late > MAX_LATE
    return are_together


def _prepare(running: Running, progress: Progress, draft: Draft) -> bool:
    """Whether the request goes on in lockstep; if not, it waits for a block or has a grammar."""
    table = progress.table
    if table is None or progress.status is not Status.DECODE:
        return False  # preempted or made to leave a moment ago, for the sake of another
    if progress.mask is not None:
        _plan_with_grammar(running, progress, draft)
    elif progress.computed < len(table.blocks) * running.ledger.block_size or running.extend(progress, draft):
        running.join(progress)
        return True
    elif progress.status is Status.DECODE:
        running.pause(progress)
    return False


def _plan_with_grammar(running: Running, progress: Progress, draft: Draft) -> None:
    if progress.owed:
        return  # its next mask hangs on a token that is not home
    allowed = progress.mask_now()
    if allowed is None and progress.error is None:
        return
    table, start = progress.table, progress.computed
    assert table is not None
    if start >= len(table.blocks) * running.ledger.block_size and not running.extend(progress, draft):
        return
    progress.is_slow, progress.num_late = progress.num_late > MAX_LATE, 0
    if allowed is not None:
        draft.masks.append((progress.row, allowed))
    draft.spans.append(Span(progress.id, progress.row, start, 1, progress.new_blocks, True))
    draft.owners.append(progress)
    draft.num_alone += 1
    progress.new_blocks = ()
    progress.computed = start + 1
    running.go_on(progress, draft)
