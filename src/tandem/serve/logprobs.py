"""Log-probabilities in the API's shapes. It knows tokens as text and bytes; it does not know answers."""

from collections.abc import Sequence
from typing import Any, Protocol

from tandem.request import TokenLogprobs


class Tokens(Protocol):
    """What an answer needs of the tokenizer: a token alone, as text and as bytes."""

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


def chat_entries(tokens: Tokens, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """choices[].logprobs.content."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": tokens.token_text(token), "logprob": logprob, "bytes": list(tokens.token_bytes(token))}

    return [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]


def completion_lists(tokens: Tokens, entries: Sequence[TokenLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """The four equally long lists of choices[].logprobs, and the offset behind them in characters."""
    texts = [tokens.token_text(entry.token) for entry in entries]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    lists = {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_top(tokens, entry) for entry in entries],
        "text_offset": offsets,
    }
    return lists, offset


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
