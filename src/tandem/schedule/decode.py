"""The decodes of a step: one carried token for each request that has its prompt behind it.

It knows what needs care, which is little: a new block, the last token, a grammar. The others are not looked at.
"""

from tandem.plan import Span
from tandem.schedule.draft import Draft
from tandem.schedule.progress import Progress, Status
from tandem.schedule.running import Running


def plan_decodes(running: Running, draft: Draft) -> None:
    """Put everybody who can go on into the draft: those in lockstep as they are, the others with a span of their own.

    Blocks are given first, to all who need some, since somebody may have to give way for them.
    """
    ready = [progress for progress in running.take_due() if _prepare(running, progress, draft)]
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
    if allowed is not None:
        draft.masks.append((progress.row, allowed))
    draft.spans.append(Span(progress.id, progress.row, start, 1, progress.new_blocks, True))
    draft.owners.append(progress)
    draft.num_alone += 1
    progress.new_blocks = ()
    progress.computed = start + 1
    running.go_on(progress, draft)
