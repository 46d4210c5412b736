"""The decodes of a step: one carried token for each request that has its prompt behind it.

It knows what needs care, which is little: a new block, the last token, a grammar. The rest is a tight loop.
"""

from tandem.plan import Span
from tandem.schedule.draft import Draft
from tandem.schedule.progress import Progress
from tandem.schedule.running import Running

_new = tuple.__new__


def plan_decodes(running: Running, draft: Draft) -> None:
    """Put a span into the draft for each decoding request that can go on."""
    spans, owners = draft.spans, draft.owners
    add_span, add_owner = spans.append, owners.append
    nothing: tuple[int, ...] = ()
    for progress in running.decoding:
        start = progress.computed
        if start < progress.event:
            progress.computed = start + 1
            add_span(_new(Span, (progress.id, progress.row, start, 1, nothing, True)))
            add_owner(progress)
        else:
            _plan_with_care(running, progress, draft)
    draft.num_decodes = len(spans)
    running.tidy()


def _plan_with_care(running: Running, progress: Progress, draft: Draft) -> None:
    table = progress.table
    if table is None or progress.status is not progress.status.DECODE:
        return  # preempted or made to leave a moment ago, for the sake of another
    allowed = None
    if progress.mask is not None:
        if progress.owed:
            return  # its next mask hangs on a token that is not home
        allowed = progress.mask_now()
        if allowed is None and progress.error is None:
            return
    start = progress.computed
    if start >= len(table.blocks) * running.ledger.block_size and not running.extend(progress, draft):
        return
    if allowed is not None:
        draft.masks.append((progress.row, allowed))
    draft.spans.append(Span(progress.id, progress.row, start, 1, progress.new_blocks, True))
    draft.owners.append(progress)
    progress.new_blocks = ()
    progress.computed = start + 1
    if start + 2 >= progress.limit:
        running.begin_ending(progress, draft)
    else:
        running.set_event(progress)
