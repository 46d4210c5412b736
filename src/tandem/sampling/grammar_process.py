"""The grammar processes, seen from the engine: orders go out, news comes in, who hangs is ended. It knows no grammar.

    any thread ──► queue ──► sender thread ═══ pipe ═══► a worker   (a full pipe never holds the loop)
    Place.hear ◄──────────── reader thread ═══ pipe ═══◄

End of file on the pipe is the only farewell: the worker ends when the parent is gone, however it went.
"""

import contextlib
import itertools
import json
import logging
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future, InvalidStateError
from multiprocessing import Pipe
from typing import Any, Protocol

log = logging.getLogger("tandem.sampling")

BOOTSTRAP = (
    "import importlib, json, sys; path, module, descriptor, limit_bytes = json.loads(sys.argv[1]); "
    "sys.path[:] = path; importlib.import_module(module).main(descriptor, limit_bytes)"
)

Tokenizer = tuple[str, int, tuple[int, ...]]
"""tokenizer.json, rows of the output matrix, end-of-sequence ids."""


class LostError(Exception):
    """The process has ended, or was ended, before it answered."""


class Place(Protocol):
    """Where the news of one number goes. Called on the reader's thread."""

    def hear(self, num_tokens: int, value: Any, reason: str | None) -> None: ...

    def lose(self) -> None: ...


class Answer:
    """A Place for one answer: (value, reason), one of them None. Its future raises LostError, and may be cancelled."""

    def __init__(self) -> None:
        self.future: Future[tuple[Any, str | None]] = Future()

    def hear(self, num_tokens: int, value: Any, reason: str | None) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled, or lost in the same moment
            self.future.set_result((value, reason))

    def lose(self) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(LostError())


class GrammarProcess:
    """Starts at once, and does as the module's main. limit_bytes: memory that it may take for data."""

    def __init__(self, name: str, module: str, limit_bytes: int) -> None:
        self.name = name
        self._numbers = itertools.count()
        self._places: dict[int, Place] = {}
        self._tokenizers: dict[Tokenizer, int] = {}
        self._lock = threading.Lock()
        self._ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, json.dumps([sys.path, module, theirs.fileno(), limit_bytes])],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._orders: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.is_lost = False
        for work in (self._send, self._read):
            threading.Thread(target=work, name=f"tandem-grammar-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self, place: Place, what: str, *rest: Any) -> int:
        """Give an order whose news goes to place; its number. Thread-safe, as all here."""
        number = next(self._numbers)
        self._places[number] = place
        self._orders.put((what, number, *rest))
        if self.is_lost:
            self._lose()
        return number

    def order(self, what: str, number: int, *rest: Any) -> None:
        """Another order for a number. Returns at once; without effect if the process is lost."""
        self._orders.put((what, number, *rest))

    def ask(self, what: str, *rest: Any) -> "Future[tuple[Any, str | None]]":
        """An order that is answered once. Cancel the future, and the order is taken back."""
        answer = Answer()
        number = self.open(answer, what, *rest)

        def done(future: "Future[tuple[Any, str | None]]") -> None:
            if future.cancelled():
                self.close_place(number)
            else:
                self._places.pop(number, None)

        answer.future.add_done_callback(done)
        return answer.future

    @property
    def num_open(self) -> int:
        """Orders without an answer, and places that are kept."""
        return len(self._places)

    def close_place(self, number: int) -> None:
        """Nobody waits for news of this number any more."""
        if self._places.pop(number, None) is not None:
            self._orders.put(("forget", number))

    def bring(self, tokenizer: Tokenizer) -> int:
        """Its number there; it is sent the first time, ahead of every order that names it."""
        with self._lock:
            key = self._tokenizers.get(tokenizer)
            if key is None:
                key = self._tokenizers[tokenizer] = len(self._tokenizers)
                self.ask("tokenizer", key, *tokenizer)
            return key

    def kill(self) -> None:
        """End it now, whatever it does. Idempotent."""
        self.is_lost = True
        self._process.kill()
        self._process.wait()
        self._lose()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (order := self._orders.get()) is not None:
                self._ours.send(order)

    def _read(self) -> None:
        try:
            while True:
                number, num_tokens, value, reason = self._ours.recv()
                place = self._places.get(number)
                if place is not None:
                    place.hear(num_tokens, value, reason)
        except (EOFError, OSError):
            pass
        status = self._process.wait()
        if not self.is_lost:
            log.warning("the grammar process %d (%s) ended with status %d", self.pid, self.name, status)
        self._lose()
        self._ours.close()

    def _lose(self) -> None:
        self.is_lost = True
        self._orders.put(None)
        for number in list(self._places):
            place = self._places.pop(number, None)
            if place is not None:
                place.lose()
