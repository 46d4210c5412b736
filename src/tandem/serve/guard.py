"""API keys in front of every route but /health and the page's files. It knows headers, not what routes mean."""

import hashlib
import hmac
from collections.abc import Collection
from pathlib import Path

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.errors import SettingError
from tandem.serve.failure import HttpError, response_of

OPEN_PATHS = ("/health", "/")
OPEN_FOLDER = "/page/"
"""The page's own files, the same for everybody: they ask for the key, and everything behind them needs it."""


def read_keys(keys: Collection[str], file: str | None) -> tuple[str, ...]:
    """Keys from the environment or the command line and from a file with one a line (# starts a comment)."""
    found = [key.strip() for key in keys if key.strip()]
    if file is not None:
        try:
            lines = Path(file).read_text().splitlines()
        except OSError as error:
            raise SettingError(f"the API key file {file} cannot be read: {error.strerror}.") from None
        found += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise SettingError(
                f"the API key file {file} holds no key.", hint="write one key a line, or leave the option out."
            )
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
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]) or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return
        headers = HTTPConnection(scope).headers
        scheme, _, key = headers.get("authorization", "").partition(" ")
        shown = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not self.knows(shown):
            what = "the API key is wrong." if shown else "an API key is needed."
            error = HttpError(what, code="invalid_api_key", hint="send it as Authorization: Bearer KEY.")
            error.headers["WWW-Authenticate"] = "Bearer"
            await response_of(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def knows(self, key: str) -> bool:
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        return any([hmac.compare_digest(digest, known) for known in self._digests])
