"""The border between an engine and whoever talks to it. It knows neither processes nor sockets nor HTTP.

front end (serve, LLM, CLI)                     engine (loop, planner, runner)
text, templates, stop strings                   token ids, blocks, steps
        │  Add(request) · Abort(id) · Call · Close      │
        ├──────────────────────────────────────────────►│   mail
        │◄──────────────────────────────────────────────┤   news: the changes of one step, in one message
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tandem.errors import TandemError
from tandem.request import Change, FinishReason, Request, SamplingParams, TokenLogprobs


class Add(NamedTuple):
    """Mail: take this request in."""

    request: Request


class Abort(NamedTuple):
    """Mail: end this request."""

    request: str


class Call(NamedTuple):
    """Mail: do something between two steps and answer. number names the answer; the argument is plain text."""

    number: int
    name: str
    argument: str = ""


class Close(NamedTuple):
    """Mail: collect what is in flight, plan nothing more, stop."""


Mail = Add | Abort | Call | Close


class Mailbox(Protocol):
    """The loop's end of the border. Called on the loop's thread; only ``wait`` blocks, however slow the readers."""

    def take(self) -> Sequence[Mail]:
        """All mail that has come, in order; empty if none has."""

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there is mail, or the time is over. May wake for nothing."""

    def deliver(self, changes: Sequence[Change]) -> None:
        """Send the changes of one step."""

    def answer(self, number: int, value: Any, error: TandemError | None) -> None:
        """Answer a Call: with a plain value, or with the error it raised."""

    def report(self, statistics: dict[str, Any]) -> None:
        """Send a snapshot; at the same time a sign of progress."""

    def stopped(self, error: TandemError | None) -> None:
        """The last word: the loop has stopped, of this error or because it was told to (None)."""


class Listener(Protocol):
    """The front end's end of the border. Called on one thread of the host's; must be quick."""

    def news(self, changes: Sequence[Change]) -> None: ...

    def stopped(self, error: TandemError | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Card:
    """What a front end must know of the engine it talks to. Plain data: it crosses the border once, at start.

    tokenizer_json  for tokenizers.Tokenizer.from_str; None: only token ids can be served, and no text comes back.
    max_length      positions of a request: prompt plus answer.
    num_logits      rows of the output matrix: the token ids that may be fed and biased.
    num_blocks      KV blocks in the pool, of block_size tokens each.
    add_bos         plain prompts begin with bos_id.
    chat_template   Jinja source, or None.
    defaults        sampling parameters that the model's generation_config.json recommends.
    settings        Resolved.as_dict(): settings, reasons, facts.
    lines           the banner: settings with reasons, memory, notes. phases_s: start-up phase → seconds.
    """

    name: str
    tokenizer_json: str | None
    max_length: int
    num_logits: int
    num_blocks: int
    block_size: int
    seed: int = 0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
    chat_template: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    phases_s: dict[str, float] = field(default_factory=dict)


class Host(Protocol):
    """Where a loop runs: a thread of this process, or a process of its own. Any thread may call it.

    ready   the card, once the loop is built; or the error that start-up met.
    """

    ready: "Future[Card]"

    @property
    def error(self) -> TandemError | None:
        """Why the engine is dead, or None."""

    @property
    def statistics(self) -> Mapping[str, Any]:
        """The loop's last report."""

    @property
    def heard_s(self) -> float:
        """time.perf_counter of the last sign of progress."""

    def send(self, mail: Mail) -> None:
        """Never blocks. Raises EngineDeadError once the engine has stopped."""

    def call(self, name: str, argument: str = "") -> "Future[Any]":
        """Have the loop do something between two steps. The future raises EngineDeadError if the engine stops."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the loop and give everything back; kill what does not obey in time. Idempotent."""


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

    It raises the request's error (RequestError), or EngineDeadError when the engine stops meanwhile. Whoever stops
    reading ends the request: by ``aclose`` (``async with`` does it), by cancelling the task that waits, or by dropping
    the stream.
    """

    id: str
    prompt_token_ids: Sequence[int]

    def __aiter__(self) -> AsyncIterator[Update]: ...

    async def __anext__(self) -> Update: ...

    def abort(self) -> None:
        """End it now; the iterator ends with finish "abort". Harmless when it has ended."""

    async def aclose(self) -> None:
        """End it now, and the iterator with it."""


class Engine(Protocol):
    """What the HTTP server and the Python API drive; an engine in a process of its own or in this one."""

    max_length: int
    num_logits: int

    async def submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, priority: int = 0, salt: str = ""
    ) -> Stream:
        """Encode off the loop, check, expand n, hand over. Raises RequestError; EngineDeadError once it has stopped."""

    def statistics(self) -> dict[str, Any]:
        """Counters and gauges of planner, cache and loop, as of the last step."""

    @property
    def error(self) -> TandemError | None:
        """Why it is dead, or None."""

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop taking requests, wait up to drain_s for those that run, end the others, give everything back."""
