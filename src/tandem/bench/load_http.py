"""A small HTTP/1.1 client whose bytes are stamped when they arrive. It knows connections; it does not know the API.

One connection serves one request at a time and is used again if the server allows. httptools parses; what it finds
goes straight to the caller, with the moment at which the socket gave it, so that a slow reader does not shift times.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from tandem.bench.load_trust import distrust, tls_context
from tandem.errors import SettingError

OnBody = Callable[[bytes, float], None]
GOODBYE_S = 1.0


class ConnectionLostError(Exception):
    """The server closed the connection before its answer was complete."""


class _Connection(asyncio.Protocol):
    """One socket. Callbacks named on_… are httptools' words."""

    def __init__(self) -> None:
        import httptools

        self.lost = asyncio.get_running_loop().create_future()

        self._new_parser: Callable[[], Any] = lambda: httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.open = False
        self.reused = self.heard = False
        self._done: asyncio.Future[int] | None = None
        self._on_body: OnBody | None = None
        self._stamp_s = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport, self.open = transport, True

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if not self.lost.done():
            self.lost.set_result(None)
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionLostError(str(error or "the server closed the connection")))

    def data_received(self, data: bytes) -> None:
        self._stamp_s, self.heard = time.perf_counter(), True
        try:
            self._parser.feed_data(data)
        except Exception as error:
            if self._done is not None and not self._done.done():
                self._done.set_exception(ConnectionLostError(f"not HTTP: {error}"))
            self.close()

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body, self._stamp_s)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(int(self._parser.get_status_code()))

    async def ask(self, head: bytes, body: bytes, on_body: OnBody) -> int:
        """Send a request and wait for the end of the answer. Returns its status."""
        assert self.transport is not None
        self._parser, self._on_body, self.heard = self._new_parser(), on_body, False
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(head + body)
        try:
            return await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._on_body = None

    def close(self) -> None:
        self.open = False
        if self.transport is not None:
            self.transport.close()


class HttpClient:
    """Talks to one server. base_url: http(s)://host[:port][/prefix]; headers go with every request.

    cacert: file of the certificates to trust instead of the system's.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None, cacert: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError(f"{base_url!r} is no base URL.", hint="write it as http://127.0.0.1:8000.")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._base_url, self._tls = base_url, tls_context(base_url, cacert)
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._free: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def request(self, method: str, path: str, body: bytes, on_body: OnBody) -> int:
        """One request; on_body gets pieces of the answer with their moments (time.perf_counter).

        Raises OSError if there is no connection, TrustError if none is safe, ConnectionLostError if it ends too early.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._lines}Content-Length: {len(body)}\r\n\r\n".encode()
        connection = await self._connection()
        try:
            status = await connection.ask(head, body, on_body)
        except ConnectionLostError:
            if not connection.reused or connection.heard:
                raise
            connection = await self._connection()  # the server had closed it while it was idle
            status = await connection.ask(head, body, on_body)
        if connection.open:
            self._free.append(connection)
        return status

    async def _connection(self) -> _Connection:
        while self._free:
            connection = self._free.pop()
            if connection.open:
                connection.reused = True
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except ssl.SSLError as error:
            raise distrust(self._base_url, error) from None
        self._all.add(connection)
        connection.lost.add_done_callback(lambda _: self._all.discard(connection))
        return connection

    async def close(self) -> None:
        """End all connections and see their ends: TLS says goodbye first, and no loop may be closed before that."""
        self._free.clear()
        connections = list(self._all)
        for connection in connections:
            connection.close()
        if connections:
            _, late = await asyncio.wait([connection.lost for connection in connections], timeout=GOODBYE_S)
            for connection in connections:
                if connection.lost in late and connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(0)
