"""A loop in a process of its own, seen from the parent. It knows sockets and signals; it does not know what is decided
on either side of them.

    parent: any thread ──lock──► PUSH ═══ mail ═══► PULL  child: the loop's thread
    parent: tandem-news thread ◄─ PULL ═══ news ═══ PUSH
            the same thread    ◄─ socketpair, never written: end of file = the other side is gone

The child is a fresh interpreter (never a fork, and never a second run of the caller's ``__main__``). The sockets lie in
a private folder that is removed as soon as both are connected, so nothing is left on disk whoever is killed.
"""

import atexit
import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import zmq

from tandem.engine import wire
from tandem.engine.contract import Card, Close, Listener, Mail
from tandem.engine.mailbox import Calls
from tandem.errors import EngineDeadError, RequestError, TandemError

log = logging.getLogger("tandem.engine")

POLL_S = 0.5
EXIT_S = 5.0
MAX_NEWS = 32  # messages that wait on either side of the border; with more the loop waits for the parent
MAKE = "tandem.engine.build:make_loop"
BOOTSTRAP = (
    "import json, sys; start = json.loads(sys.stdin.readline()); sys.path[:] = start.pop('path'); "
    "from tandem.engine.child import main; main(**start)"
)


class ProcessHost:
    """Starts the child and talks to it. ``ready`` raises what the child's start raises, as the same TandemError.

    settings   fields of config.Settings, as the user set them.
    on_phase   told how start-up proceeds, on another thread.
    make       "module:function" that builds the loop in the child.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        listener: Listener,
        on_phase: Callable[[str], None] | None = None,
        make: str = MAKE,
    ) -> None:
        self._listener, self._on_phase = listener, on_phase
        self._calls = Calls()
        self._lock = threading.Lock()
        self._error: TandemError | None = None
        self._closing = self._ended = False
        self._statistics: dict[str, Any] = {}
        self._heard_s = time.perf_counter()
        self.ready: Future[Card] = Future()
        self._process: subprocess.Popen[bytes] | None = None
        place = tempfile.gettempdir()  # a socket's path may have 107 characters (unix(7))
        self._folder = tempfile.mkdtemp(prefix="tandem-", dir=place if len(place) < 80 else "/tmp")
        self._context = zmq.Context()
        self._mail, self._news = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        # A PUSH socket that connects queues from the start and also when its peer is gone; one that binds would not.
        self._mail.set_hwm(0)
        self._news.set_hwm(MAX_NEWS)
        self._mail.setsockopt(zmq.RECONNECT_IVL, 5)
        self._mail.connect(f"ipc://{self._folder}/mail")
        self._news.bind(f"ipc://{self._folder}/news")
        self._mail.send(json.dumps({"settings": dict(settings), "make": make}).encode(), zmq.NOBLOCK)
        atexit.register(self.close)
        # The thread that starts the child must live as long as the child may: PR_SET_PDEATHSIG watches the thread.
        self._thread = threading.Thread(target=self._run, name="tandem-news", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def error(self) -> TandemError | None:
        return self._error

    @property
    def statistics(self) -> Mapping[str, Any]:
        return self._statistics

    @property
    def heard_s(self) -> float:
        return self._heard_s

    def send(self, mail: Mail) -> None:
        try:
            message = wire.encode_mail(mail)
        except (OverflowError, TypeError, ValueError) as error:
            raise RequestError(f"this cannot be sent to the engine's process: {error}.") from error
        with self._lock:
            if self._error is not None:
                raise EngineDeadError(self._error.what, hint=self._error.hint)
            if self._closing or self._ended:
                raise EngineDeadError("the engine is closed.")
            self._mail.send(message, zmq.NOBLOCK)

    def call(self, name: str, argument: str = "") -> "Future[Any]":
        call, future = self._calls.open(name, argument)
        try:
            self.send(call)
        except TandemError as error:
            self._calls.answer(call.number, None, error)
        return future

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Ask the child to stop; kill it if it has not in time. Idempotent."""
        with self._lock:
            if not self._closing and not self._ended:
                self._closing = True
                self._mail.send(wire.encode_mail(Close()), zmq.NOBLOCK)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join(EXIT_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        ours, theirs = socket.socketpair()
        error: TandemError | None
        try:
            self._spawn(theirs)
            error = self._listen(ours)
        except Exception as failure:
            log.exception("the engine's process cannot be heard any more")
            error = EngineDeadError(f"the engine's process was lost: {type(failure).__name__}: {failure}")
        finally:
            theirs.close()
        self._announce(error)
        self._reap(ours)

    def _spawn(self, control: socket.socket) -> None:
        start = {
            "path": sys.path,
            "control": control.fileno(),
            "parent": os.getpid(),
            "mail_address": f"ipc://{self._folder}/mail",
            "news_address": f"ipc://{self._folder}/news",
            "max_news": MAX_NEWS,
            "log_level": logging.getLogger("tandem").getEffectiveLevel(),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=2,  # what a library prints must not mix with the parent's output
            pass_fds=[control.fileno()],
        )
        control.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(start).encode() + b"\n")

    def _listen(self, control: socket.socket) -> TandemError | None:
        """Take news until the last word, or until the child is gone."""
        assert self._process is not None
        poller = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        poller.register(control, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(POLL_S * 1000)))
            gone = control.fileno() in ready or self._process.poll() is not None
            while True:  # also what a child that is gone has left behind
                try:
                    message = self._news.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                news = wire.decode_news(message)
                if isinstance(news, wire.StoppedNews):
                    return wire.error_of(news.fault)
                self._take(news)
            if gone:
                return None if self._closing else EngineDeadError(f"the engine's process {self._obituary()}.")

    def _take(self, news: wire.News) -> None:
        self._heard_s = time.perf_counter()
        if isinstance(news, wire.ChangesNews):
            self._listener.news(news.changes)
        elif isinstance(news, wire.ReportNews):
            self._statistics = news.statistics
        elif isinstance(news, wire.AnswerNews):
            self._calls.answer(news.number, news.value, wire.error_of(news.fault))
        elif isinstance(news, wire.ReadyNews):
            self.ready.set_result(news.card)
        elif isinstance(news, wire.PhaseNews):
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._on_phase is not None and news.text != "connected":
                self._on_phase(news.text)

    def _obituary(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def _announce(self, error: TandemError | None) -> None:
        with self._lock:
            self._ended, self._error = True, error
            self._mail.close(linger=0)
            self._news.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._calls.end(error)
        if not self.ready.done():
            self.ready.set_exception(error or EngineDeadError("the engine was closed while it started."))
        else:
            self._listener.stopped(error)

    def _reap(self, control: socket.socket) -> None:
        """Wait for the child's end, not for ever; then nothing of it is left."""
        if self._process is not None:
            try:
                self._process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        control.close()
