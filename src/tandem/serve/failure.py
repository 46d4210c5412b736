"""Failures as HTTP answers (status, and the error body of the OpenAI API) and as lines of the log.

It does not know what went wrong inside.

Body: {"error": {"message", "type", "param", "code"}}. A client's own mistakes are 4xx; nothing here shows a trace.
"""

import logging
import re
import traceback
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from tandem.errors import CapacityError, ContextLengthError, EngineDeadError, RequestError, TandemError
from tandem.serve.nesting import MAX_DEPTH, SMALL_BYTES, check_build, depth_of, too_deep
from tandem.serve.refusals import NEUTRAL
from tandem.serve.schema import MISPLACED

log = logging.getLogger("tandem.serve")

Body = TypeVar("Body")
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


def decode(raw: bytes, kind: type[Body]) -> Body:
    """Decode one body of at most MAX_DEPTH levels; null at the top level of an object counts as not given. Fields
    that are unknown, or another endpoint's, are refused: whoever sends them counts on them.

    A large body is looked at before: one that would make too many objects is refused. See nesting.py.
    """
    if len(raw) > SMALL_BYTES:
        check_build(raw)
    try:
        strict: Any = _strict(kind)  # type: ignore[arg-type]
        body: Body = msgspec.json.decode(raw, type=strict)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        body = _leniently_decoded(raw, kind)
    if len(raw) <= SMALL_BYTES and depth_of(raw) > MAX_DEPTH:
        raise too_deep()
    return body


@cache
def _strict(kind: Any) -> Any:
    """The same structure, which takes no field that it does not have, be it null."""
    return msgspec.defstruct(kind.__name__, (), bases=(kind,), kw_only=True, forbid_unknown_fields=True)


def _leniently_decoded(raw: bytes, kind: type[Body]) -> Body:
    """What is not as it should be: unknown fields that ask for nothing are passed over, all else is refused."""
    try:
        body = msgspec.json.decode(raw, type=kind)
        given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        path = re.search(r"`\$\.?([^`]*)`$", str(error))
        param = re.split(r"[.\[]", path.group(1))[0] if path and path.group(1) else None
        missing = re.search(r"missing required field `(\w+)`", str(error)) if param is None else None
        raise RequestError(
            f"the body is not as it should be: {error}.",
            param=missing.group(1) if missing else param,
            code="invalid_type",
        ) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if isinstance(error, RecursionError):
            raise too_deep() from None
        raise RequestError(f"the body is no valid JSON: {error}.", code="invalid_json") from None
    known = frozenset(kind.__struct_fields__)  # type: ignore[attr-defined]
    for name, value in given.items():
        if name not in known and bytes(value) not in (b"null", *NEUTRAL.get(name, ())):
            is_misplaced = name in MISPLACED.get(kind, ())
            if depth_of(raw) > MAX_DEPTH:
                raise too_deep()
            hint = "it belongs to another one of /v1/chat/completions, /v1/completions and /v1/responses."
            raise RequestError(
                f"{name!r:.80} is no field of this endpoint.", param=name[:80], code="unsupported_value",
                hint=hint if is_misplaced else "leave it out; /openapi.json lists the fields.",
            )  # fmt: skip
    return body
