"""What all connections of a server share: their limits, who is there, and how many were turned away, and why.

It knows that connections can be closed to make room; it does not know HTTP.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.serve.connection import Connection

EVICT_S = 1.0


@dataclass(slots=True)
class Border:
    """What all connections share. open: all of them; waiting: those that have no request, the longest first."""

    header_s: float = 10.0
    send_s: float = 60.0
    header_bytes: int = 64 << 10
    max_connections: int = 1024
    open: "set[Connection]" = field(default_factory=set)
    waiting: "dict[Connection, float]" = field(default_factory=dict)
    num_accepted: int = 0
    num_refused: int = 0
    num_evicted: int = 0
    num_late: int = 0
    num_stuck: int = 0
    num_malformed: int = 0

    def has_room(self) -> bool:
        """Whether one more may come; if need be, who has waited longest, and EVICT_S at least, goes for it."""
        if len(self.open) < self.max_connections:
            return True
        for connection, since_s in self.waiting.items():
            if time.monotonic() - since_s < EVICT_S:
                break
            self.num_evicted += 1
            connection.evict()
            return True
        self.num_refused += 1
        return False

    def statistics(self) -> dict[str, Any]:
        return {
            "open": len(self.open), "waiting": len(self.waiting), "limit": self.max_connections,
            "accepted": self.num_accepted, "refused": self.num_refused, "evicted": self.num_evicted,
            "late": self.num_late, "stuck": self.num_stuck, "malformed": self.num_malformed,
        }  # fmt: skip
