"""Log-probabilities in the API's shapes. It knows tokens as text and bytes; it does not know answers."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from tandem.engine.detokenize import unfinished_bytes
from tandem.request import TokenLogprobs

VisibleBytes = Callable[[int], bytes]


class Tokens(Protocol):
    """What an answer needs of the tokenizer: a token alone, as text and as bytes."""

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def visible_bytes(self, skip_special_tokens: bool) -> VisibleBytes: ...


def chat_entries(tokens: Tokens, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """choices[].logprobs.content."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": tokens.token_text(token), "logprob": logprob, "bytes": list(tokens.token_bytes(token))}

    return [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]


class Offsets:
    """Where tokens stand in an answer's text, in characters: token by token, the place of the character that holds its
    first byte. A character of several tokens has one place; a token that adds nothing (a skipped special one) stands
    where the next character will.

    visible   id → the bytes that the token adds to the text.
    start     the place of the first character.
    before    bytes in front of it; an unfinished character at their end is gone on with.
    """

    def __init__(self, visible: VisibleBytes, start: int = 0, before: bytes = b"") -> None:
        self._visible, self.place = visible, start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = unfinished_bytes(before)
        self._decoder.decode(before[len(before) - tail :])

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The places of the tokens that come next."""
        return [place for place, _ in self.spans(tokens)]

    def spans(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The same, each with the place behind the last character that holds a byte of the token."""
        for token in tokens:
            data = self._visible(token)
            begun = self._decoder.decode(data[:1])
            waits = bool(self._decoder.getstate()[0])  # the first byte's character is not among those begun
            place = self.place + max(0, len(begun) - (not waits))
            self.place += len(begun) + len(self._decoder.decode(data[1:]))
            yield place, self.place + bool(data and self._decoder.getstate()[0])


def prompt_places(tokens: Tokens, ids: Sequence[int], text: str, *, as_written: bool) -> Iterator[int]:
    """The places of a prompt's tokens in its text, one by one: it may be long.

    as_written   special tokens in the text are shown in it.
    """
    shown, plain = tokens.visible_bytes(not as_written), tokens.visible_bytes(True)
    added = ids[:1] if not plain(ids[0]) and not text.startswith(tokens.token_text(ids[0])) else ids[:0]
    rest = ids[len(added) :]
    # sentencepiece writes a space before the first word that no text shows
    early = bool(rest) and shown(rest[0]).startswith(b" ") and not text.startswith(" ")
    yield from [0] * len(added)
    offsets = Offsets(shown, -early)
    for start in range(0, len(rest), 64):
        for place in offsets.of(rest[start : start + 64]):
            yield min(max(place, 0), len(text))


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def completion_lists(
    tokens: Tokens, entries: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """LISTS, the four equally long lists of choices[].logprobs."""
    return (
        [tokens.token_text(entry.token) for entry in entries],
        [entry.logprob for entry in entries],
        [_top(tokens, entry) for entry in entries],
        list(offsets),
    )


def num_values_of(entries: Sequence[TokenLogprobs]) -> int:
    """Log-probabilities that one of these entries has, at most."""
    return 1 + max((len(entry.top) for entry in entries[:2]), default=0)


def _top(tokens: Tokens, entry: TokenLogprobs) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    return {_key(tokens, token): logprob for token, logprob in entry.top}


def _key(tokens: Tokens, token: int) -> str:
    """A token's text; its bytes where they are no whole characters, so that two such tokens stay apart."""
    raw = tokens.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_entries(tokens: Tokens, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """The extension prompt_logprobs: for each prompt token its own and the best alternatives by id; first null."""
    shown: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry.logprob is None:
            shown.append(None)
            continue
        ranks = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        ranks[entry.token] = (entry.logprob, entry.rank)
        shown.append({
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": tokens.token_text(token)}
            for token, (logprob, rank) in ranks.items()
        })  # fmt: skip
    return shown
