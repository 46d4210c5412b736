"""A line in which clients take turns, and which none may fill. It knows clients by name, nothing of what waits.

client a  · · · · ·        out come: the first of a, of b, of c, the second of a, of b, the third of a, …
client b  · ·
client c  ·
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Asked(Protocol):
    @property
    def client(self) -> str: ...


Item = TypeVar("Item", bound=Asked)


class Line(Generic[Item]):
    """Whose turn it is stands first; whoever has just had it, or is new, last."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Item]] = OrderedDict()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._clients.values() for item in items)

    def limit_of(self, client: str, limit: int) -> int:
        """How many may stand before one of this client's. The last quarter is for clients that have less of it."""
        share = max(limit // 4, 1)
        return limit if len(self._clients.get(client, ())) < share else max(limit - share, 1)

    def append(self, item: Item) -> None:
        self._clients.setdefault(item.client, deque()).append(item)
        self._num += 1

    def popleft(self) -> Item:
        """The oldest of the client whose turn it is; there must be one."""
        client, items = self._clients.popitem(last=False)
        if len(items) > 1:
            self._clients[client] = items
        self._num -= 1
        return items.popleft()

    def put_last(self, client: str) -> None:
        """Its turn took time and is over: those who came meanwhile stand before it."""
        if client in self._clients:
            self._clients.move_to_end(client)

    def remove(self, item: Item) -> None:
        items = self._clients[item.client]
        items.remove(item)
        if not items:
            del self._clients[item.client]
        self._num -= 1

    def check(self) -> None:
        assert self._num == sum(map(len, self._clients.values())), "a line has lost count"
        assert all(self._clients.values()), "a client without anything has a turn"
        assert all(item.client == client for client, items in self._clients.items() for item in items)
