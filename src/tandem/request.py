"""What a user asks and what comes back, as plain data. It does not know how either is computed.

A *request* becomes one or more *sequences*: with ``n > 1`` the front end submits n requests whose
``fork_of`` names the first, so that everything behind it deals with one stream of tokens a request.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from tandem.errors import ContextLengthError, RequestError

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_N = 128
MAX_TEMPERATURE = 100.0
SEED_LIMIT = 2**63

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the answer must follow. kind: json_object, json_schema, regex, choice or grammar."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Defaults change nothing: the model's own distribution.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. repetition_penalty looks at prompt and
    output (as in CTRL, Keskar et al. 2019: positive logits divided, negative multiplied); presence_penalty and
    frequency_penalty look at the output alone (as in the OpenAI API). logit_bias: pairs (token id, bias).
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
        _require_number(self, "temperature", 0.0, MAX_TEMPERATURE)
        _require_integer(self, "top_k", -1, None)
        _require_number(self, "top_p", 0.0, 1.0, open_low=True)
        _require_number(self, "min_p", 0.0, 1.0)
        _require_number(self, "repetition_penalty", 0.0, MAX_TEMPERATURE, open_low=True)
        _require_number(self, "presence_penalty", -2.0, 2.0)
        _require_number(self, "frequency_penalty", -2.0, 2.0)
        _require_integer(self, "n", 1, MAX_N)
        _require_integer(self, "min_tokens", 0, None)
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                low, high = _OPTIONAL_RANGES[name]
                _require_integer(self, name, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}.", param="min_tokens"
            )
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings; the limit is {MAX_STOPS}.", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop holds {text!r}; each stop must be a non-empty string.", param="stop")
            if len(text) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"a stop string has {len(text)} characters; the limit is {MAX_STOP_LENGTH}.", param="stop"
                )
        for token in self.stop_token_ids:
            if not _is_integer(token):
                raise RequestError(f"stop_token_ids holds {token!r}, which is no integer.", param="stop_token_ids")

    def _check_bias(self) -> None:
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple((token, float(bias)) for token, bias in pairs))
        for token, bias in self.logit_bias:
            if not _is_integer(token):
                raise RequestError(f"logit_bias names {token!r}, which is no token id.", param="logit_bias")
            if not -100.0 <= bias <= 100.0:
                raise RequestError(
                    f"logit_bias gives token {token} a bias of {bias}; it must lie in -100..100.", param="logit_bias"
                )

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


_OPTIONAL_RANGES: dict[str, tuple[int, int | None]] = {
    "max_tokens": (1, None),
    "seed": (-SEED_LIMIT, SEED_LIMIT - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_number(params: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(params, name)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or value > high or value < low or (open_low and value == low):
        raise RequestError(
            f"{name} is {value!r}; it must be a number {'above' if open_low else 'from'} {low:g} up to {high:g}.",
            param=name,
        )


def _require_integer(params: SamplingParams, name: str, low: int, high: int | None) -> None:
    value = getattr(params, name)
    if not _is_integer(value) or value < low or (high is not None and value > high):
        span = f"from {low} up" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {value!r}; it must be an integer {span}.", param=name)


@dataclass(slots=True)
class Request:
    """One stream of tokens to generate. Ids are the engine's own; a client's name for it never enters here.

    prompt    token ids, at least one.
    eos       ids that end the answer unless params.ignore_eos.
    priority  smaller is more important; arrival order breaks ties.
    salt      keeps prefix-cache entries of different users apart.
    fork_of   id of the first of n siblings, whose prompt KV this one may share; None for the first.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    eos: Collection[int] = ()
    priority: int = 0
    salt: str = ""
    fork_of: str | None = None
    arrival_s: float = 0.0

    def check(self, num_logits: int, max_length: int) -> None:
        """Raise RequestError if the request is ill-formed for a model with num_logits ids and max_length positions."""
        if not self.prompt:
            raise RequestError("the prompt is empty; at least one token is needed.", param="prompt")
        low, high = min(self.prompt), max(self.prompt)
        if low < 0 or high >= num_logits:
            raise RequestError(
                f"the prompt holds token id {low if low < 0 else high}; this model's ids are 0..{num_logits - 1}.",
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
