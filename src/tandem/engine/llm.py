"""LLM: many prompts in, all answers out, in the calling process and thread. It knows no sockets and no event loops."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from types import FrameType, TracebackType
from typing import Any, Self

from tandem.config import Settings
from tandem.engine.build import make_loop
from tandem.engine.contract import Mail, Update
from tandem.engine.frontend import FrontEnd, Job, checked_params
from tandem.engine.mailbox import LocalMailbox
from tandem.engine.progress import Bar, NoBar, open_bar
from tandem.errors import EngineDeadError, RequestError, TandemError
from tandem.request import Change, Completion, Result, SamplingParams, checked_priority, checked_salt
from tandem.values import show

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """An engine for offline work.

        with LLM("Qwen/Qwen3-0.6B", max_num_seqs=64) as llm:
            for result in llm.generate(["Hello", "The sky is"], SamplingParams(max_tokens=32)):
                print(result.completions[0].text)

    model      a Hugging Face id, a folder, a .gguf file or a built-in shape; None: the embedded model.
    settings   fields of config.Settings. Raises SettingError, ModelError, WeightsError and the like.

    Sampling parameters default to SamplingParams(): the model's own distribution, temperature 1. What the model's
    authors recommend (generation_config.json) is in ``default_params()``, to be used on purpose.

    The loop turns in the thread that calls ``generate``; one call runs at a time.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.settings = Settings.from_dict({"model": model, **settings})
        self._mailbox = LocalMailbox(self)
        self._loop, self.card = make_loop(self.settings, self._mailbox, offline=True)
        self._front = FrontEnd(self.card, self._send)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def resolved(self) -> dict[str, Any]:
        """The settings in force, the reason for each, and the facts they came from."""
        return self.card.settings

    def lines(self) -> tuple[str, ...]:
        """The start banner: settings, memory, notes."""
        return self.card.lines

    def default_params(self, **changes: Any) -> SamplingParams:
        """Sampling parameters as the model's generation_config.json recommends them, with changes."""
        return SamplingParams.from_dict({**self.card.defaults, **changes})

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, progress: bool = True, priority: int = 0, salt: str = "",
    ) -> list[Result]:  # fmt: skip
        """Answer every prompt; the results are in the prompts' order.

        prompts   strings or token ids (sequences, or arrays of any library), or one of them alone.
        params    one for all, or one a prompt; None: SamplingParams().
        A prompt that cannot be honoured fails alone: its result has ``error`` set and no completions.
        Raises EngineDeadError if the engine fails, RequestError if the call itself is wrong: no prompts at all,
        params and prompts do not match in number, priority is no integer, salt no string.
        """
        return self._generate(_several(prompts), params, progress, priority, salt)

    def _generate(self, several: list[Any], params: Any, progress: bool, priority: int, salt: str) -> list[Result]:
        chosen = _params_for(params, len(several))
        priority, salt = checked_priority(priority), checked_salt(salt)
        with self._lock, open_bar(len(several) if progress else 0) as bar:
            gatherers = [_Gatherer(bar) for _ in several]
            jobs: list[Job] = []
            try:
                for gatherer, prompt, own in zip(gatherers, several, chosen, strict=True):
                    self._submit(jobs, gatherer, prompt, own, priority, salt)
                self._turn_until_done()
            except BaseException:
                self._abandon(jobs)
                raise
        return [gatherer.result for gatherer in gatherers]

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, progress: bool = True, priority: int = 0, salt: str = "", **template: Any,
    ) -> list[Result]:  # fmt: skip
        """Answer one conversation or a list of them: each a list of {"role": …, "content": …}.

        template   passed to the chat template: tools, add_generation_prompt, continue_final_message, and whatever
                   else the template mentions (enable_thinking, documents …).
        A conversation that the template refuses fails alone. Raises RequestError if the model has no chat template,
        or if the call itself is wrong: no conversation at all, a name that the template does not know, or as generate.
        """
        self._front.check_chat(template)
        conversations = _conversations(messages)
        chosen = _params_for(params, len(conversations))
        refused: dict[int, Result] = {}
        prompts: list[Any] = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(self._front.encode_chat(conversation, **template))
            except RequestError as error:
                refused[index] = Result(None, (), [], error=error)
        accepted = [own for index, own in enumerate(chosen) if index not in refused]
        results = iter(self._generate(prompts, accepted, progress, priority, salt))
        return [refused[index] if index in refused else next(results) for index in range(len(conversations))]

    def _submit(
        self, jobs: list[Job], gatherer: "_Gatherer", prompt: Any, params: Any, priority: int, salt: str
    ) -> None:
        try:
            if params is None:
                raise RequestError("params holds None for this prompt.", param="params", hint="use SamplingParams().")
            job = self._front.prepare(prompt, params, priority=priority, salt=salt)
            gatherer.begin(job, params)
            self._front.open(job, gatherer)
            jobs.append(job)
        except RequestError as error:
            gatherer.refuse(prompt, error)

    def _turn_until_done(self) -> None:
        with interrupts_between_turns() as check:
            while self._front.num_live and self._loop.error is None:
                if not self._loop.turn():
                    self._mailbox.wait(0.0005)  # a grammar is being compiled
                check()
        if self._loop.error is not None:
            raise EngineDeadError(self._loop.error.what, hint=self._loop.error.hint)

    def _abandon(self, jobs: list[Job]) -> None:
        """Interrupted: end what runs, so that the next call finds an idle engine."""
        for job in jobs:
            self._front.abort(job)
        while self._front.num_live and self._loop.error is None:
            self._loop.turn()

    def _send(self, mail: Mail) -> None:
        if self._loop.error is not None:
            raise EngineDeadError(self._loop.error.what, hint=self._loop.error.hint)
        if self._closed:
            raise EngineDeadError("the engine is closed.")
        self._mailbox.put(mail)

    def news(self, changes: Sequence[Change]) -> None:
        self._front.news(changes)

    def stopped(self, error: TandemError | None) -> None:
        self._front.stopped(error)

    def update_weights(self, source: str) -> None:
        """Replace the weights by those of another model of the same shape: a folder, a hub id or a .gguf file.

        Nothing runs between two calls of ``generate``, so no answer mixes both; the prefix cache is emptied. If the
        new weights do not fit, the old ones go on working and the error is raised.
        """
        with self._lock:
            call, future = self._mailbox.calls.open("reload", source)
            self._send(call)
            while not future.done() and self._loop.error is None:
                self._loop.turn()
            future.result(timeout=0)

    def statistics(self) -> dict[str, Any]:
        """Counters and gauges of loop, planner and cache."""
        return self._loop.statistics()

    def close(self) -> None:
        """Give back threads and memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def interrupts_between_turns() -> Iterator[Callable[[], None]]:
    """Within, a Ctrl-C raises where the yielded function is called, not inside a turn, which would lose a step.

    A second one raises at once. Only the main thread gets signals; elsewhere, and where another handler is set,
    nothing changes.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    come = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if come.is_set():
            raise KeyboardInterrupt
        come.set()

    def check() -> None:
        if come.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Gatherer:
    """Collects one job's updates into a Result."""

    def __init__(self, bar: Bar | NoBar) -> None:
        self._bar = bar
        self.result = Result(None, (), [])

    def begin(self, job: Job, params: SamplingParams) -> None:
        self.result = Result(job.prompt, job.prompt_token_ids, [Completion(index) for index in range(params.n)])

    def refuse(self, prompt: Any, error: RequestError) -> None:
        """prompt: whatever it was; ids are kept as they were given."""
        text = prompt if isinstance(prompt, str) else None
        is_ids = text is None and isinstance(prompt, Sequence)
        self.result = Result(text, prompt if is_ids else (), [], error=error)
        self._bar.finish_one()

    def feed(self, update: Update) -> None:
        result = self.result
        answer = result.completions[update.index]
        answer.text += update.text
        answer.token_ids += update.token_ids
        if update.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + update.logprobs
        if update.prompt_logprobs is not None:
            result.prompt_logprobs = update.prompt_logprobs
        result.cached_tokens = max(result.cached_tokens, update.cached)
        answer.finish_reason, answer.stop = update.finish, update.stop
        self._bar.add_tokens(len(update.token_ids))

    def end(self, error: TandemError | None) -> None:
        if error is not None:
            self.result.completions = []
            self.result.error = error if isinstance(error, RequestError) else None
        self._bar.finish_one()


def _several(prompts: Any) -> list[Any]:
    """The prompts; one alone is a string or a flat sequence of numbers. Raises RequestError for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    items = prompts.tolist() if hasattr(prompts, "tolist") and not isinstance(prompts, memoryview) else prompts
    if not _is_list(items):
        raise RequestError(
            f"prompts is {show(prompts)}, of type {type(prompts).__name__}.",
            param="prompts",
            hint="give a string, a sequence of token ids, or a list of such prompts.",
        )
    several = list(items)
    is_flat = bool(several) and all(type(item) is int or isinstance(item, Number) for item in several)
    return [several] if is_flat else several


def _conversations(messages: Any) -> list[Any]:
    """The conversations; one alone is a list of messages. Raises RequestError for what is neither."""
    if not _is_list(messages):
        raise RequestError(
            f"messages is {show(messages)}, of type {type(messages).__name__}; it must be a list of messages.",
            param="messages",
            hint='write [{"role": "user", "content": "Hello"}], or use generate for plain text.',
        )
    several = list(messages)
    return [several] if several and isinstance(several[0], Mapping) else several


def _params_for(params: Any, count: int) -> list[Any]:
    """One for each of count prompts; what a list of them holds is checked prompt by prompt. Raises RequestError."""
    if params is None or isinstance(params, SamplingParams) or not _is_list(params):
        return [checked_params(params)] * count
    chosen = list(params)
    if len(chosen) != count:
        raise RequestError(f"there are {count} prompts and {len(chosen)} sampling parameters.", param="params")
    return chosen


def _is_list(value: Any) -> bool:
    """Whether it holds things in an order: a sequence or an iterator, but no text."""
    return isinstance(value, Sequence | Iterator) and not isinstance(value, str | bytes | bytearray | memoryview)
