"""Who holds a row and blocks, and how both are won and lost. It does not know whose turn it is."""

import heapq

from tandem.kv.ledger import Ledger, Table
from tandem.schedule.draft import Draft
from tandem.schedule.lockstep import NOBODY, STILL, Beat, Crew
from tandem.schedule.progress import Progress, Status
from tandem.schedule.waiting import WaitingQueue


class Running:
    """All live requests by name, those that run by what they do, and the rows.

    step      the latest step planned.
    crew      of those who decode, those in lockstep, who follow the beat; paused: the others.
    departed  rows left since the last plan.    preempted  requests that lost their row since then.
    """

    def __init__(self, ledger: Ledger, waiting: WaitingQueue, num_rows: int) -> None:
        self.ledger = ledger
        self.waiting = waiting
        self.num_rows = num_rows
        self.step = 0
        self.requests: dict[str, Progress] = {}
        self.beat = Beat(1)
        self.crew = NOBODY
        self.paused: list[Progress] = []
        self._calendar: dict[int, list[Progress]] = {}
        self.decoding: list[Progress] = []
        self.prefilling: list[Progress] = []
        self.leaving: list[Progress] = []
        self.departed: list[int] = []
        self.preempted: list[str] = []
        self.free_rows = list(range(num_rows))
        self.num_ending = self.num_parked = self.num_preemptions = 0
        self._num_places = 0
        self._stale, self._is_mustered = False, True

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.leaving)

    def tidy(self) -> None:
        """Drop those whose status changed from the lists; before and after planning. O(1) if nobody's did."""
        if self._stale:
            self._stale, self._is_mustered = False, False
            decode, prefill, leaving = Status.DECODE, Status.PREFILL, Status.LEAVING
            self.decoding = [p for p in self.decoding if p.status is decode]
            self.prefilling = [p for p in self.prefilling if p.status is prefill]
            self.leaving = [p for p in self.leaving if p.status is leaving]

    def muster(self) -> Crew:
        """Those in lockstep; the same object while they are the same. O(1) if nobody's status changed."""
        self.tidy()
        if not self._is_mustered:
            self._is_mustered = True
            beat = self.beat
            members = [p for p in self.decoding if p.beat is beat]
            if members != self.crew.owners:
                self.crew = Crew.of(members)
            self.paused = [] if len(members) == len(self.decoding) else [p for p in self.decoding if p.beat is STILL]
        return self.crew

    def enter(self, progress: Progress) -> None:
        """Take a new request in: it waits, or is parked until its first sibling's prompt is computed.

        If the queue does not take it, nothing is kept.
        """
        first = self.requests.get(progress.request.fork_of or "")
        if first is not None and first.prompt_step < 0:
            progress.status = Status.PARKED
            first.siblings.append(progress)
            self.num_parked += 1
        else:
            progress.turn = 0 if first is None else first.turn
            self.waiting.push(progress, progress.prompt_length if first is None else 1)
        self.requests[progress.id] = progress

    def unpark(self, progress: Progress) -> None:
        """Its siblings need not wait for it any more."""
        size = 1 if progress.prompt_step >= 0 else progress.prompt_length
        for sibling in progress.siblings:
            if sibling.status is Status.PARKED:
                self.num_parked -= 1
                sibling.turn = progress.turn
                self.waiting.push(sibling, size)
        progress.siblings.clear()

    def call(self, progress: Progress) -> None:
        """Its turn has come, or it is let in before that: its place is behind all who have one."""
        if not progress.place:
            self._num_places += 1
            progress.place = self._num_places

    def admit(self, progress: Progress, draft: Draft) -> bool:
        """Give a waiting request a row and all blocks that its known tokens need; False: too few blocks.

        A block for each running request must be left, so that none is preempted as soon as it has come.
        """
        reserve = self.num_running
        available = self.ledger.num_available
        if available <= progress.tried_blocks and 0 < progress.tried_reserve <= reserve:
            return False  # nothing has got better since it was tried last
        table = self._fork(progress, draft, reserve)
        if table is None:
            reuse = not progress.wants_prompt_logprobs
            table = self.ledger.open(progress.id, progress.known, progress.chain, reuse=reuse, reserve=reserve)
        if table is None:
            progress.tried_blocks, progress.tried_reserve = available, reserve
            return False
        progress.tried_blocks, progress.tried_reserve = -1, 0
        self.waiting.take(progress)
        self.call(progress)
        progress.tokens = progress.tokens or list(progress.request.prompt)
        progress.table = table
        table.first_step = draft.step
        progress.new_blocks = table.blocks[:]
        progress.computed = table.cached
        if progress.cached < 0:
            progress.cached = table.cached
        progress.num_overtakes = 0
        progress.row = heapq.heappop(self.free_rows)
        progress.status = Status.PREFILL
        self.prefilling.append(progress)
        return True

    def _fork(self, progress: Progress, draft: Draft, reserve: int) -> Table | None:
        """Share the first sibling's prompt, if it was computed by an earlier step and is still there."""
        first = self.requests.get(progress.request.fork_of or "")
        if first is None or first.table is None or not 0 <= first.prompt_step <= self.step:
            return None
        if progress.tokens or progress.wants_prompt_logprobs or not _is_sibling(progress, first):
            return None
        if progress.mask is not None and progress.mask_now() is None:
            return None
        if not self.ledger.can_fork(first.table):
            return None
        forked = self.ledger.fork(first.table, progress.id, progress.prompt_length, progress.chain, reserve=reserve)
        if forked is None:
            return None
        table, copies = forked
        draft.copies += copies
        first.last_step = draft.step
        return table

    def extend(self, progress: Progress, draft: Draft) -> bool:
        """Give a decoding request its next block, preempting the least important latest if there is none.

        False: it must sit out this step, because blocks are on their way home, or because it lost its own. Only one
        victim is awaited at a time, and none while blocks come home anyway, so no more than needed are preempted.
        """
        table = progress.table
        assert table is not None
        ledger = self.ledger
        ledger.learn(table, progress.tokens, progress.computed)
        while True:
            fresh = ledger.extend(table, progress.computed + 1)
            if fresh is not None:
                progress.new_blocks = fresh
                return True
            if ledger.has_pending or self.num_ending or any(p.status is Status.LEAVING for p in self.leaving):
                return False
            victim = self._least_important()
            if victim.owed:
                victim.status = Status.LEAVING
                victim.follow(STILL)
                self.leaving.append(victim)
                self._stale = True
                return False
            self.preempt(victim)
            if victim is progress:
                return False

    def _least_important(self) -> Progress:
        running = (*self.decoding, *self.prefilling)
        return max((p for p in running if p.status in (Status.DECODE, Status.PREFILL)), key=_rank)

    def preempt(self, progress: Progress) -> None:
        """Take row and blocks away; it waits again, with all that it knows, and will be computed anew."""
        assert not progress.owed, "a request that is owed a token was preempted"
        self._send_back(progress, forget=False)

    def put_back(self, progress: Progress) -> None:
        """Its blocks are not to be trusted: as if preempted. What it is owed must not be handed to it (undo.py)."""
        self.num_ending -= progress.status is Status.ENDING
        progress.cached = -1  # it was not; told with its first token
        self._send_back(progress, forget=True)

    def _send_back(self, progress: Progress, *, forget: bool) -> None:
        self._give_back(progress, self.step, forget)
        progress.computed = 0
        progress.plain = False
        progress.prompt_step = -1
        progress.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(progress.id)
        self.waiting.push(progress, len(progress.known))

    def resolve_leaving(self) -> None:
        """Those who were to leave and have all their tokens do, unless there is room again."""
        for progress in self.leaving:
            if progress.status is Status.LEAVING and not progress.owed:
                self._stale = True
                if self.ledger.num_available > len(self.decoding):
                    self.begin_decoding(progress)
                else:
                    self.preempt(progress)
        self.tidy()

    def begin_ending(self, progress: Progress, draft: Draft) -> None:
        """This step samples its last token."""
        progress.follow(STILL)
        progress.status = Status.ENDING
        progress.plain = False
        progress.last_step = draft.step
        draft.ending.append(progress)
        self.num_ending += 1
        self._stale = True

    def begin_decoding(self, progress: Progress) -> None:
        progress.status = Status.DECODE
        self.decoding.append(progress)
        if progress.mask is None:
            self.join(progress)
            self._set_due(progress)
        self._stale = True

    def join(self, progress: Progress) -> None:
        """It moves in lockstep with the others from the next step on."""
        if progress.beat is STILL:
            progress.follow(self.beat)
            self._stale = True

    def pause(self, progress: Progress) -> None:
        """It cannot go on with the others, and is asked again at each step."""
        if progress.beat is not STILL:
            progress.follow(STILL)
            self._stale = True

    def go_on(self, progress: Progress, draft: Draft) -> None:
        """Its token of this step is planned: look ahead."""
        if progress.computed + 1 >= progress.limit:
            self.begin_ending(progress, draft)
        elif progress.mask is None:
            self._set_due(progress)

    def _set_due(self, progress: Progress) -> None:
        """Enter it where its blocks are full, or where its last token but one was planned."""
        assert progress.table is not None
        position = min(len(progress.table.blocks) * self.ledger.block_size, progress.limit - 2)
        progress.due_step = max(position, progress.computed) - progress.offset
        self._calendar.setdefault(progress.due_step, []).append(progress)

    def take_due(self) -> list[Progress]:
        """Who needs care at the next step. An entry of one who has left since is none any more."""
        self.muster()
        step = self.beat.step
        due = [*self.paused, *(p for p in self._calendar.pop(step, ()) if p.due_step == step)]
        for progress in due:
            progress.due_step = -1
        return due

    def give_row(self, progress: Progress) -> None:
        if progress.row >= 0:
            heapq.heappush(self.free_rows, progress.row)
            if progress.arrived:
                self.departed.append(progress.row)
            progress.row = -1
            progress.arrived = False

    def _give_back(self, progress: Progress, last_step: int, forget: bool) -> None:
        table = progress.table
        if table is not None:
            if not forget:
                self.ledger.learn(table, progress.tokens, progress.computed)
            self.ledger.release(table, last_step, forget=forget)
            progress.table = None
        progress.follow(STILL)
        self.give_row(progress)
        progress.new_blocks = ()
        self._stale = True

    def end(self, progress: Progress, *, forget: bool = False) -> None:
        """It has ended, whatever its state; all it holds goes home. forget: its K and V are not to be trusted."""
        status = progress.status
        if status is Status.WAITING:
            self.waiting.remove(progress)
        elif status is Status.PARKED:
            self.num_parked -= 1
        elif status is Status.ENDING:
            self.num_ending -= 1
        self._give_back(progress, progress.last_step if status is Status.ENDING else self.step, forget)
        progress.status = Status.ENDED
        progress.plain = False
        del self.requests[progress.id]
        self.unpark(progress)

    def check(self) -> None:
        self.ledger.check()
        self.waiting.check()
        by_status: dict[Status, int] = dict.fromkeys(Status, 0)
        rows = list(self.free_rows)
        for progress in self.requests.values():
            by_status[progress.status] += 1
            if progress.row >= 0:
                rows.append(progress.row)
            holds = progress.status in (Status.PREFILL, Status.DECODE, Status.LEAVING, Status.ENDING)
            assert (progress.table is not None) == holds, f"{progress.id} is {progress.status.name} with a wrong table"
            assert 0 <= progress.owed <= progress.limit
            assert len(progress.known) + progress.owed <= progress.limit, f"{progress.id} goes beyond its limit"
        assert sorted(rows) == list(range(self.num_rows)), "a row is lost or held twice"
        assert by_status[Status.ENDED] == 0, "an ended request is still known"
        assert by_status[Status.WAITING] == len(self.waiting)
        assert by_status[Status.PARKED] == self.num_parked
        assert by_status[Status.ENDING] == self.num_ending
        if self._is_mustered and not self._stale:
            members = [p for p in self.decoding if p.beat is self.beat]
            assert self.crew == Crew.of(members), "a column of the crew is out of date"
            assert all(p.due_step >= self.beat.step for p in self.crew.owners), "in lockstep, and nobody looks after it"
        assert by_status[Status.DECODE] == sum(p.status is Status.DECODE for p in self.decoding)
        assert by_status[Status.PREFILL] == sum(p.status is Status.PREFILL for p in self.prefilling)
        assert by_status[Status.LEAVING] == sum(p.status is Status.LEAVING for p in self.leaving)


def _rank(progress: Progress) -> tuple[int, int]:
    return progress.rank


def _is_sibling(one: Progress, other: Progress) -> bool:
    return one.request.salt == other.request.salt and list(one.request.prompt) == list(other.request.prompt)
