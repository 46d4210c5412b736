"""What a user asks and what comes back, as plain data. It does not know how either is computed.

A *request* becomes one or more *sequences*: with ``n > 1`` the front end submits n requests whose
``fork_of`` names the first, so that everything behind it deals with one stream of tokens a request.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from tandem.errors import ContextLengthError, RequestError
from tandem.values import (
    INTEGER_LIMIT,
    checked_integer,
    checked_items,
    checked_number,
    checked_text,
    checked_token,
    show,
)

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_N = 128
MAX_TEMPERATURE = 100.0
MAX_SALT_LENGTH = 256

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the answer must follow. kind: json_object, json_schema, regex, choice or grammar."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        """Raises RequestError for what is no text."""
        for name in ("kind", "text"):
            object.__setattr__(self, name, checked_text(f"constraint.{name}", getattr(self, name)))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Defaults change nothing: the model's own distribution.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. repetition_penalty looks at prompt and
    output (as in CTRL, Keskar et al. 2019: positive logits divided, negative multiplied); presence_penalty and
    frequency_penalty look at the output alone (as in the OpenAI API). logit_bias: pairs (token id, bias), or a
    dictionary. stop: strings, or one alone. None for stop, stop_token_ids or logit_bias: none.
    max_tokens None: up to the context limit. logprobs None: none; k: the sampled token's and the k best, of the
    model's own distribution before temperature and truncation; prompt_logprobs likewise for each prompt token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        """Raises RequestError naming the field. Numbers of other libraries become int and float, None becomes ()."""
        for name, low, high, open_low in _NUMBERS:
            _set(self, name, checked_number(name, getattr(self, name), low, high, open_low))
        for name, least, most in _INTEGERS:
            _set(self, name, checked_integer(name, getattr(self, name), least, most))
        for name, least, most in _OPTIONAL_INTEGERS:
            if getattr(self, name) is not None:
                _set(self, name, checked_integer(name, getattr(self, name), least, most))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {show(getattr(self, name))}; it must be True or False.", param=name)
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise RequestError(
                f"constraint is {show(self.constraint)}; it must be a Constraint.",
                param="constraint",
                hint='for example Constraint("regex", "[a-z]+").',
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}.", param="min_tokens"
            )
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else checked_items("stop", self.stop, "strings")
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop has {len(stops)} strings; the limit is {MAX_STOPS}.", param="stop")
        for text in stops:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop holds {show(text)}; each stop must be a non-empty string.", param="stop")
            if len(text) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"a stop string has {len(text)} characters; the limit is {MAX_STOP_LENGTH}.", param="stop"
                )
        _set(self, "stop", tuple(checked_text("stop", text) for text in stops))
        tokens = checked_items("stop_token_ids", self.stop_token_ids, "token ids")
        _set(self, "stop_token_ids", tuple(checked_token("stop_token_ids", token) for token in tokens))

    def _check_bias(self) -> None:
        value: Any = self.logit_bias
        pairs: list[tuple[int, float]] = []
        for pair in value.items() if isinstance(value, Mapping) else checked_items("logit_bias", value, "pairs"):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise RequestError(
                    f"logit_bias holds {show(pair)}; it must be a dictionary, or pairs (token id, bias).",
                    param="logit_bias",
                )
            token = checked_token("logit_bias", pair[0])
            pairs.append((token, checked_number("logit_bias", pair[1], -100.0, 100.0, of=f" of token {token}")))
        _set(self, "logit_bias", tuple(pairs))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def uses_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, num_logits: int) -> None:
        """Raise RequestError if a token id lies outside 0..num_logits-1, the rows of the output matrix."""
        for param, tokens in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in tokens:
                if not 0 <= token < num_logits:
                    raise RequestError(
                        f"{param} names token id {token}; this model's ids are 0..{num_logits - 1}.", param=param
                    )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SamplingParams":
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise RequestError(
                    f"there is no sampling parameter {name!r}.",
                    param=name,
                    hint=f"the parameters are: {', '.join(sorted(known))}.",
                )
        return cls(**values)


_NUMBERS = (  # name, lowest, highest, whether the lowest itself is excluded
    ("temperature", 0.0, MAX_TEMPERATURE, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, MAX_TEMPERATURE, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)
_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("top_k", -1, None),
    ("n", 1, MAX_N),
    ("min_tokens", 0, INTEGER_LIMIT - 1),
)
_OPTIONAL_INTEGERS = (
    ("max_tokens", 1, INTEGER_LIMIT - 1),
    ("seed", -INTEGER_LIMIT, INTEGER_LIMIT - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def _set(params: SamplingParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)


def checked_priority(value: Any) -> int:
    """value as a plain int of 64 bits. Raises RequestError."""
    return checked_integer("priority", value, -INTEGER_LIMIT, INTEGER_LIMIT - 1)


def checked_salt(value: Any) -> str:
    """value as a plain str of bounded length. Raises RequestError."""
    return checked_text("salt", value, MAX_SALT_LENGTH)


@dataclass(slots=True)
class Request:
    """One stream of tokens to generate. Ids are the engine's own; a client's name for it never enters here.

    prompt    token ids, at least one.
    eos       ids that end the answer unless params.ignore_eos.
    priority  smaller is more important; arrival order breaks ties. 64 bits.
    salt      keeps prefix-cache entries of different users apart; at most MAX_SALT_LENGTH characters.
    fork_of   id of the first of n siblings, whose prompt KV this one may share; None for the first.
    client    who asks, an opaque name: those who wait take turns by client.
    bundle    an opaque name for what its client asked for at once, "": this alone. A client's bundles take turns, too.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    eos: Collection[int] = ()
    priority: int = 0
    salt: str = ""
    fork_of: str | None = None
    arrival_s: float = 0.0
    client: str = ""
    bundle: str = ""

    def __post_init__(self) -> None:
        """Raises RequestError for a priority, salt or name that could harm others: it is compared with theirs."""
        self.priority = checked_priority(self.priority)
        self.client = checked_text("client", self.client, MAX_SALT_LENGTH)
        self.bundle = checked_text("bundle", self.bundle, MAX_SALT_LENGTH)
        self.salt = checked_salt(self.salt)

    def check(self, num_logits: int, max_length: int) -> None:
        """Raise RequestError if the request is ill-formed for a model with num_logits ids and max_length positions."""
        if not self.prompt:
            raise RequestError("the prompt is empty; at least one token is needed.", param="prompt")
        low, high = min(self.prompt), max(self.prompt)
        if low < 0 or high >= num_logits:
            raise RequestError(
                f"the prompt holds token id {show(low if low < 0 else high)}; "
                f"this model's ids are 0..{num_logits - 1}.",
                param="prompt",
            )
        wanted = self.params.max_tokens or 1
        if len(self.prompt) + wanted > max_length:
            raise ContextLengthError(
                f"the prompt has {len(self.prompt)} tokens and {wanted} more may be generated, together "
                f"{len(self.prompt) + wanted}; the context limit is {max_length}.",
                param="prompt" if len(self.prompt) >= max_length else "max_tokens",
                hint="shorten the prompt or lower max_tokens.",
            )
        self.params.check_vocabulary(num_logits)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token's own, its rank (1 is best), and the best alternatives.

    logprob is None for the first prompt token, which nothing precedes.
    """

    token: int
    logprob: float | None
    rank: int
    top: tuple[tuple[int, float], ...]


class Change(NamedTuple):
    """News about one request after one step: what the planner's commit returns and what crosses to the front end.

    tokens          ids that came home in this step, end-of-sequence included.
    finish          None while it runs on.
    logprobs        one entry a token in tokens, if asked for.
    prompt_logprobs entries for prompt positions computed in this step, in order, if asked for.
    error           the message of a failure, with finish "error".
    cached          prompt tokens that came from the prefix cache; set in the first change.
    code            with an error: the RequestError's code if the request was at fault, else None.
    """

    request: str
    tokens: Sequence[int] = ()
    finish: FinishReason | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    error: str | None = None
    cached: int = 0
    code: str | None = None


@dataclass(slots=True)
class Completion:
    """One finished answer. token_ids includes the end-of-sequence token; text does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    stop: str | int | None = None


@dataclass(slots=True)
class Result:
    """All n answers to one prompt, or the error that ended it."""

    prompt: str | None
    prompt_token_ids: Sequence[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error: RequestError | None = None
