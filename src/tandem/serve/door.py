"""The listening socket: who may come in. It knows descriptors and TLS; it does not know HTTP.

Connections are counted from ``accept`` on, unfinished TLS handshakes too, so the descriptors never run out: with
``max_connections`` open, the one that waits longest for a request goes, or the new one gets 503.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import resource
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from tandem.serve.border import Border
from tandem.serve.connection import Connection
from tandem.serve.failure import HttpError
from tandem.serve.heads import message_of

log = logging.getLogger("tandem.serve")

BACKLOG = 2048
AT_ONCE = 64
RESERVE = 64
DEFAULT_CONNECTIONS = 8192
RETRY_S = 0.2
FULL = message_of(
    HttpError("too many connections are open.", code="overloaded", hint="try again later.", Retry_After="1")
)


def connection_limit(wanted: int | None) -> int:
    """As many connections as are wanted and as the limit on descriptors allows, which is raised as far as it goes.

    RESERVE descriptors are kept for everything else.
    """
    wanted = wanted or DEFAULT_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + RESERVE:
        most = wanted + RESERVE if hard == resource.RLIM_INFINITY else min(hard, wanted + RESERVE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return wanted if soft == resource.RLIM_INFINITY else max(8, min(wanted, soft - RESERVE))


class HttpServer(uvicorn.Server):
    """uvicorn with our own door, and without its signal handling: draining comes first here."""

    def __init__(self, config: uvicorn.Config, border: Border, listener: socket.socket) -> None:
        super().__init__(config)
        self.border, self.listener = border, listener
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_leaving = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await self.lifespan.startup()
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.listener.fileno(), self._knocked)
        self.servers = [self]  # type: ignore[list-item]
        self.started = True

    def close(self) -> None:
        """Let nobody in any more. uvicorn calls it when it shuts down."""
        self._loop.remove_reader(self.listener.fileno())
        self.listener.close()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """For uvicorn, which waits for a server's connections itself."""

    def _knocked(self) -> None:
        for _ in range(AT_ONCE):
            try:
                client, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.warning("no connection can be accepted for the moment: %s", error.strerror)
                    self._loop.remove_reader(self.listener.fileno())
                    self._loop.call_later(RETRY_S, self._again)
                return
            if self.border.has_room():
                connection = Connection(
                    self.border, client, config=self.config, server_state=self.server_state,
                    app_state=self.lifespan.state,
                )  # fmt: skip
                task = self._loop.create_task(self._enter(client, connection))
                self._tasks.add(task)
                task.add_done_callback(functools.partial(self._entered, client, connection))
            else:
                self._send_away(client)

    def _again(self) -> None:
        if self.listener.fileno() >= 0:
            self._loop.add_reader(self.listener.fileno(), self._knocked)

    async def _enter(self, client: socket.socket, connection: Connection) -> None:
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls: dict[str, Any] = {}
        if self.config.ssl is not None:
            tls = {"ssl": self.config.ssl, "ssl_handshake_timeout": self.border.header_s}
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client, **tls)
        except OSError as error:  # ssl.SSLError and TimeoutError are such
            log.debug("a connection ended in its handshake: %s", error)
            connection.forget()
            client.close()
        except BaseException:
            connection.forget()
            client.close()
            raise

    def _entered(self, client: socket.socket, connection: Connection, task: "asyncio.Task[None]") -> None:
        """Or the door was shut meanwhile: such a connection may be made, and never be lost."""
        self._tasks.discard(task)
        if task.cancelled():
            connection.forget()
            client.close()
            self.server_state.connections.discard(connection)

    def _send_away(self, client: socket.socket) -> None:
        """503, and a moment to read it."""
        if self.config.ssl is not None or self._num_leaving >= RESERVE // 2:
            client.close()
            return
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.send(FULL)
            client.shutdown(socket.SHUT_WR)
        self._num_leaving += 1
        self._loop.call_later(RETRY_S, self._sent_away, client)

    def _sent_away(self, client: socket.socket) -> None:
        self._num_leaving -= 1
        client.close()
