"""Failures as HTTP answers (status, and the error body of the OpenAI API) and as lines of the log.

It does not know what went wrong inside.

Body: {"error": {"message", "type", "param", "code"}}. A client's own mistakes are 4xx; nothing here shows a trace.
"""

import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from tandem.errors import CapacityError, ContextLengthError, EngineDeadError, RequestError, TandemError

log = logging.getLogger("tandem.serve")

MAX_FRAMES, MAX_CHAIN = 40, 5
# Fields whose name stands in the errors about them.
NUMBERS = ("max_tokens", "logprobs")

STATUS_BY_CODE = {
    "queue_full": 429,
    "rate_limited": 429,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "invalid_api_key": 401,
    "request_timeout": 408,
    "reader_too_slow": 408,
    "request_too_large": 413,
    "misdirected_request": 421,
    "headers_too_large": 431,
    "unsupported_media_type": 415,
    "internal_error": 500,
    "deadline_exceeded": 504,
    "draining": 503,
    "overloaded": 503,
    "queue_timeout": 503,
}


class HttpError(RequestError):
    """A refusal with headers of its own (Retry-After, Allow, WWW-Authenticate)."""

    def __init__(self, what: str, *, code: str, param: str | None = None, hint: str | None = None, **headers: str):
        super().__init__(what, param=param, code=code, hint=hint)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def status_of(error: Exception) -> int:
    """400 for a request's own fault unless its code says otherwise, 503 for a dead engine, 500 for the rest."""
    if isinstance(error, ContextLengthError | CapacityError):
        return 400
    if isinstance(error, RequestError):
        return STATUS_BY_CODE.get(error.code, 400)
    return 503 if isinstance(error, EngineDeadError) else 500


def body_of(error: Exception) -> dict[str, Any]:
    """The error body; a failure that is not ours to explain says only that it happened."""
    status = status_of(error)
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    message = str(error) if isinstance(error, TandemError) else "the server failed to answer this request."
    param = error.param if isinstance(error, RequestError) else None
    code = error.code if isinstance(error, RequestError) else "engine_dead" if status == 503 else "internal_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def reworded(error: RequestError, words: Mapping[str, str]) -> RequestError:
    """The same error, naming the field as this endpoint's clients write it. words: ours → theirs."""
    theirs = words.get(error.param or "")
    if theirs is None:
        return error
    ours, error.param = error.param or "", theirs
    if ours in NUMBERS and theirs not in error.what:
        what, hint = (re.sub(rf"\b{ours}\b", theirs, text) for text in (error.what, error.hint or ""))
        TandemError.__init__(error, what, hint=hint or None)
    return error


def response_of(error: Exception) -> Response:
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if status_of(error) in (429, 503) and not isinstance(error, EngineDeadError):
        headers.setdefault("Retry-After", "1")
    return Response(
        msgspec.json.encode(body_of(error)), status_of(error), headers=headers, media_type="application/json"
    )


def report(error: Exception, method: str, path: str) -> None:
    """Log a failure that is answered with 500, once, with where it came from; clients' mistakes are not logged."""
    if status_of(error) != 500 or is_reported(error):
        return
    error.__dict__["tandem_reported"] = True
    if isinstance(error, RequestError):  # it comes from the engine, which tells more of it
        log.error("%s %s failed: %s", method, path, error.code)
    else:
        log.error("%s %s failed\n%s", method, path, trace_of(error))


def is_reported(error: BaseException | None) -> bool:
    return error is not None and "tandem_reported" in error.__dict__


def trace_of(error: BaseException) -> str:
    """The traceback without messages: those may quote a prompt or a key, places in the code cannot."""
    parts: list[str] = []
    now: BaseException | None = error
    while now is not None and len(parts) < MAX_CHAIN:
        reason = f": {now.strerror}" if isinstance(now, OSError) and now.strerror else ""
        places = "".join(traceback.format_tb(now.__traceback__, -MAX_FRAMES))
        parts.append(f"Traceback (most recent call last):\n{places}{type(now).__qualname__}{reason}")
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)
    return "\n\nwhich led to\n\n".join(reversed(parts))
