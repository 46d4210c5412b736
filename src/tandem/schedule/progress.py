"""One request's way through the engine: what is planned, what is known, what it waits for. It decides nothing."""

import logging
from collections.abc import Sequence
from enum import IntEnum

from tandem.errors import RequestError
from tandem.kv.ledger import Table
from tandem.kv.prefix import Chain
from tandem.plan import Mask
from tandem.request import Request
from tandem.schedule.lockstep import STILL, Beat

log = logging.getLogger("tandem.schedule")


class Status(IntEnum):
    """Where a request stands.

    WAITING ──► PREFILL ──► DECODE ──► ENDING ──► ENDED      ENDING: its last token is planned, not yet home
       ▲           │          │ ▲                            LEAVING: to be preempted once nothing is owed to it
       └───────────┴──────────┘ └─ LEAVING
    PARKED: a sibling that waits until the first sibling's prompt is computed.
    """

    WAITING = 0
    PARKED = 1
    PREFILL = 2
    DECODE = 3
    LEAVING = 4
    ENDING = 5
    ENDED = 6


class Progress:
    """Counters of one request. Positions: computed (planned) ≤ known (len(tokens)) + owed.

    number      in the order of arrival.       importance   smaller is more important.
    place       when its turn came, or it was let in before; 0: not yet. Kept when it has to leave.
    turn, weight, returns   where it stands while it waits; see turns.py.
    limit       length of prompt and output at which it ends.
    offset      computed, less the step of the beat that it follows: in lockstep, or STILL (lockstep.py).
    due_step    the step at which a block or the end needs care, if it is in lockstep; else -1.
    plain       its next token needs no care unless it is one of stops.
    new_blocks  blocks that no span has named yet.
    size        tokens to compute, as the waiting queue knew it.
    tried_…     available blocks, and those to be left for others, when it could not join last.
    prompt_step the step that computes the end of its prompt, since it was admitted last; -1: none yet.
    num_late    steps that could have had its next token, had its mask been there.      is_slow   its last one was late.
    last_step   the step that plans its last token, or reads its blocks for a sibling behind that.
    """

    __slots__ = (
        "arrived", "beat", "cached", "chain", "code", "due_step", "error", "id", "importance", "is_slow", "last_step",
        "limit", "mask", "new_blocks", "num_late", "num_overtakes", "num_preemptions", "number", "offset", "place",
        "plain", "prompt_length", "prompt_sent", "prompt_step", "request", "returns", "row", "siblings", "size",
        "spoke", "stamp", "status", "stops", "table", "tokens", "tried_blocks", "tried_reserve", "turn", "weight",
    )  # fmt: skip

    def __init__(
        self, request: Request, mask: Mask | None, chain: Chain, importance: int, number: int, limit: int
    ) -> None:
        params = request.params
        self.request = request
        self.id = request.id
        self.importance = importance
        self.number = number
        self.place = self.turn = self.weight = 0
        self.returns = False
        self.mask = mask
        self.chain = chain
        self.limit = limit
        self.prompt_length = len(request.prompt)
        self.stops = frozenset(params.stop_token_ids if params.ignore_eos else (*request.eos, *params.stop_token_ids))
        self.tokens: list[int] = []
        self.status = Status.WAITING
        self.table: Table | None = None
        self.row = -1
        self.arrived = False
        self.beat = STILL
        self.offset = 0
        self.due_step = -1
        self.new_blocks: Sequence[int] = ()
        self.plain = False
        self.spoke = False
        self.cached = -1
        self.prompt_sent = 0
        self.prompt_step = -1
        self.size = 0
        self.error: str | None = None
        self.code: str | None = None
        self.last_step = -1
        self.siblings: list[Progress] = []
        self.stamp = 0
        self.num_overtakes = 0
        self.num_late = 0
        self.is_slow = False
        self.tried_blocks = -1
        self.tried_reserve = 0
        self.num_preemptions = 0

    @property
    def computed(self) -> int:
        """Positions computed by the steps planned so far."""
        return self.offset + self.beat.step

    @computed.setter
    def computed(self, value: int) -> None:
        self.offset = value - self.beat.step

    def follow(self, beat: Beat) -> None:
        """Move with this beat from now on."""
        self.offset, self.beat, self.due_step = self.computed - beat.step, beat, -1

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is before others. Of those who have a place."""
        return self.importance, self.place

    @property
    def known(self) -> Sequence[int]:
        """Every token the host knows."""
        return self.tokens or self.request.prompt

    @property
    def remaining(self) -> int:
        """Known tokens still to compute; for one that decodes 0 or less."""
        return len(self.known) - self.computed

    @property
    def owed(self) -> int:
        """Tokens sampled by the steps planned so far that are not home yet."""
        return self.computed + 1 - len(self.tokens) if self.status in (Status.DECODE, Status.LEAVING) else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt position's log-probabilities are still to be sent."""
        return self.request.params.prompt_logprobs is not None and self.prompt_sent < self.prompt_length

    def mask_now(self) -> bytes | None:
        """The ids its grammar allows next; None: not yet known, or the grammar failed, and error says so."""
        assert self.mask is not None
        if self.error is None:
            try:
                return self.mask.allowed()
            except Exception as error:
                self.fail(error)
        return None

    def fail(self, error: Exception) -> None:
        """Its grammar raised; it ends with its next token. A fault of ours is logged, not told."""
        if isinstance(error, RequestError):
            self.error, self.code = str(error), error.code
        else:
            log.error("the grammar of %s failed", self.id, exc_info=error)
            self.error = "its grammar failed."
