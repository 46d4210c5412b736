"""Answer a file of requests in the OpenAI batch format, one line for each.

An engine in a process of its own does the work, or any OpenAI-compatible server (--base-url). The output has a line for
each line of the input, in the order in which they are done; ids tell the input's line number. Run the same command
again after a kill or a full disk: what is done is not done again, and nothing is lost or doubled.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.bench.load_http import ConnectionLostError, HttpClient
from tandem.cli.options import add_cacert, add_settings, settings_of
from tandem.cli.progress import waiting
from tandem.config import Settings
from tandem.errors import SettingError
from tandem.serve.batch import Send, Speed, Tally, run_batch, sender_of

EPILOG = """
environment:
  OPENAI_API_KEY    sent to --base-url as a bearer key if set

examples:
  tandem batch in.jsonl -o out.jsonl
  tandem batch in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B --served-model-name qwen
  tandem batch in.jsonl -o out.jsonl --base-url http://127.0.0.1:8000

a line of the input:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}}
exit status: 0 when every line has its answer, be it an error; 1 when the run had to stop
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.jsonl", help="requests, one a line")
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT.jsonl", help="answers; an earlier run's is gone on with"
    )
    parser.add_argument("--base-url", metavar="URL", help="ask this server instead of an engine of our own")
    add_cacert(parser)
    parser.add_argument(
        "--served-model-name", action="append", default=[], metavar="NAME",
        help="name that the file's lines use for the model; may be given again (default: the model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at once (default: twice what the engine runs, or 64)"
    )
    add_settings(parser)


def main(arguments: argparse.Namespace) -> int:
    if arguments.concurrency is not None and arguments.concurrency < 1:
        raise SettingError(f"concurrency is {arguments.concurrency}; it must be at least 1.")
    given = settings_of(arguments)
    if arguments.base_url and (given or arguments.served_model_name):
        raise SettingError("--base-url has an engine of its own; settings of an engine do not go with it.")
    if arguments.cacert and not arguments.base_url:
        raise SettingError("--cacert is given, and no server to trust.", hint="give its --base-url, too.")
    with asyncio.Runner() as runner:
        tally = runner.run(_remote(arguments) if arguments.base_url else _local(arguments, given))
    earlier = f", {tally.earlier} of them by an earlier run" if tally.earlier else ""
    print(f"{tally.done} lines answered{earlier}; {tally.failed} with an error now", file=sys.stderr)
    return 0


async def _remote(arguments: argparse.Namespace) -> Tally:
    key = os.environ.get("OPENAI_API_KEY")
    client = HttpClient(arguments.base_url, {"Authorization": f"Bearer {key}"} if key else None, arguments.cacert)

    async def send(url: str, body: bytes) -> tuple[int, bytes]:
        parts: list[bytes] = []
        try:
            status = await client.request("POST", url, body, lambda data, now_s: parts.append(data))
        except ConnectionLostError as error:
            raise ConnectionError(str(error)) from error
        return status, b"".join(parts)

    try:
        return await _run(arguments, send, arguments.concurrency or 64)
    finally:
        await client.close()


async def _local(arguments: argparse.Namespace, given: dict[str, object]) -> Tally:
    from tandem.engine.engine import AsyncEngine
    from tandem.serve.accept import Limits
    from tandem.serve.app import create_app
    from tandem.serve.service import QueueLimits, Service

    with waiting() as screen:
        engine = await AsyncEngine.start(Settings.from_dict(dict(given)), on_phase=screen.phase)
    async with engine:
        names = tuple(arguments.served_model_name) or (engine.card.name,)
        limits = Limits(body_bytes=1 << 30, deadline_s=float(10**9), max_answers=4096)
        service = Service(engine, names, limits, QueueLimits(requests=None))
        rows = engine.card.settings.get("settings", {}).get("max_num_seqs") or 32
        return await _run(arguments, sender_of(create_app(service)), arguments.concurrency or 2 * rows)


async def _run(arguments: argparse.Namespace, send: Send, concurrency: int) -> Tally:
    with _bar() as show:
        return await run_batch(
            Path(arguments.input), Path(arguments.output), send, concurrency=concurrency, on_progress=show
        )


@contextmanager
def _bar() -> Iterator[Callable[[Tally], None]]:
    """A progress bar on a terminal's stderr; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda tally: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("lines"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[speed]:.0f} tokens/s, {task.fields[failed]} failed"),
    )  # fmt: skip
    speed = Speed()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("lines", total=None, speed=0.0, failed=0)

        def show(tally: Tally) -> None:
            progress.update(task, total=tally.total, completed=tally.done, speed=speed.of(tally), failed=tally.failed)

        yield show
