"""HTTP/1.1 heads as bytes: those of answers that no route makes, and requests' that must be read in another way.

It knows the grammar of heads; it does not know connections.
"""

import re

import msgspec

from tandem.serve.failure import HttpError, body_of, status_of

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large",
           503: b"Service Unavailable"}  # fmt: skip


def message_of(error: HttpError) -> bytes:
    """A complete answer, behind which the connection ends."""
    status, body = status_of(error), msgspec.json.encode(body_of(error))
    head = [b"HTTP/1.1 %d %b" % (status, REASONS[status]), b"content-type: application/json",
            b"content-length: %d" % len(body), b"connection: close"]  # fmt: skip
    head += [f"{name.lower()}: {value}".encode() for name, value in error.headers.items()]
    return b"\r\n".join([*head, b"", body])


def head_without_offer(method: bytes, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The head again, such that nothing but HTTP/1.1 is asked for."""
    lines = [b"%b %b HTTP/1.1" % (method, url)]
    for name, value in headers:
        if name == b"connection":
            lines += [b"connection: close"] if b"close" in value.lower() else []
        elif name != b"upgrade":
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*lines, b"", b""])


def name_the_target(url: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Have a target that names its host (``GET http://name/path``) count for the Host header (RFC 9112, 3.2.2)."""
    if not url.startswith(b"/") and b"://" in url:
        name = re.split(rb"[/?#]", url.partition(b"://")[2], maxsplit=1)[0]
        headers[:] = [pair for pair in headers if pair[0] != b"host"] + [(b"host", name)]


def no_host(num: int) -> HttpError:
    what = f"the request has {num} Host headers." if num else "the request has no Host header."
    return HttpError(what, code="invalid_http", hint="HTTP/1.1 wants exactly one.")


def no_http() -> HttpError:
    return HttpError("this is no HTTP/1.1 request.", code="invalid_http")
