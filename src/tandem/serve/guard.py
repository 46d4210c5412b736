"""API keys and host names in front of the routes. It knows headers, not what routes mean."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection
from pathlib import Path

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.errors import SettingError
from tandem.serve.failure import HttpError, response_of

CLIENT = "tandem.client"
OPEN_PATHS = ("/health", "/")
HOST = re.compile(r"(?:\[(?P<address>[^\[\]@/]*)\]|(?P<name>[^\[\]:@/?#]*))(?::[0-9]*)?")
OPEN_FOLDER = "/page/"
"""The page's own files, the same for everybody: they ask for the key, and everything behind them needs it."""


def read_keys(keys: Collection[str], file: str | None) -> tuple[str, ...]:
    """Keys from the environment or the command line and from a file with one a line (# starts a comment)."""
    found = [key.strip() for key in keys if key.strip()]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise SettingError(f"the API key file {file} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise SettingError(f"the API key file {file} is no text in UTF-8.") from None
        found += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise SettingError(
                f"the API key file {file} holds no key.", hint="write one key a line, or leave the option out."
            )
    for number, key in enumerate(found, 1):
        if not key.isprintable():
            raise SettingError(f"API key number {number} holds control characters, which no client can send.")
    return tuple(found)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class KeyGuard:
    """Lets a connection through only with ``Authorization: Bearer KEY`` (or ``X-Api-Key``) of a known key.

    Keys are kept and compared as digests, each comparison in constant time, all of them every time, so that the time
    taken tells nothing about which key or how much of it matched.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]) or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return
        headers = HTTPConnection(scope).headers
        scheme, _, key = headers.get("authorization", "").partition(" ")
        shown = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        number = self.number_of(shown)
        if number is None:
            what = "the API key is wrong." if shown else "an API key is needed."
            error = HttpError(what, code="invalid_api_key", hint="send it as Authorization: Bearer KEY.")
            error.headers["WWW-Authenticate"] = "Bearer"
            await response_of(error)(scope, receive, send)
            return
        scope[CLIENT] = f"key {number}"
        await self.app(scope, receive, send)

    def number_of(self, key: str) -> int | None:
        """Which of the keys it is; None: none of them.

        key   as a header gives it, each byte a character. Those of other letters than English are sent as UTF-8.
        """
        digest = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return found.index(True) if any(found) else None


def client_of(scope: Scope) -> str:
    """Who asks: the API key by its number, or else the address; of IPv6 the first half, which is one site's."""
    if CLIENT in scope:
        return str(scope[CLIENT])
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return str(host)
    address = getattr(address, "ipv4_mapped", None) or address
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


def is_local_name(name: str) -> bool:
    """Whether a name or address can only mean this machine."""
    try:
        address = ipaddress.ip_address(name)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback is True
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def host_of(value: str) -> str:
    """The name in a Host header, without port and brackets (RFC 9110, 7.2). What is no such header is its own name."""
    value = value.strip().lower()
    found = HOST.fullmatch(value)
    return (found["address"] or found["name"] or "").removesuffix(".") if found else value


class HostGuard:
    """Lets a request through only if it is meant for this server: its Host is local, or one of ``hosts``.

    A page from elsewhere whose name has been made to resolve to 127.0.0.1 (DNS rebinding) counts as "same origin" to
    the browser; it is the Host header that gives it away. A request without one is no browser's.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app, self._hosts = app, {host_of(host) for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [host_of(value.decode("latin-1")) for name, value in scope.get("headers", ()) if name == b"host"]
        wrong = [name for name in names if name not in self._hosts and not is_local_name(name)]
        if not wrong:
            await self.app(scope, receive, send)
            return
        error = HttpError(
            f"this server is not {wrong[0]:.200}.", code="misdirected_request",
            hint="call it by localhost, or start it with --allowed-host NAME.",
        )  # fmt: skip
        await response_of(error)(scope, receive, send)
