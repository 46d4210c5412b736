"""Prompts in, updates out: what every front end does on its side of the border. It knows text; it does not know where
the loop runs, nor whether its callers await or block.

    submit                                        news of a step
    prompt ─encode─► ids ─check─► n requests      change ─► answer's output stream ─► update ─► the job's sink
"""

import contextlib
import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.engine.chat import ChatTemplate, require_template
from tandem.engine.contract import Abort, Add, Card, Mail, Update
from tandem.engine.output import OutputStream
from tandem.engine.text import Text
from tandem.errors import CapacityError, ContextLengthError, EngineDeadError, GrammarError, RequestError, TandemError
from tandem.plan import Changes, others_of
from tandem.request import Change, Request, SamplingParams
from tandem.values import INTEGER_LIMIT, is_integer, show

log = logging.getLogger("tandem.engine")
_BYTES = (bytes, bytearray, memoryview)


class Sink(Protocol):
    """Whoever reads one job's updates. Called where the news is routed; must be quick."""

    def feed(self, update: Update) -> None: ...

    def end(self, error: TandemError | None) -> None:
        """Called once, behind the last update."""


@dataclass(slots=True)
class Job:
    """What one user asked: n requests, and who reads their answers."""

    id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    requests: list[Request]
    sink: Sink | None = None
    live: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Answer:
    job: Job
    index: int
    output: OutputStream


class FrontEnd:
    """Makes jobs and routes news to them. Raises ModelError if tokenizer or chat template are broken.

    ``prepare`` and ``abandon`` may run on any thread. ``open``, ``abort``, ``news`` and ``stopped`` may run on
    different threads if each job is opened before its news can come, which ``open`` sees to.
    """

    def __init__(self, card: Card, send: Callable[[Mail], None]) -> None:
        self.card = card
        self.text = text_of(card)
        self._template = None
        if card.chat_template is not None:
            self._template = ChatTemplate(card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token)
        self._send = send
        self._numbers = itertools.count(1)
        self._answers: dict[str, _Answer] = {}
        self._abandoned: deque[Job] = deque()

    @property
    def num_live(self) -> int:
        """Requests that have not ended, each of n counted."""
        return len(self._answers)

    def prepare(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, tokens: list[int] | None = None,
        priority: int = 0, salt: str = "", arrival_s: float | None = None, client: str = "",
        bundle: str = "",
    ) -> Job:  # fmt: skip
        """Encode and check. Raises RequestError. The ids made here are the engine's own: no client's name enters.

        tokens   the prompt's ids, if it has been encoded already.       client, bundle   see Request.
        """
        arrival_s = time.perf_counter() if arrival_s is None else arrival_s
        params = checked_params(params)
        text = prompt if isinstance(prompt, str) else None
        if tokens is None:
            tokens = self.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        if params.stop and self.card.tokenizer_json is None:
            raise RequestError("stop strings need a tokenizer; this model has none.", param="stop")
        if params.top_k >= self.card.num_logits:
            params = dataclasses.replace(params, top_k=0)
        if params.min_tokens > self.card.max_length:
            raise RequestError(
                f"min_tokens is {params.min_tokens}; the context limit is {self.card.max_length}.", param="min_tokens"
            )
        number = f"{next(self._numbers):x}"
        eos = self.card.eos_ids
        first = Request(number, tokens, params, eos, priority, salt, None, arrival_s, client, bundle)
        first.check(self.card.num_logits, self.card.max_length)
        requests = [first]
        for index in range(1, params.n):
            own = dataclasses.replace(params, seed=sibling_seed(params.seed, index), prompt_logprobs=None)
            name = f"{number}.{index}"
            requests.append(Request(name, tokens, own, eos, priority, salt, number, arrival_s, client, bundle))
        return Job(number, text, tokens, requests)

    def encode(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError, ContextLengthError before the work if it is far too long."""
        if self.card.tokenizer_json is None:
            raise RequestError("this model has no tokenizer.", param="prompt", hint="give token ids.")
        return self.text.encode(prompt, add_special_tokens, max_tokens=self.card.max_length)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> list[int]:
        """Token ids of a conversation, by the model's template; options as ChatTemplate.render. Raises RequestError."""
        return self.encode(self.render(messages, tools, **options), add_special_tokens=False)

    async def encode_async(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """As encode; a long text is encoded in a thread."""
        if self.card.tokenizer_json is None:
            return self.encode(prompt)  # which refuses
        return await self.text.encode_async(prompt, add_special_tokens, max_tokens=self.card.max_length)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any) -> str:
        """The text of a conversation, by the model's template. Raises RequestError."""
        return require_template(self._template).render(messages, tools, **options)

    def check_chat(self, options: Mapping[str, Any]) -> None:
        """Raise RequestError if no conversation could be rendered with these options, whatever its messages."""
        require_template(self._template).check_options(**options)

    def open(self, job: Job, sink: Sink) -> None:
        """Hand a job over. Raises EngineDeadError, or RequestError if it cannot cross; nothing is kept then."""
        job.sink = sink
        for index, request in enumerate(job.requests):
            job.live[request.id] = index
            output = OutputStream(request.params, self.text, request.prompt, index)
            self._answers[request.id] = _Answer(job, index, output)
        sent: list[str] = []
        try:
            for request in job.requests:
                self._send(Add(request))
                sent.append(request.id)
        except BaseException:
            self._drop(job)
            for name in sent:  # its siblings would run on, unheard
                self._send_abort(name)
            raise
        job.requests = []  # the front end needs them no more

    def abort(self, job: Job) -> None:
        """Ask for the end of what still runs; each answer ends with an update that says "abort"."""
        for request in tuple(job.live):
            self._send_abort(request)

    def abandon(self, job: Job) -> None:
        """Nobody reads the job any more. It is ended with the next news, of which a live job always gets some.

        The garbage collector calls it, at any moment and inside of anything, so it takes no lock and sends nothing.
        """
        if job.live:
            self._abandoned.append(job)

    def news(self, changes: Sequence[Change]) -> None:
        """Route the changes of one step. A job whose text cannot be assembled fails alone."""
        while self._abandoned:
            self.abort(self._abandoned.popleft())
        if isinstance(changes, Changes):
            for request, token in zip(changes.requests, changes.tokens, strict=True):
                self._hear(request, token)
        for change in others_of(changes):
            self._hear(change.request, change)

    def _hear(self, request: str, news: Change | int) -> None:
        """A change, or one token more and nothing else."""
        answer = self._answers.get(request)
        if answer is None:
            return  # a stop string ended it here before the engine knew
        try:
            if isinstance(news, Change):
                if news.finish == "error":
                    del answer.job.live[request], self._answers[request]
                    self._fail(answer.job, error_of(news))
                else:
                    self._route(answer, request, answer.output.push(news), news.finish is not None)
            else:
                self._route(answer, request, answer.output.push_token(news), False)
        except Exception as error:
            log.exception("request %s failed on the way out", request)
            self._fail(answer.job, RequestError(f"the answer could not be assembled: {error}", code="internal_error"))

    def _route(self, answer: _Answer, request: str, update: Update | None, is_known: bool) -> None:
        """is_known: the engine knows that the request has ended, if it has."""
        job, sink = answer.job, answer.job.sink
        assert sink is not None
        if update is None:
            return
        if update.finish is not None:
            if not is_known:
                self._send_abort(request)  # a stop string
            del self._answers[request]
            del job.live[request]
        sink.feed(update)
        if not job.live:
            sink.end(None)

    def stopped(self, error: TandemError | None) -> None:
        """The engine has stopped: end every job."""
        reason = error or EngineDeadError("the engine was closed.")
        if not isinstance(reason, EngineDeadError):
            reason = EngineDeadError(reason.what, hint=reason.hint)
        self._abandoned.clear()
        for answer in tuple(self._answers.values()):
            if answer.job.live:
                self._drop(answer.job)
                self._end(answer.job, reason)

    def _fail(self, job: Job, error: TandemError) -> None:
        for request in tuple(job.live):
            self._send_abort(request)
        self._drop(job)
        self._end(job, error)

    def _end(self, job: Job, error: TandemError) -> None:
        if job.sink is not None:
            try:
                job.sink.end(error)
            except Exception:
                log.exception("a reader failed at its end")

    def _drop(self, job: Job) -> None:
        for request in job.live:
            self._answers.pop(request, None)
        job.live.clear()

    def _send_abort(self, request: str) -> None:
        with contextlib.suppress(EngineDeadError):  # it has ended already, and says so to everyone
            self._send(Abort(request))

    def check(self) -> None:
        """Assert that every answer belongs to a live job."""
        for name, answer in self._answers.items():
            assert name in answer.job.live, f"{name} is routed, but its job has ended"


def text_of(card: Card) -> Text:
    """The card's tokenizer; for a model without one, a tokenizer that knows no token and gives no text."""
    if card.tokenizer_json is None:
        return Text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
    return Text(card.tokenizer_json, bos_id=card.bos_id, eos_ids=card.eos_ids, add_bos=card.add_bos)


def token_ids(prompt: Any) -> list[int]:
    """A prompt given as ids (a sequence, or an array of any library), as a list of plain integers.

    Raises RequestError for anything else.
    """
    hint = "a prompt is a string or a sequence of token ids."
    values = prompt.tolist() if hasattr(prompt, "tolist") and not isinstance(prompt, _BYTES) else prompt
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray | memoryview):
        if isinstance(prompt, _BYTES):
            hint = "decode bytes to a string first."
        elif isinstance(prompt, Iterator):
            hint = "an iterator can be read only once; make a list of it."
        raise RequestError(f"the prompt is of type {type(prompt).__name__}: {show(prompt)}.", param="prompt", hint=hint)
    tokens = list(values)
    for place, token in enumerate(tokens):
        if type(token) is not int:
            if not is_integer(token):
                raise RequestError(f"the prompt holds {show(token)}, which is no token id.", param="prompt", hint=hint)
            tokens[place] = int(token)
    return tokens


def checked_params(params: Any) -> SamplingParams:
    """None is SamplingParams(). Raises RequestError for what is none."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"params is {show(params)}; it must be a SamplingParams.",
            param="params",
            hint="for example SamplingParams(max_tokens=32).",
        )
    return params


def sibling_seed(seed: int | None, index: int) -> int | None:
    """The seed of answer number index: seed + index, wrapped into the signed 64-bit range."""
    return None if seed is None else (seed + index + INTEGER_LIMIT) % (2 * INTEGER_LIMIT) - INTEGER_LIMIT


def error_of(change: Change) -> TandemError:
    """The error that a change with finish "error" tells of. A failure that was not the client's is "internal_error"."""
    what, _, hint = (change.error or "the request failed.").partition("\nhint: ")
    if change.code == "engine_dead":
        return EngineDeadError(what, hint=hint or None)
    for kind in (ContextLengthError, CapacityError, GrammarError):
        if change.code == kind.code:
            return kind(what, hint=hint or None)
    return RequestError(what, code=change.code or "internal_error", hint=hint or None)
