"""One grammar, step by step, within its limits: first trials, then masks. It knows no processes and no requests."""

import re
import time
from typing import Any

from tandem.sampling.grammar_limits import PARSER_LIMITS, GrammarLimits
from tandem.sampling.grammar_text import HINT, LimitError, UnfitError, first_line, grammar_text

_NO_TOKEN = "nothing can fulfil it: no token of this model goes on with it"
_SCHEMA_SIGN = "failed to compile JSON schema: "
_REFERENCE_SIGNS = ("does not exist", "retrieving it failed")
_OWN_PARTS = "nothing is fetched, and # is the schema's own root: put what a $ref means under $defs, as #/$defs/NAME."
_SHOWN = re.compile(r"^(\s*\d+ \|.*|\s*\^\s*)$", re.MULTILINE)
_LIMIT_SIGNS = (
    "too many", "Too many", "too large", "too complex", "fuel", "max is", "limits.", "precomputation failed",
)  # fmt: skip


class Tokenizers:
    """llguidance's views of tokenizers: 0.2 s to make for 49,000 ids, so they are kept, by number."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, int, tuple[int, ...]]] = {}

    def make(self, number: int, tokenizer_json: str, num_logits: int, eos_ids: tuple[int, ...]) -> None:
        """Raises UnfitError for what llguidance cannot read."""
        import llguidance

        try:
            made = llguidance.LLTokenizer(tokenizer_json, n_vocab=num_logits, eos_token=list(eos_ids))
        except Exception as error:  # llguidance raises plain exceptions
            raise UnfitError(first_line(str(error))) from error
        self._made[number] = made, num_logits, eos_ids
        if len(self._made) > 2:
            del self._made[min(self._made)]

    def get(self, number: int) -> tuple[Any, int, tuple[int, ...]]:
        return self._made[number]


class Follower:
    """The matcher of one request and what it has cost. One thread at a time. mask: the ids allowed next."""

    def __init__(self, matcher: Any, num_logits: int, limits: GrammarLimits) -> None:
        self.mask = b""
        self.num_tokens = 0
        self.spent_s = self.last_s = 0.0
        self._matcher, self._num_logits, self._limits = matcher, num_logits, limits

    @classmethod
    def compile(cls, tokenizer: Any, num_logits: int, kind: str, text: str, limits: GrammarLimits) -> "Follower":
        """Raises UnfitError: refused by llguidance, or impossible to fulfil."""
        import llguidance

        grammar = grammar_text(llguidance, kind, text, limits)
        own = {name: getattr(limits, name) for name in PARSER_LIMITS}
        matcher = llguidance.LLMatcher(
            tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False, **own)
        )
        if matcher.is_error():
            raise _failure(matcher)
        follower = cls(matcher, num_logits, limits)
        follower._look()
        return follower

    @property
    def is_slow(self) -> bool:
        """Its masks take long: it waits behind those whose masks do not."""
        return self.last_s > self._limits.slow_s or self.spent_s > self._limits.burst_s

    def copy(self) -> "Follower":
        """Another one at the same place, whose cost begins anew."""
        copy = Follower(self._matcher.deep_copy(), self._num_logits, self._limits)
        copy.mask, copy.num_tokens = self.mask, self.num_tokens
        return copy

    def step(self, tokens: list[int]) -> bytes:
        """Go on by these tokens; the next mask. Raises UnfitError if they are not of it, or a limit is reached."""
        was_allowed = _allows(self.mask, tokens[0])
        if not self._matcher.consume_tokens(tokens):
            if not was_allowed:
                raise UnfitError(f"the answer left it at the tokens {tokens}")
            raise _failure(self._matcher)
        self._look()
        self.num_tokens += len(tokens)
        return self.mask

    def timed_step(self, tokens: list[int]) -> bytes:
        """step, within the budget of time. Processor time of this thread: what others do does not count."""
        began_s = time.thread_time()
        mask = self.step(tokens)
        self.last_s = time.thread_time() - began_s
        self.spent_s += self.last_s
        limits = self._limits
        if self.last_s > limits.step_s:
            raise LimitError(
                f"a mask took {self.last_s:.2f} s; the limit is {limits.step_s:g} s of processor time a token"
            )
        allowed_s = limits.burst_s + limits.mean_s * self.num_tokens
        if self.spent_s > allowed_s:
            raise LimitError(
                f"its masks took {self.spent_s:.2f} s for {self.num_tokens} tokens; the limit is {limits.burst_s:g} s "
                f"and {1000 * limits.mean_s:g} ms a token of processor time"
            )
        return mask

    def try_steps(self, eos_ids: tuple[int, ...]) -> None:
        """Follow it for a few tokens of a made-up answer. Raises UnfitError if that reaches a limit."""
        limits = self._limits
        end_s = time.thread_time() + limits.trial_s
        for number in range(limits.num_trial_steps):
            token = _some_token(self.mask, number, eos_ids)
            if token is None or time.thread_time() > end_s:
                return
            self.step([token])

    def _look(self) -> None:
        matcher = self._matcher
        self.mask = matcher.compute_bitmask()[: 4 * ((self._num_logits + 31) // 32)]
        if matcher.is_error():
            raise _failure(matcher)
        if not any(self.mask):
            raise UnfitError(_NO_TOKEN)


def _failure(matcher: Any) -> UnfitError:
    """What a matcher in error means. llguidance says most of it in words alone."""
    error = matcher.get_error()
    _, is_schema, reason = error.partition(_SCHEMA_SIGN)
    if is_schema:  # what follows shows the grammar around it, which may be none of the client's
        error = f"{_SCHEMA_SIGN}{_SHOWN.sub('', reason)}"
    message = first_line(error)
    if message.startswith("NoExtension"):  # the name of the reason alone
        return UnfitError(_NO_TOKEN)
    if any(sign in message for sign in _LIMIT_SIGNS):
        return LimitError(f"it is too complex ({message.split('; try')[0].split('; consider')[0]})")
    if is_schema and any(sign in message for sign in _REFERENCE_SIGNS):
        return UnfitError(f"{message}{HINT}{_OWN_PARTS}")
    return UnfitError(message)


def _allows(mask: bytes, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _some_token(mask: bytes, number: int, eos_ids: tuple[int, ...]) -> int | None:
    """An allowed id that ends nothing, another one each time but the same in each run; None: there is none."""
    bits = bytearray(mask)
    for token in eos_ids:
        if token >> 3 < len(bits):
            bits[token >> 3] &= ~(1 << (token & 7))
    begin = (number + 1) * 2654435761 % len(bits)
    for places in (range(begin, len(bits)), range(begin)):
        for place in places:
            if bits[place]:
                return 8 * place + bits[place].bit_length() - 1
    return None
