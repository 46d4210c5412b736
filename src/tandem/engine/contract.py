"""The border between an engine and whoever talks to it. It knows neither processes nor sockets nor HTTP.

front end (serve, LLM, CLI)                     engine (loop, planner, runner)
text, templates, stop strings                   token ids, blocks, steps
        │  Add(request) · Abort(id)                     │
        ├──────────────────────────────────────────────►│   mail
        │◄──────────────────────────────────────────────┤   news: the changes of one step, in one message
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tandem.errors import TandemError
from tandem.request import FinishReason, Request, SamplingParams, TokenLogprobs


class Add(NamedTuple):
    """Mail: take this request in."""

    request: Request


class Abort(NamedTuple):
    """Mail: end this request."""

    request: str


Mail = Add | Abort


@dataclass(slots=True)
class Update:
    """What a consumer of one request's stream receives, once a step at most.

    index            which of the n answers.
    text             characters that are new and final: never a broken character, never part of a stop string.
    token_ids        ids that are new; their text may still be held back.
    logprobs         one entry a token in token_ids, if asked for.
    finish           set in the last update of this index, exactly once.
    stop             the stop string or token id that ended it, if one did.
    prompt_logprobs  in the first update of index 0, if asked for: one entry a prompt token.
    cached           prompt tokens taken from the prefix cache; valid from the first update on.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop: str | int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached: int = 0


class Stream(Protocol):
    """One submitted request: an async iterator of Updates that ends by itself behind the last finish.

    It raises the request's error (RequestError), or EngineDeadError when the engine stops meanwhile.
    """

    id: str
    prompt_token_ids: Sequence[int]

    def __aiter__(self) -> AsyncIterator[Update]: ...

    async def __anext__(self) -> Update: ...

    def abort(self) -> None:
        """End it now; the iterator ends with finish "abort". Harmless when it has ended."""


class Engine(Protocol):
    """What the HTTP server and the Python API drive; an engine in a process of its own or in this one."""

    max_length: int
    num_logits: int

    async def submit(
        self, prompt: str | Sequence[int], params: SamplingParams, *, priority: int = 0, salt: str = ""
    ) -> Stream:
        """Encode off the loop, check, expand n, hand over. Raises RequestError; EngineDeadError once it has stopped."""

    def statistics(self) -> dict[str, Any]:
        """Counters and gauges of planner, cache and loop, as of the last step."""

    @property
    def error(self) -> TandemError | None:
        """Why it is dead, or None."""

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop taking requests, wait up to drain_s for those that run, end the others, give everything back."""
