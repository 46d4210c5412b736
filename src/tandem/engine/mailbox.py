"""A mailbox within one process: a queue in, callbacks out. It knows neither sockets nor what the mail means."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from tandem.engine.contract import Call, Listener, Mail
from tandem.errors import EngineDeadError, TandemError
from tandem.request import Change


class Calls:
    """The front end's open Calls: each number is answered once, at the latest when the engine stops. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._next = 0

    def open(self, name: str, argument: str) -> tuple[Call, "Future[Any]"]:
        """Raises TandemError for what is no text: it could not cross the border."""
        for what, value in (("name", name), ("argument", argument)):
            if not isinstance(value, str):
                raise TandemError(f"the call's {what} is of type {type(value).__name__}; it must be a string.")
        future: Future[Any] = Future()
        with self._lock:
            self._next += 1
            self._open[self._next] = future
            return Call(self._next, name, argument), future

    def answer(self, number: int, value: Any, error: TandemError | None) -> None:
        with self._lock:
            future = self._open.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def end(self, error: TandemError | None) -> None:
        for number in tuple(self._open):
            self.answer(number, None, error or EngineDeadError("the engine was closed before it answered."))


class LocalMailbox:
    """Mail from any thread to the loop's; news straight to the listener, on the loop's thread."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.calls = Calls()
        self.statistics: dict[str, Any] = {}
        self.heard_s = time.perf_counter()
        self._mail: deque[Mail] = deque()
        self._arrived = threading.Event()
        self.is_stopped = False

    def put(self, mail: Mail) -> None:
        self._mail.append(mail)
        self._arrived.set()

    def take(self) -> Sequence[Mail]:
        if not self._mail:
            return ()
        self._arrived.clear()  # before reading: what is put behind this line sets it again
        taken = []
        while self._mail:
            taken.append(self._mail.popleft())
        return taken

    def wait(self, timeout_s: float | None) -> None:
        if not self._mail:
            self._arrived.wait(timeout_s)

    def deliver(self, changes: Sequence[Change]) -> None:
        self.heard_s = time.perf_counter()
        self.listener.news(changes)

    def answer(self, number: int, value: Any, error: TandemError | None) -> None:
        self.calls.answer(number, value, error)

    def report(self, statistics: dict[str, Any]) -> None:
        self.heard_s = time.perf_counter()
        self.statistics = statistics

    def stopped(self, error: TandemError | None) -> None:
        self.is_stopped = True
        self.calls.end(error)
        self.listener.stopped(error)
