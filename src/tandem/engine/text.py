"""Text to token ids and back, with one tokenizer. It knows neither requests nor stop strings nor templates.

Encoding runs in a small pool of threads, since one long text takes seconds; `tokenizers` lets other threads run
meanwhile. Nothing here changes the tokenizer after construction, which is what makes sharing it safe (C07).
"""

import asyncio
import json
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tandem.engine.detokenize import Detokenizer
from tandem.errors import ContextLengthError, ModelError, RequestError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INLINE_BYTES = 4096
"""Texts up to this length are encoded at once: handing them to a thread would take longer than the work."""


class Text:
    """A tokenizer made from the text of a tokenizer.json.

    bos_id      id of the begin-of-sequence token, or None.
    eos_ids     ids that end an answer.
    add_bos     True: every encoded prompt begins with bos_id, exactly once. False: the tokenizer's own rule decides.
    Raises ModelError if the description cannot be read.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        bos_id: int | None = None,
        eos_ids: Collection[int] = (),
        add_bos: bool = False,
        num_threads: int = 2,
    ) -> None:
        try:
            self.tokenizer = Tokenizer.from_str(tokenizer_json)
            layout: dict[str, Any] = json.loads(tokenizer_json)
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(
                f"the tokenizer cannot be read: {error}.", hint="tokenizer.json must be of the `tokenizers` format."
            ) from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.json = tokenizer_json
        self.bos_id, self.eos_ids, self.add_bos = bos_id, frozenset(eos_ids), add_bos
        self.num_tokens = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._added: dict[int, AddedToken] = self.tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, added in self._added.items() if added.special)
        self._is_byte_level, self._has_byte_pieces, self._space = _decoder_of(layout)
        self._longest_bytes = self._longest_token(layout)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tandem-encode")
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)
        decode: Callable[..., str] = self.tokenizer.decode
        self._decode_shown = lru_cache(maxsize=65536)(lambda token: decode([token], skip_special_tokens=True))
        self._decode_all = lru_cache(maxsize=65536)(lambda token: decode([token], skip_special_tokens=False))

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text. Safe from several threads.

        add_special_tokens   add what the tokenizer adds to a prompt, its begin-of-sequence token for one. Text that
                             already begins with that token gets no second one. False for rendered chat templates.
        max_tokens           refuse with ContextLengthError, before the work, a text that cannot fit into so many.
        Raises RequestError for text that is no valid Unicode (lone surrogates).
        """
        self._check_length(text, max_tokens)
        try:
            # Of the encode calls, this one gives the interpreter lock back while it works, and is the quickest.
            ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the text holds a lone surrogate, which is no character.", param="prompt") from error
        if self.bos_id is None:
            return ids
        if add_special_tokens and self.add_bos and (not ids or ids[0] != self.bos_id):
            ids.insert(0, self.bos_id)
        while len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            del ids[0]
        return ids

    async def encode_async(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None
    ) -> list[int]:
        """As encode; a long text is encoded in a thread, so that the event loop goes on."""
        if len(text) <= _INLINE_BYTES:
            return self.encode(text, add_special_tokens, max_tokens=max_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, lambda: self.encode(text, add_special_tokens, max_tokens=max_tokens)
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids that the tokenizer does not know are left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """An incremental decoder for what follows prompt_ids."""
        visible = self.visible_bytes(skip_special_tokens)
        decode_one = self._decode_shown if skip_special_tokens else self._decode_all
        return Detokenizer(self.tokenizer, visible, prompt_ids, skip_special_tokens, self._is_byte_level, decode_one)

    def visible_bytes(self, skip_special_tokens: bool) -> Any:
        """A function id → the bytes that the token adds to a decoded text."""
        if not skip_special_tokens:
            return self.token_bytes
        return lambda token: b"" if token in self._special else self.token_bytes(token)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written so; None if there is none."""
        token = self.tokenizer.token_to_id(text)
        return token if token is not None and token in self._special else None

    def token_text(self, token: int) -> str:
        """One token as text, broken bytes as U+FFFD; empty for ids that the tokenizer does not know."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def close(self) -> None:
        """Give the threads back. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _token_bytes(self, token: int) -> bytes:
        """The raw bytes of one token, special tokens included; empty for ids that the tokenizer does not know."""
        if token in self._added:
            return str(self._added[token].content).encode()
        piece = self.tokenizer.id_to_token(token) if token >= 0 else None
        if piece is None:
            return b""
        if self._is_byte_level:
            known = _byte_of_character()
            return b"".join(bytes((known[c],)) if c in known else c.encode() for c in piece)
        if self._has_byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes((int(match[1], 16),))
        return str(piece.replace(self._space, " ") if self._space else piece).encode()

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None or self._longest_bytes is None or len(text) <= max_tokens:
            return
        num_bytes = len(text.encode("utf-8", errors="replace"))
        if num_bytes > max_tokens * self._longest_bytes:
            raise ContextLengthError(
                f"the prompt has {num_bytes} bytes, at least {-(-num_bytes // self._longest_bytes)} tokens; "
                f"the limit is {max_tokens}.",
                param="prompt",
                hint="shorten the prompt.",
            )

    def _longest_token(self, layout: dict[str, Any]) -> int | None:
        """Bytes of the longest token, or None where one token may stand for any length of text."""
        model = layout.get("model", {})
        swallows = any(added.lstrip or added.rstrip for added in self._added.values())
        fuses = bool(model.get("fuse_unk")) and not model.get("byte_fallback")
        if swallows or fuses or not _keeps_length(layout.get("normalizer")):
            return None
        return max((len(piece.encode()) for piece in self.tokenizer.get_vocab(with_added_tokens=True)), default=1)


def _keeps_length(normalizer: dict[str, Any] | None) -> bool:
    """Whether a normalizer never makes a text shorter: none, or one that only puts in the sentencepiece space."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(_keeps_length(part) for part in normalizer["normalizers"])
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode())
    return bool(normalizer["type"] == "Prepend")


def _decoder_of(layout: dict[str, Any]) -> tuple[bool, bool, str]:
    """(byte-level, byte-fallback, the character that stands for a space or '') of a tokenizer.json."""
    decoder = layout.get("decoder") or {}
    parts = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {part.get("type") for part in parts}
    space = ""
    for part in parts:
        if part.get("type") == "Metaspace":
            space = part.get("replacement", "▁")
        elif part.get("type") == "Replace" and part.get("content") == " ":
            space = part.get("pattern", {}).get("String", "")
    return "ByteLevel" in kinds, "ByteFallback" in kinds, space


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2, Radford et al. 2019): printable bytes stand for themselves, the other
    68 for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
