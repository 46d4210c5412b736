"""AsyncEngine: requests in, async streams out, over a loop in a process of its own or on a thread of this one.

It knows event loops; it knows neither HTTP nor how a step is computed. Everything but encoding long texts happens on
the event loop that started it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

from tandem.config import Settings
from tandem.engine.contract import Card, Host
from tandem.engine.frontend import FrontEnd
from tandem.engine.hosting import settings_of, start_host
from tandem.engine.process import EXIT_S, MAKE
from tandem.engine.relay import Relay
from tandem.engine.streams import AsyncStream
from tandem.errors import EngineDeadError, TandemError
from tandem.request import SamplingParams

DRAIN_POLL_S = 0.01


class AsyncEngine:
    """contract.Engine. Make one with ``await AsyncEngine.start(...)``; use it on that event loop.

        async with await AsyncEngine.start("Qwen/Qwen3-0.6B") as engine:
            async for update in await engine.submit("Hello", SamplingParams(max_tokens=32)):
                print(update.text, end="")

    card   what the engine is: name, limits, tokenizer, settings, banner.
    text   its tokenizer.
    """

    def __init__(self, host: Host, front: FrontEnd) -> None:
        self._host, self._front = host, front
        self.card: Card = front.card
        self.text = front.text
        self.max_length, self.num_logits = self.card.max_length, self.card.num_logits
        self._busy_s = time.perf_counter()
        self._closing = False
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="tandem-render")

    @classmethod
    async def start(
        cls, settings: Settings | str | None = None, *, in_process: bool = False,
        on_phase: Callable[[str], None] | None = None, make: str = MAKE, options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> "AsyncEngine":  # fmt: skip
        """Build an engine and wait until it is ready. Cancelling ends the start and leaves no process.

        settings     a Settings, or a model's name with single settings by name; None: the embedded model.
        in_process   run the loop on a thread of this process, not in one of its own.
        on_phase     told on the event loop what start-up is doing, one line at a time.
        make, options   see hosting.start_host.
        Raises SettingError, ModelError, WeightsError, DownloadError, DeviceMemoryError as if built here.
        """
        loop = asyncio.get_running_loop()
        relay = Relay(loop)
        phase = None if on_phase is None else (lambda text: _soon(loop, on_phase, text))
        host = start_host(
            settings_of(settings, fields), relay, in_process=in_process, on_phase=phase, make=make, options=options
        )
        ready = asyncio.wrap_future(host.ready)
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # it counts as seen when we are gone
        try:
            card = await asyncio.shield(ready)
            relay.front = await asyncio.to_thread(FrontEnd, card, host.send)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(host.close, 0.0))
            raise
        return cls(host, relay.front)

    async def submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, priority: int = 0, salt: str = "",
        client: str = "", bundle: str = "",
    ) -> AsyncStream:  # fmt: skip
        """Encode, check, expand n, hand over; see contract.Engine. client, bundle: see Request.

        Raises RequestError for what cannot be honoured, EngineDeadError once the engine has stopped. Ids inside are
        the engine's own, so two clients can never name the same request.
        """
        arrival_s = time.perf_counter()
        self._require_open()
        tokens = await self._front.encode_async(prompt) if isinstance(prompt, str) else None
        job = self._front.prepare(
            prompt, params, tokens=tokens, priority=priority, salt=salt, arrival_s=arrival_s, client=client,
            bundle=bundle,
        )  # fmt: skip
        self._require_open()
        if not self._front.num_live:
            self._busy_s = time.perf_counter()
        stream = AsyncStream(job, self._front)
        self._front.open(job, stream.inbox)
        return stream

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; long ones are encoded in a thread. Raises RequestError."""
        return await self._front.encode_async(text, add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
        executor: Executor | None = None, **options: Any,
    ) -> list[int]:  # fmt: skip
        """Token ids of a conversation, for ``submit``; options as chat.ChatTemplate.render. Raises RequestError.

        The template is rendered in a thread, the executor's if one is given: it is the model author's code and may be
        slow. Else one is rendered at a time: each holds the interpreter, and many would leave the event loop no turn.
        """
        render = partial(self._front.render, messages, tools, **options)
        text = await asyncio.get_running_loop().run_in_executor(executor or self._renderer, render)
        return await self._front.encode_async(text, add_special_tokens=False)

    async def update_weights(self, source: str) -> None:
        """Replace the weights by those of another model of the same shape: a folder, a hub id or a .gguf file.

        Requests that run finish on the old weights; those that come later wait and run on the new ones; the prefix
        cache is emptied between. No answer mixes both. If the new weights do not fit, the old ones go on working and
        the error is raised.
        """
        await self.call("reload", source)

    async def call(self, name: str, argument: str = "") -> Any:
        """Ask the loop for something between two steps: "metrics", "timeline", "trace", "account", "check"."""
        return await asyncio.wrap_future(self._host.call(name, argument))

    def statistics(self) -> dict[str, Any]:
        """Counters and gauges of loop, planner and cache as the engine last reported them (every 0.25 s and when it
        comes to rest), and the front end's own "open" answers."""
        return {**self._host.statistics, "open": self._front.num_live}

    @property
    def error(self) -> TandemError | None:
        return self._host.error

    @property
    def heard_s(self) -> float:
        """time.perf_counter of the last sign of progress, or of when there began to be work."""
        return max(self._host.heard_s, self._busy_s)

    @property
    def stalled_s(self) -> float:
        """For how long the engine has had work without a sign of progress; 0 when it has none.

        A step that never returns shows here and nowhere else.
        """
        return time.perf_counter() - self.heard_s if self._front.num_live else 0.0

    async def close(self, drain_s: float = 0.0, exit_s: float = EXIT_S) -> None:
        """See contract.Engine. Streams that are not done by then raise EngineDeadError. Idempotent.

        exit_s   behind that, how long the engine's process may take to end by itself before it is killed.
        """
        self._closing = True
        deadline_s = time.perf_counter() + drain_s
        while self._front.num_live and self.error is None and time.perf_counter() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        self._front.stopped(self.error)
        await asyncio.shield(asyncio.to_thread(self._host.close, exit_s))
        self._renderer.shutdown(wait=False, cancel_futures=True)
        self.text.close()

    def _require_open(self) -> None:
        if self.error is not None:
            raise EngineDeadError(self.error.what, hint=self.error.hint)
        if self._closing:
            raise EngineDeadError("the engine is closing and takes no more requests.")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _soon(loop: asyncio.AbstractEventLoop, on_phase: Callable[[str], None], text: str) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(on_phase, text)
