"""A loop on a thread of this process. It does not know what the loop drives."""

import atexit
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from tandem.engine.contract import Call, Card, Close, Listener, Mail, Mailbox
from tandem.engine.loop import Loop
from tandem.engine.mailbox import LocalMailbox
from tandem.errors import EngineDeadError, TandemError

EXIT_WAIT_S = 10.0
MakeLoop = Callable[[Mailbox], tuple[Loop, Card]]


class ThreadHost:
    """Builds a loop with ``make`` and runs it, both on one thread, which ends with ``close`` or the engine's death.

    ``ready`` raises what ``make`` raises.
    """

    def __init__(self, make: MakeLoop, listener: Listener) -> None:
        self._mailbox = LocalMailbox(listener)
        self._loop: Loop | None = None
        self._closed = False
        self.ready: Future[Card] = Future()
        self._thread = threading.Thread(target=self._run, args=(make,), name="tandem-loop", daemon=True)
        self._thread.start()

    def _run(self, make: MakeLoop) -> None:
        try:
            self._loop, card = make(self._mailbox)
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(card)
        self._loop.run()

    @property
    def error(self) -> TandemError | None:
        return None if self._loop is None else self._loop.error

    @property
    def statistics(self) -> Mapping[str, Any]:
        return self._mailbox.statistics

    @property
    def heard_s(self) -> float:
        return self._mailbox.heard_s

    def send(self, mail: Mail) -> None:
        if self.error is not None:
            raise EngineDeadError(self.error.what, hint=self.error.hint)
        if self._closed or not self._thread.is_alive():
            raise EngineDeadError("the engine is closed.")
        self._mailbox.put(mail)

    def call(self, name: str, argument: str = "") -> "Future[Any]":
        call, future = self._mailbox.calls.open(name, argument)
        self._post(call)
        return future

    def _post(self, call: Call) -> None:
        try:
            self.send(call)
        except EngineDeadError as error:
            self._mailbox.calls.answer(call.number, None, error)
            return
        if self._mailbox.is_stopped:  # between the check and the put
            self._mailbox.calls.end(self.error)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the loop behind the step in flight and wait for its thread. A step that hangs keeps its thread."""
        if not self._closed:
            self._closed = True
            self._mailbox.put(Close())
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            # Python unwinds a daemon thread that is in native code at exit, which aborts the process; so exit waits.
            atexit.register(self._thread.join, EXIT_WAIT_S)
