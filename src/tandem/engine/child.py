"""The engine's own process, seen from inside. It knows its parent's sockets; it does not know HTTP or text.

The child ignores SIGINT and SIGTERM and obeys its parent alone, so that a Ctrl-C or a service manager's signal to the
whole group leaves the parent time to drain. It cannot outlive its parent: a watching thread sees the control socket
close, and the kernel kills it if even that thread cannot run (PR_SET_PDEATHSIG, prctl(2)).
"""

import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import zmq

from tandem.engine import wire
from tandem.engine.contract import Mail
from tandem.errors import RequestError, TandemError
from tandem.parent import ORPHAN_STATUS, die_with_parent
from tandem.request import Change

log = logging.getLogger("tandem.engine")

FAILED_STATUS = 1


class SocketMailbox:
    """The loop's end of the border over two ZeroMQ sockets.

    Sending queues. With more than process.MAX_NEWS messages the loop waits: a device that is faster than the parent
    would only pile up tokens that nobody can be given, in front of everything that comes later.
    """

    def __init__(self, mail: "zmq.Socket[bytes]", news: "zmq.Socket[bytes]") -> None:
        self._mail, self._news = mail, news

    def take(self) -> Sequence[Mail]:
        taken: list[Mail] = []
        while True:
            try:
                message = self._mail.recv(zmq.NOBLOCK)
            except zmq.Again:
                return taken
            try:
                taken.append(wire.decode_mail(message))
            except Exception as error:
                self._refuse(message, error)

    def _refuse(self, message: bytes, error: Exception) -> None:
        """Mail that makes no sense harms nobody but whom it concerns."""
        subject = wire.subject_of(message)
        log.error("mail about %r cannot be read", subject, exc_info=error)
        what = f"the engine cannot read this: {error}"
        if isinstance(subject, str):
            code = error.code if isinstance(error, RequestError) else "internal_error"
            self.deliver([Change(subject, finish="error", error=what, code=code)])
        elif subject is not None:
            self.answer(subject, None, TandemError(what))

    def wait(self, timeout_s: float | None) -> None:
        self._mail.poll(None if timeout_s is None else max(1, int(timeout_s * 1000)))

    def send(self, news: wire.News) -> None:
        self._news.send(wire.encode(news))

    def deliver(self, changes: Sequence[Change]) -> None:
        self.send(wire.ChangesNews.of(changes))

    def answer(self, number: int, value: Any, error: TandemError | None) -> None:
        self.send(wire.AnswerNews(number, value, wire.fault_of(error)))

    def report(self, statistics: dict[str, Any]) -> None:
        self.send(wire.ReportNews(statistics))

    def stopped(self, error: TandemError | None) -> None:
        self.send(wire.StoppedNews(wire.fault_of(error)))


def main(control: int, parent: int, mail_address: str, news_address: str, max_news: int, log_level: int) -> None:
    """Connect, take the settings (the first message), build, run until told to stop. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent)
    threading.Thread(target=_watch, args=(control, parent), name="tandem-parent-watch", daemon=True).start()
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    context = zmq.Context()
    mail, news = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    mail.set_hwm(0)
    news.set_hwm(max_news)
    mail.bind(mail_address)
    news.connect(news_address)
    mailbox = SocketMailbox(mail, news)
    start = json.loads(mail.recv())
    mailbox.send(wire.PhaseNews("connected"))
    status = serve_parent(mailbox, start)
    news.close(linger=1000)
    mail.close(linger=0)
    context.term()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a library's stray thread must not keep us


def serve_parent(mailbox: SocketMailbox, start: dict[str, Any]) -> int:
    """Build the loop and run it. Returns the exit status."""
    try:
        module, _, function = start["make"].partition(":")
        make = getattr(importlib.import_module(module), function)
        loop, card = make(start["settings"], mailbox, lambda text: mailbox.send(wire.PhaseNews(text)))
    except TandemError as error:
        mailbox.stopped(error)
        return FAILED_STATUS
    except BaseException as error:
        log.exception("the engine could not start")
        mailbox.stopped(TandemError(f"the engine could not start: {type(error).__name__}: {error}"))
        return FAILED_STATUS
    gc.collect()
    gc.freeze()  # what start-up made lives as long as we do: a full collection must not stop the loop to scan it
    mailbox.send(wire.ReadyNews(card))
    loop.run()
    return 0 if loop.error is None else FAILED_STATUS


def _watch(control: int, parent: int) -> None:
    """End this process when the parent's end of the control socket closes, or its process is gone."""
    end = socket.socket(fileno=control)
    while os.getppid() == parent:
        readable, _, _ = select.select([end], [], [], 1.0)
        if readable and not end.recv(1):
            break
    os._exit(ORPHAN_STATUS)
