"""BlockingEngine: requests in from any thread, iterators out, one a request. It knows threads, not event loops.

The host's thread routes each step's news into one backlog a stream and goes on; a reader takes only from its own, so
nobody waits for a slow one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tandem.config import Settings
from tandem.engine.contract import Card
from tandem.engine.frontend import FrontEnd
from tandem.engine.hosting import settings_of, start_host
from tandem.engine.process import MAKE
from tandem.engine.streams import BlockingStream
from tandem.errors import EngineDeadError, TandemError
from tandem.request import Change, SamplingParams

DRAIN_POLL_S = 0.01


class BlockingEngine:
    """An engine for programs made of threads.

        with BlockingEngine("Qwen/Qwen3-0.6B") as engine:
            for update in engine.submit("Hello", SamplingParams(max_tokens=32)):
                print(update.text, end="")

    settings     a Settings, or a model's name with single settings by name; None: the embedded model.
    in_process   run the loop on a thread of this process, not in one of its own.
    Raises what AsyncEngine.start raises.
    """

    def __init__(
        self, settings: Settings | str | None = None, *, in_process: bool = True,
        on_phase: Callable[[str], None] | None = None, make: str = MAKE, options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        self._front: FrontEnd | None = None
        self._closing = False
        self._host = start_host(
            settings_of(settings, fields), self, in_process=in_process, on_phase=on_phase, make=make, options=options
        )
        try:
            self.card: Card = self._host.ready.result()
            self._front = FrontEnd(self.card, self._host.send)
        except BaseException:
            self._host.close(0.0)
            raise
        self.text = self._front.text

    def submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, priority: int = 0, salt: str = ""
    ) -> BlockingStream:
        """Encode, check, expand n, hand over. Raises RequestError, EngineDeadError. Any thread may call it."""
        assert self._front is not None
        if self.error is not None or self._closing:
            what = self.error.what if self.error else "the engine is closing and takes no more requests."
            raise EngineDeadError(what)
        job = self._front.prepare(prompt, params, priority=priority, salt=salt)
        stream = BlockingStream(job, self._front)
        self._front.open(job, stream.inbox)
        return stream

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, for ``submit``; options as chat.ChatTemplate.render. Raises RequestError."""
        assert self._front is not None
        return self._front.encode_chat(messages, **options)

    def update_weights(self, source: str) -> None:
        """See AsyncEngine.update_weights."""
        self._host.call("reload", source).result()

    def call(self, name: str, argument: str = "", timeout_s: float | None = None) -> Any:
        """See AsyncEngine.call."""
        return self._host.call(name, argument).result(timeout_s)

    def statistics(self) -> dict[str, Any]:
        """See AsyncEngine.statistics."""
        return {**self._host.statistics, "open": self._front.num_live if self._front else 0}

    @property
    def error(self) -> TandemError | None:
        """Why the engine is dead, or None."""
        return self._host.error

    def news(self, changes: Sequence[Change]) -> None:
        if self._front is not None:
            self._front.news(changes)

    def stopped(self, error: TandemError | None) -> None:
        if self._front is not None:
            self._front.stopped(error)

    def close(self, drain_s: float = 0.0) -> None:
        """Stop taking requests, wait up to drain_s for those that run; the others' iterators raise. Idempotent."""
        self._closing = True
        deadline_s = time.monotonic() + drain_s
        while self._front and self._front.num_live and self.error is None and time.monotonic() < deadline_s:
            time.sleep(DRAIN_POLL_S)
        self.stopped(self.error)
        self._host.close()
        if self._front is not None:
            self._front.text.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
