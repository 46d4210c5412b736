"""What crosses the border between two processes, as msgpack. It knows shapes, neither sockets nor meanings.

No pickle: a message can only ever become one of these shapes, whatever the sender writes.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from tandem import errors
from tandem.engine.contract import Abort, Add, Call, Card, Close, Mail
from tandem.errors import RequestError, TandemError
from tandem.plan import Changes
from tandem.request import Change, Request


class AddMail(Struct, tag=0, array_like=True):
    request: Request


class AbortMail(Struct, tag=1, array_like=True):
    request: str


class CallMail(Struct, tag=2, array_like=True):
    number: int
    name: str
    argument: str


class CloseMail(Struct, tag=3, array_like=True):
    pass


class Fault(Struct, array_like=True):
    """An error of errors.py: the class's name and what it was made of."""

    kind: str
    what: str
    hint: str | None = None
    param: str | None = None
    code: str | None = None


class ChangesNews(Struct, tag=0, array_like=True):
    """As plan.Changes: a token more for each of the requests, and the other changes in full."""

    requests: Sequence[str]
    tokens: Sequence[int]
    others: Sequence[Change]

    @classmethod
    def of(cls, changes: Sequence[Change]) -> "ChangesNews":
        if isinstance(changes, Changes):
            return cls(changes.requests, changes.tokens, changes.others)
        return cls((), (), changes)

    @property
    def changes(self) -> Changes:
        return Changes(self.requests, self.tokens, self.others)


class ReportNews(Struct, tag=1, array_like=True):
    statistics: dict[str, Any]


class AnswerNews(Struct, tag=2, array_like=True):
    number: int
    value: Any
    fault: Fault | None


class PhaseNews(Struct, tag=3, array_like=True):
    """Start-up has come so far."""

    text: str


class ReadyNews(Struct, tag=4, array_like=True):
    """Start-up is over."""

    card: Card


class StoppedNews(Struct, tag=5, array_like=True):
    """The last message. Before Ready: start-up failed."""

    fault: Fault | None


News = ChangesNews | ReportNews | AnswerNews | PhaseNews | ReadyNews | StoppedNews


def _plain(value: Any) -> Any:
    """What msgspec does not know by itself: arrays of any kind, ranges, other iterables."""
    return value.tolist() if hasattr(value, "tolist") else list(value)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_news = msgspec.msgpack.Decoder(News).decode
_decode_mail = msgspec.msgpack.Decoder(AddMail | AbortMail | CallMail | CloseMail).decode


def encode_mail(mail: Mail) -> bytes:
    if isinstance(mail, Add):
        return encode(AddMail(mail.request))
    if isinstance(mail, Abort):
        return encode(AbortMail(mail.request))
    if isinstance(mail, Call):
        return encode(CallMail(*mail))
    return encode(CloseMail())


def decode_mail(message: bytes) -> Mail:
    item = _decode_mail(message)
    if isinstance(item, AddMail):
        return Add(item.request)
    if isinstance(item, AbortMail):
        return Abort(item.request)
    if isinstance(item, CallMail):
        return Call(item.number, item.name, item.argument)
    return Close()


def subject_of(message: bytes) -> str | int | None:
    """Whom mail concerns that cannot be decoded: the id of the request to add, the number of the call, or None."""
    try:
        match msgspec.msgpack.decode(message):
            case [AddMail.__struct_config__.tag, {"id": str(name)}, *_]:
                return name
            case [CallMail.__struct_config__.tag, int(number), *_]:
                return number
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    return None


def fault_of(error: TandemError | None) -> Fault | None:
    if error is None:
        return None
    if isinstance(error, RequestError):
        return Fault(type(error).__name__, error.what, error.hint, error.param, error.code)
    return Fault(type(error).__name__, error.what, error.hint)


def error_of(fault: Fault | None) -> TandemError | None:
    """The same error, of the same class if errors.py has it."""
    if fault is None:
        return None
    kind = getattr(errors, fault.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, TandemError)):
        return TandemError(fault.what, hint=fault.hint)
    if issubclass(kind, RequestError):
        return kind(fault.what, param=fault.param, code=fault.code, hint=fault.hint)
    return kind(fault.what, hint=fault.hint)
