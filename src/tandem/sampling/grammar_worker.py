"""The process in which grammars that fit are compiled and followed. It knows no requests, only numbers.

A process of its own, because llguidance holds the interpreter lock while it takes a token in (0.1 s and more for an
ambiguous grammar), because compiling can take gigabytes, and because nothing but a kill ends it early.

    parent ═ orders ═► main thread ──► compile ┐ threads,        orders   (what, number, ...), in order
                                   ├─► quick   ├ bounded ═ news ═► parent     news   (number, tokens, mask, reason)
                                   └─► slow    ┘

Turns are taken mask by mask, first come, first served; who has taken long waits in a line of its own.
"""

import contextlib
import os
import queue
import resource
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tandem.sampling.grammar_follow import Follower, Tokenizers
from tandem.sampling.grammar_limits import GrammarLimits
from tandem.sampling.grammar_text import UnfitError, first_line

NUM_COMPILERS = (2, 1, 1, 1)
"""For each lane of the trials: what takes long to compile holds up nobody who does not."""
NUM_QUICK = 2
NICENESS, COMPILE_NICENESS = 5, 10
MAX_KEPT, MAX_KEPT_CHARACTERS = 32, 64 << 10

_Job = Callable[[], object]


class _Request:
    """A follower, and the tokens that have come for it. turn: it stands in a line, or is being worked on."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.tokens: list[int] = []
        self.turn = False


class Worker:
    """Takes orders on the main thread, obeys them on others."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tokenizers = Tokenizers()
        self._requests: dict[int, _Request | None] = {}  # None: still in the line to be compiled
        self._kept: OrderedDict[tuple[Any, ...], Follower] = OrderedDict()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._compile = [_line(f"compile-{lane}", num, COMPILE_NICENESS) for lane, num in enumerate(NUM_COMPILERS)]
        self._quick, self._slow = _line("quick", NUM_QUICK), _line("slow", 1)

    def run(self) -> None:
        """Until the parent closes its end, or is gone."""
        while True:
            what, number, *rest = self._connection.recv()
            getattr(self, f"_on_{what}")(number, *rest)

    def _on_ping(self, number: int, value: int) -> None:
        self._answer(number, lambda: value)

    def _on_tokenizer(self, number: int, key: int, *what: Any) -> None:
        self._answer(number, lambda: self._tokenizers.make(key, *what))

    def _on_follow(self, number: int, key: int, kind: str, text: str, limits: GrammarLimits, lane: int) -> None:
        self._requests[number] = None

        def work() -> bytes:
            follower = self._compiled(key, kind, text, limits)
            with self._lock:
                if number in self._requests:  # else it was forgotten meanwhile
                    self._requests[number] = _Request(follower)
            return follower.mask

        def job() -> None:
            if number in self._requests and not self._answer(number, work):
                self._requests.pop(number, None)

        self._compile[lane].put(job)

    def _compiled(self, *what: Any) -> Follower:
        """A follower at the beginning: several answers to one prompt share a grammar, and so do a client's requests."""
        with self._lock:
            kept = self._kept.get(what)
            if kept is not None:
                self._kept.move_to_end(what)
                return kept.copy()
        key, kind, text, limits = what
        tokenizer, num_logits, _ = self._tokenizers.get(key)
        made = Follower.compile(tokenizer, num_logits, kind, text, limits)
        if len(text) <= MAX_KEPT_CHARACTERS:
            with self._lock:
                self._kept[what] = made.copy()
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return made

    def _on_accept(self, number: int, tokens: tuple[int, ...]) -> None:
        request = self._requests.get(number)
        if request is None:
            return  # it has failed, or is forgotten
        with self._lock:
            request.tokens += tokens
            if request.turn:
                return
            request.turn = True
        self._queue(number, request)

    def _on_forget(self, number: int) -> None:
        with self._lock:
            self._requests.pop(number, None)

    def _queue(self, number: int, request: _Request) -> None:
        line = self._slow if request.follower.is_slow else self._quick
        line.put(lambda: self._advance(number, request))

    def _advance(self, number: int, request: _Request) -> None:
        if number not in self._requests:
            return
        with self._lock:
            tokens, request.tokens = request.tokens, []
        if not self._answer(number, lambda: request.follower.timed_step(tokens), request.follower):
            self._requests.pop(number, None)
            return
        with self._lock:
            request.turn = bool(request.tokens)
        if request.turn:
            self._queue(number, request)

    def _answer(self, number: int, work: Callable[[], Any], follower: Follower | None = None) -> bool:
        value, reason = None, None
        try:
            value = work()
        except UnfitError as error:
            reason = str(error)
        except BaseException as error:  # a panic of the library is a BaseException
            print(f"grammar worker: {type(error).__name__}: {error}", file=sys.stderr)
            reason = first_line(str(error)) or "the library for grammars failed"
        with self._sending:
            self._connection.send((number, follower.num_tokens if follower else 0, value, reason))
        return reason is None


def _line(name: str, num_threads: int, niceness: int = 0) -> "queue.SimpleQueue[_Job]":
    """Jobs, done in order by so many threads. niceness: of these alone, where a thread can have its own."""
    jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()

    def work() -> None:
        if niceness and sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while True:
            jobs.get()()

    for _ in range(num_threads):
        threading.Thread(target=work, name=f"tandem-grammar-{name}", daemon=True).start()
    return jobs


def step_back(limit_bytes: int) -> None:
    """Behind the arithmetic (nice), and before everyone else when memory is short.

    The parent ends this process: signals to the whole group, as from a terminal, are meant for the parent.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except (OSError, ValueError):  # a system that has no such thing, or forbids it
        pass


def main(descriptor: int, limit_bytes: int) -> None:
    """Obey until the connection ends. Does not return."""
    step_back(limit_bytes)
    with contextlib.suppress(EOFError, OSError):
        Worker(Connection(descriptor)).run()
    os._exit(0)
