"""The grammar processes, seen from the engine: orders go out, news comes in, who hangs is ended. It knows no grammar.

    any thread ──► queue ──► sender thread ═══ pipe ═══► a worker   (a full pipe never holds the loop)
    Place.hear ◄──────────── reader thread ═══ pipe ═══◄              (it starts the worker, too)
                             watcher thread                         (asks now and then; no answer: kill)

End of file on the pipe is the only farewell: the worker ends when the parent is gone, however it went. If it is stopped
and reads nothing, the kernel ends it.
"""

import contextlib
import itertools
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

log = logging.getLogger("tandem.sampling")

BOOTSTRAP = (
    "import importlib, json, sys; path, parent, module, descriptor, limit_bytes = json.loads(sys.argv[1]); "
    "sys.path[:] = path; from tandem.parent import die_with_parent; die_with_parent(parent); "
    "importlib.import_module(module).main(descriptor, limit_bytes)"
)

LOOK_S = 1.0
"""How often it is looked whether a process that has something to do still answers."""
MAX_SILENT_LOOKS = 10
"""So many looks without an answer, and without processor time in between: it is stopped, or waits for ever. Looks are
counted, not seconds, so that whoever stops the engine too (a terminal, a machine that sleeps) does not end it. Its main
thread answers within milliseconds; on a machine that is too busy for that it still gets some time in ten seconds."""
MAX_SILENT_CPU_S = 60.0
"""Processor time without an answer: it runs in circles."""
IDLE_CPU_S = 1e-4

PING = -1
"""The number of what is asked to see whether it answers."""

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
        self._num_asked = self._num_answered = 0
        self._ours, theirs = Pipe()
        self._orders: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.is_lost = False
        self.is_stuck = False
        """It was ended because it did not answer."""
        self._ended = threading.Event()
        started: Future[None] = Future()
        self._thread(self._live, theirs, module, limit_bytes, started)
        started.result()
        self._thread(self._send)
        self._thread(self._watch)

    def _thread(self, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name=f"tandem-grammar-{self.name}", daemon=True).start()

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

    def _live(self, theirs: Connection, module: str, limit_bytes: int, started: "Future[None]") -> None:
        """Start it and read until its end: on one thread, for the kernel ends it with the thread that started it."""
        with theirs:
            what = [sys.path, os.getpid(), module, theirs.fileno(), limit_bytes]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", BOOTSTRAP, json.dumps(what)],
                    stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
                )  # fmt: skip
            except BaseException as error:
                started.set_exception(error)
                return
        started.set_result(None)
        self._read()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (order := self._orders.get()) is not None:
                self._ours.send(order)

    def _read(self) -> None:
        try:
            while True:
                number, num_tokens, value, reason = self._ours.recv()
                if number == PING:
                    self._num_answered = value
                    continue
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

    def _watch(self) -> None:
        """End it when it does not answer any more. While nobody waits for news it is left alone."""
        num_silent, idle_at_s, asked_at_s = 0, 0.0, 0.0
        while not self._ended.wait(LOOK_S):
            cpu_s = _cpu_s(self.pid)
            if self._num_answered == self._num_asked:
                num_silent, idle_at_s, asked_at_s = 0, cpu_s, cpu_s
                if self._places:
                    self._num_asked += 1
                    self._orders.put(("ping", PING, self._num_asked))
                continue
            num_silent += 1
            if cpu_s - idle_at_s > IDLE_CPU_S:
                num_silent, idle_at_s = 0, cpu_s
            if num_silent >= MAX_SILENT_LOOKS or cpu_s - asked_at_s > MAX_SILENT_CPU_S:
                log.error("the grammar process %d (%s) does not answer: it is ended", self.pid, self.name)
                self.is_stuck = True
                self.kill()

    def _lose(self) -> None:
        self.is_lost = True
        self._ended.set()
        self._orders.put(None)
        for number in list(self._places):
            place = self._places.pop(number, None)
            if place is not None:
                place.lose()


def _cpu_s(pid: int) -> float:
    """Processor time that a process of ours has had; 0.0 where a system does not tell, or it has ended."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid(3) makes of a pid
    except OSError:
        return 0.0
