"""Incremental decoding: ids come one by one, characters leave once they are final. It does not know stop strings.

Decoding ids one at a time would break characters that span tokens and lose the spaces of sentencepiece words. So a
few ids before the new ones are always decoded along, and what they gave is cut off again:

    context (its text is out)   pending (held back)
    [ ▁big  ▁cat ]              [ <0xF0> <0x9F> ]      text ends in a character that may still be completed: wait
    [ ▁big  ▁cat ]              [ <0xF0> <0x9F> <0x98> <0x80> ]   → "😀" leaves, the four become the new context
"""

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FIRST_CONTEXT = 6
"""Prompt ids decoded along at first; more are taken where these give no text of their own."""


class Detokenizer:
    """Text of the ids pushed, relative to a prompt: the pieces joined are what decoding everything at once would give.

    A run of bytes that can never become a character leaves as U+FFFD at once. With byte-fallback tokenizers, whose
    decoder also spoils valid characters in front of such a run, what has left is not taken back.

    visible_bytes   id → the bytes it adds to the text (none for special tokens that are skipped).
    concatenates    the tokenizer is byte-level: whole characters decode alike in any company, so no context is kept.
    decode_one      the decoder's text of one id alone, remembered by whoever gives it; used where that is all there is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        visible_bytes: Callable[[int], bytes],
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        concatenates: bool = False,
        decode_one: Callable[[int], str] | None = None,
    ) -> None:
        self._decode: Callable[[list[int], bool], str] = tokenizer.decode
        self._visible_bytes = visible_bytes
        self._skip = skip_special_tokens
        self._concatenates = concatenates
        self._decode_one = decode_one if concatenates else None
        self._ids, self._prefix = self._context_of(prompt_ids)
        self._num_read = len(self._ids)

    def push(self, token: int) -> str:
        """The characters that became final with this token, often none."""
        if self._decode_one is not None and not self._ids:
            alone = self._decode_one(token)
            if REPLACEMENT not in alone:
                return alone
        self._ids.append(token)
        text = self._decode(self._ids, self._skip)
        if text == self._prefix and not self._visible_bytes(token):
            self._ids.pop()  # special or unknown: without a trace, however many come
            return ""
        if text.endswith(REPLACEMENT) and self._may_be_completed():
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What was held back, as it stands: an unfinished character becomes U+FFFD. A second call gives nothing."""
        if self._num_read == len(self._ids):
            return ""
        return self._advance(self._decode(self._ids, self._skip))

    def _advance(self, text: str) -> str:
        new = self._beyond_prefix(text)
        if self._concatenates:
            self._ids, self._prefix, self._num_read = [], "", 0
            return new
        pending = self._ids[self._num_read :]
        prefix = self._decode(pending, self._skip)
        if prefix:
            # Ids without text of their own (a lone space at the front) must not become the whole context: the next
            # word would be taken for the first, and its space be cut off.
            self._ids, self._prefix = pending, prefix
        else:
            self._prefix = text
        self._num_read = len(self._ids)
        return new

    def _beyond_prefix(self, text: str) -> str:
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        # The prompt ended inside a character that is complete now, or a byte run spoiled what has left already.
        whole = self._prefix.rstrip(REPLACEMENT)
        if text.startswith(whole):
            return text[len(whole) :]
        return self._decode(self._ids[self._num_read :], self._skip)

    def _may_be_completed(self) -> bool:
        """Whether the last bytes are the beginning of a character: at most three, so at most the last few ids."""
        tail = b""
        for token in reversed(self._ids):
            tail = self._visible_bytes(token) + tail
            if len(tail) >= 3:
                break
        return unfinished_bytes(tail) > 0

    def _context_of(self, prompt_ids: Sequence[int]) -> tuple[list[int], str]:
        """The shortest tail of the prompt that has text of its own and does not begin inside a character."""
        num_ids = min(_FIRST_CONTEXT, len(prompt_ids))
        while True:
            ids = list(prompt_ids[len(prompt_ids) - num_ids :])
            text = self._decode(ids, self._skip)
            if self._concatenates and not text.endswith(REPLACEMENT):
                return [], ""
            if num_ids == len(prompt_ids) or (text and not text.startswith(REPLACEMENT)):
                return ids, text
            num_ids = min(2 * num_ids, len(prompt_ids))


def unfinished_bytes(data: bytes) -> int:
    """How many bytes at the end of data begin a UTF-8 character that is not complete yet (0 to 3)."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 == 0x80:
            continue
        wanted = 2 if lead >= 0xC2 and lead < 0xE0 else 3 if lead & 0xF0 == 0xE0 else 4 if 0xF0 <= lead < 0xF5 else 1
        return length if length < wanted and _second_byte_fits(data[-length:]) else 0
    return 0


def _second_byte_fits(start: bytes) -> bool:
    """Some second bytes are forbidden: overlong forms, surrogates, beyond U+10FFFF (Unicode Standard, table 3-7)."""
    if len(start) < 2:
        return True
    low, high = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}.get(
        start[0], (0x80, 0xBF)
    )
    return low <= start[1] <= high
