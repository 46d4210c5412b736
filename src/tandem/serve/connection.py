"""One client's connection: uvicorn's HTTP/1.1 over httptools, with limits on time and size, and an orderly end.

It knows bytes and heads, not routes. What uvicorn leaves open is closed here:

waiting   a head must be complete within header_s and header_bytes; a full house sends away who waits longest.
leaving   an answer that comes before its request is complete ends the connection, and what the client still sends is
          read and dropped for LINGER_S: closing at once would reset the connection and take the answer with it.
half      a client that shuts down its sending side behind a request is answered, if its answer has not begun. That
          looks like one that has gone, so interim answers (100, RFC 9110, 15.2) are sent until a write fails.
garbage   what is no request is answered behind the requests in front of it, and ends the connection.
stuck     a client that takes nothing of its answer for send_s is cut off.
old       to HTTP/1.0 a stream is sent without chunks, and its end is the connection's.
"""

import asyncio
import socket
import time
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tandem.serve.border import Border
from tandem.serve.failure import HttpError
from tandem.serve.heads import PROBE, head_without_offer, message_of, name_the_target, no_host, no_http
from tandem.serve.unframed import without_chunks

LINGER_S = 2.0
GOODBYE_S = 0.1
FIRST_PROBE_S, LAST_PROBE_S = 0.002, 5.0
OLD_CLIENT_S = 0.1


class _Leaving:
    """A transport whose ``close`` is the connection's to do."""

    def __init__(self, transport: Any, connection: "Connection") -> None:
        self._transport, self.close, self.write = transport, connection.leave, transport.write
        self._connection = connection

    def is_closing(self) -> bool:
        return self._connection.has_left or bool(self._transport.is_closing())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """An asyncio.Protocol. own_socket: to end a TLS handshake by."""

    def __init__(self, border: Border, own_socket: socket.socket, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.border, self._socket = border, own_socket
        self.has_left = False
        self._raw: Any = None
        self._serving: RequestResponseCycle | None = None
        self._in_head = self._may_keep = False
        self._num_begun = self._head_bytes = self._trailer_bytes = 0
        self._refusal: HttpError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        border.open.add(self)
        border.waiting[self] = time.monotonic()
        border.num_accepted += 1

    # ------------------------------------------------------------------ the transport's calls

    def connection_made(self, transport: Any) -> None:
        self._raw = transport
        super().connection_made(_Leaving(transport, self))  # type: ignore[arg-type]
        self._arm(self.border.header_s, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        if self.has_left or self._refusal is not None:
            return
        was_in_head, num_begun = self._in_head, self._num_begun
        between = self.cycle is None or not self.cycle.more_body
        self._unset_keepalive_if_required()
        self._feed(data)
        if self.has_left or self._refusal is not None:
            return
        if self._in_head and (was_in_head or (between and self._num_begun == num_begun + 1)):
            self._head_bytes += len(data)
            if self._head_bytes > self.border.header_bytes:
                self._refuse(self._too_large())
                return
        if self._serving is None and self._timer is None:  # bytes that begin nothing count as a head, too
            self._arm(self.border.header_s, self._head_is_late)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # Another protocol is offered (h2c by Java's clients, websocket), and httptools has skipped the body: the
            # request is read once more without the offer, and answered in HTTP/1.1.
            if (method := self.parser.get_method()) == b"CONNECT":
                self.send_400_response("")
                return
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(head_without_offer(method, self.url, self.headers) + data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. True: the connection stays open for the answer."""
        cycle = self._serving
        if self.has_left or cycle is None or self.scheme == "https":
            return False
        if (self._in_head and self._refusal is None) or self.cycle.more_body or cycle.response_started:
            return False
        self.cycle.keep_alive &= self._refusal is not None
        self._probe(FIRST_PROBE_S)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for cycle in (self._serving, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress(0)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.has_left and self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    # ------------------------------------------------------------------ the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._num_begun += 1
        self._head_bytes = self._trailer_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value)  # behind a chunked body; nobody reads them
        if self._trailer_bytes > self.border.header_bytes:
            self._refusal = self._too_large()
            raise self._refusal

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.get_http_version() not in ("1.0", "1.1"):  # a bare "GET /" is HTTP/0.9
            raise no_http()
        if self.parser.should_upgrade():
            return  # see _feed
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.border.header_bytes:
            self._refusal = self._too_large()
            raise self._refusal
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (not num_hosts and self.parser.get_http_version() == "1.1"):  # RFC 9112, 3.2
            self.border.num_malformed += 1
            self._refusal = no_host(num_hosts)
            raise self._refusal
        name_the_target(self.url, self.headers)
        super().on_headers_complete()
        self._may_keep = self.cycle.keep_alive
        self.cycle.keep_alive = False  # an answer in front of the body's end ends the connection

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._may_keep

    def send_400_response(self, msg: str) -> None:
        self.border.num_malformed += self._refusal is None
        self._refuse(self._refusal or no_http())

    # ------------------------------------------------------------------ requests

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._serving = cycle
        self.border.waiting.pop(self, None)
        self._disarm()
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, without_chunks(app, cycle) if is_old else app)

    def on_response_complete(self) -> None:
        self._serving = None
        super().on_response_complete()
        if self._serving is None and not self.has_left:
            if self._refusal is not None:
                self._refuse(self._refusal)
                return
            self.border.waiting[self] = time.monotonic()
            if self._in_head:
                self._arm(self.border.header_s, self._head_is_late)

    def shutdown(self) -> None:
        self._may_keep = False
        if self._serving is None:
            self._close()
            return
        self._serving.keep_alive = False

    # ------------------------------------------------------------------ ends

    def leave(self) -> None:
        """Close, behind what has been written. A client in the middle of its request may finish reading first."""
        if self.has_left:
            return
        is_unread = self._in_head or self._refusal is not None or (self.cycle is not None and self.cycle.more_body)
        self.has_left = True
        self._disarm()
        self.border.waiting.pop(self, None)
        if not is_unread or self._raw.is_closing():
            self._close()
        else:
            self.flow.resume_reading()
            if self._raw.can_write_eof():
                self._raw.write_eof()
            self._arm(LINGER_S, self._close)
        self._expect_progress(0)

    def evict(self) -> None:
        """Make room."""
        self.border.waiting.pop(self, None)
        if self._raw is None:
            self._socket.shutdown(socket.SHUT_RDWR)
        else:
            self.has_left = True
            self._close()

    def _close(self) -> None:
        """Over TLS the transport would wait 30 s for a goodbye, which nobody needs whose last bytes are out."""
        self._raw.close()
        if self.scheme == "https":
            self.loop.call_later(GOODBYE_S, self._cut)

    def _cut(self) -> None:
        if self in self.border.open:
            if self._raw.get_write_buffer_size():
                self.loop.call_later(GOODBYE_S, self._cut)  # see _expect_progress for those that take nothing
            else:
                self._raw.abort()

    def forget(self) -> None:
        """It is gone."""
        self.has_left = True
        self.border.open.discard(self)
        self.border.waiting.pop(self, None)
        self._disarm()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def _refuse(self, error: HttpError) -> None:
        """Answer bytes that are no request, behind those that are: requests in front of them have their answers first.

        A request whose own body is at fault is cut off, if its answer has begun.
        """
        self._refusal = error
        cycle = self._serving
        if cycle is not None and not (cycle is self.cycle and cycle.more_body):
            if self.cycle.more_body:
                self.pipeline.popleft()
                self.cycle = self.pipeline[0][0] if self.pipeline else cycle
            return  # see on_response_complete
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or not cycle.response_started:
            self._raw.write(message_of(error))
        self.leave()

    def _too_large(self) -> HttpError:
        self.border.num_malformed += 1
        return HttpError(f"the header is over {self.border.header_bytes} bytes.", code="headers_too_large")

    def _head_is_late(self) -> None:
        self.border.num_late += 1
        if self._in_head:
            what = f"the request's header did not come within {self.border.header_s:g} s."
            self._refuse(HttpError(what, code="request_timeout"))
        else:
            self._close()

    def _probe(self, wait_s: float) -> None:
        """Whether somebody still listens. An HTTP/1.0 client knows no interim answers and gets a moment only."""
        cycle = self._serving
        if cycle is None or cycle.response_started or self.has_left:
            return
        if cycle.scope["http_version"] == "1.1":
            self._raw.write(PROBE)
        elif wait_s > OLD_CLIENT_S:
            self._raw.close()
            return
        self._arm(wait_s, self._probe, min(2 * wait_s, LAST_PROBE_S))

    def _expect_progress(self, last_bytes: int) -> None:
        """Cut the client off if none of the bytes that wait for it go out in send_s."""
        waiting_bytes = self._raw.get_write_buffer_size()
        if last_bytes and waiting_bytes >= last_bytes:
            self.border.num_stuck += 1
            self._raw.abort()
            return
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._send_timer = self.loop.call_later(self.border.send_s, self._expect_progress, max(1, waiting_bytes))

    def _arm(self, wait_s: float, then: Any, *arguments: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(wait_s, then, *arguments)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
