"""A line in which clients take turns, and which none may fill. It knows clients by name, nothing of what waits.

client a  · · · · ·        out come: the first of a, of b, of c, the second of a, of b, the third of a, …
client b  · ·
client c  ·
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class Asked(Protocol):
    @property
    def client(self) -> str: ...


Item = TypeVar("Item", bound=Asked)


class Line(Generic[Item]):
    """Whose turn it is stands first; whoever has just had it, or is new, last.

    name_of   takes turns by something else than the client's name.
    """

    def __init__(self, name_of: Callable[[Item], str] = attrgetter("client")) -> None:
        self._name_of = name_of
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
        self._clients.setdefault(self._name_of(item), deque()).append(item)
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
        name = self._name_of(item)
        items = self._clients[name]
        items.remove(item)
        if not items:
            del self._clients[name]
        self._num -= 1

    def check(self) -> None:
        assert self._num == sum(map(len, self._clients.values())), "a line has lost count"
        assert all(self._clients.values()), "a client without anything has a turn"
        assert all(self._name_of(item) == client for client, items in self._clients.items() for item in items)


class LineOfKinds(Generic[Item]):
    """Clients take turns, and within each client its kinds of items do: one with many kinds has no more turns.

    kind_of   an item's kind.
    """

    def __init__(self, kind_of: Callable[[Item], str]) -> None:
        self._kind_of = kind_of
        self._clients: OrderedDict[str, Line[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[Item]:
        return (item for line in self._clients.values() for item in line)

    def append(self, item: Item) -> None:
        if item.client not in self._clients:
            self._clients[item.client] = Line(self._kind_of)
        self._clients[item.client].append(item)

    def popleft(self) -> Item:
        """The oldest of the kind and client whose turn it is; there must be one."""
        client, line = self._clients.popitem(last=False)
        if len(line) > 1:
            self._clients[client] = line
        return line.popleft()

    def put_last(self, item: Item) -> None:
        """Its turn took time and is over: who came meanwhile stands before its client, and before its kind."""
        if item.client in self._clients:
            self._clients.move_to_end(item.client)
            self._clients[item.client].put_last(self._kind_of(item))

    def remove(self, item: Item) -> None:
        line = self._clients[item.client]
        line.remove(item)
        if not line:
            del self._clients[item.client]

    def check(self) -> None:
        for client, line in self._clients.items():
            line.check()
            assert line and all(item.client == client for item in line), "a client stands where it does not belong"
