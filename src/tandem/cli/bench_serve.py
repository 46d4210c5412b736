"""Load an OpenAI-compatible server and measure what its clients get: TTFT, ITL, TPOT, E2E, goodput.

Works on any server with /v1/chat/completions or /v1/completions and streaming, so that peers can be measured alike.
Token counts are the server's usage; where it gives none, chunks are counted and the result says "estimated".
"""

import argparse
import asyncio
import os
import sys
from typing import Any

from tandem.bench import load_work
from tandem.bench.load_http import HttpClient
from tandem.bench.load_stream import Outcome
from tandem.bench.report import Cell, check_file, milliseconds, table, write_json
from tandem.bench.serve import SHARES, Load, figures, models_of, parse_slo, run_load
from tandem.bench.workload import parse_range
from tandem.cli.options import EXIT_ERROR, add_cacert
from tandem.errors import SettingError, TandemError

EPILOG = """
environment:
  OPENAI_API_KEY    sent as a bearer key if set

examples:
  tandem bench serve                                          8 at once on http://127.0.0.1:8000
  tandem bench serve --arrivals poisson --rate 4 --requests 200 --slo ttft=500 tpot=50
  tandem bench serve --arrivals bursty --rate 4 --burstiness 0.2
  tandem bench serve --file ShareGPT_V3.json --requests 500   lengths of answers from the file
  tandem bench serve --base-url http://127.0.0.1:8001 --model NAME --json peer.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="without /v1 (default: %(default)s)"
    )
    add_cacert(server)
    server.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    server.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="default: completions"
    )
    server.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="longest time of one request (default: 600)"
    )
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=int, default=64, metavar="N", help="how many are measured (default: 64)")
    load.add_argument("--warm-up", type=int, default=4, metavar="N", help="sent before, not measured (default: 4)")
    load.add_argument(
        "--arrivals", choices=load_work.KINDS, default="closed", help="default: closed, the next when one is done"
    )
    load.add_argument("--concurrency", type=int, default=8, metavar="N", help="at once in a closed loop (default: 8)")
    load.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="requests a second, poisson and bursty (default: 1)"
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=0.25,
        metavar="X",
        help="gamma shape of bursty: 1 is poisson, less is burstier (default: 0.25)",
    )
    load.add_argument(
        "--slo", nargs="+", default=[], metavar="NAME=MS", help="objectives for the goodput: ttft, tpot, itl, e2e in ms"
    )
    work = parser.add_argument_group("workload")
    work.add_argument("--prompt", default="256", metavar="N or N-M", help="words of random prompts (default: 256)")
    work.add_argument("--new", metavar="N or N-M", help="tokens of answers (default: 128; with --file: the file's)")
    work.add_argument(
        "--token-ids", metavar="N-M", help="random prompts of ids in this range, exactly as long as asked"
    )
    work.add_argument(
        "--file", metavar="PATH", help="prompts from ShareGPT-like JSON or from JSONL (prompt or messages)"
    )
    work.add_argument("--keep-eos", action="store_true", help="let answers end by themselves (no ignore_eos is sent)")
    work.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default: 0")
    work.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, words and arrivals (default: 0)")
    parser.add_argument("--json", metavar="PATH", help="write all figures, the load and the machine there")


def main(arguments: argparse.Namespace) -> int:
    for name in ("requests", "concurrency", "rate", "burstiness", "timeout"):
        if not getattr(arguments, name) > 0:
            raise SettingError(f"{name} is {getattr(arguments, name)}; it must be above 0.")
    if arguments.json:
        check_file(arguments.json)
    load = Load(
        arguments.arrivals, arguments.rate, arguments.burstiness, arguments.concurrency, max(0, arguments.warm_up),
        arguments.timeout, arguments.seed, parse_slo(arguments.slo),
    )  # fmt: skip
    key = os.environ.get("OPENAI_API_KEY")
    client = HttpClient(arguments.base_url, {"Authorization": f"Bearer {key}"} if key else None, arguments.cacert)
    with asyncio.Runner(loop_factory=quick_loop()) as runner:
        outcomes, model = runner.run(_run(client, arguments, load))
    found = figures(outcomes, load)
    print("\n".join(lines(found)))
    if arguments.json:
        used = {name: value for name, value in vars(arguments).items() if name != "json"} | {"model": model}
        write_json(arguments.json, "tandem " + " ".join(sys.argv[1:]), found, used)
    return 0 if found["completed"] else EXIT_ERROR


def quick_loop() -> Any:
    """uvloop's maker of event loops."""
    import uvloop

    return uvloop.new_event_loop


async def _run(client: HttpClient, arguments: argparse.Namespace, load: Load) -> tuple[list[Outcome], str]:
    model = arguments.model
    if model is None:
        names = await models_of(client)
        if not names:
            raise TandemError("the server names no model.", hint="name one with --model.")
        model = names[0]
    asks = asks_of(arguments, model)
    try:
        with _progress(len(asks)) as on_done:
            return await run_load(client, asks, load, on_done), model
    except ExceptionGroup as errors:
        told = errors.subgroup(TandemError)
        raise told.exceptions[0] if told else errors from None
    finally:
        await client.close()


def asks_of(arguments: argparse.Namespace, model: str) -> list[load_work.Ask]:
    extra: dict[str, Any] = {"model": model, "temperature": arguments.temperature}
    if not arguments.keep_eos:
        extra["ignore_eos"] = True
    chat, new = arguments.endpoint == "chat", parse_range(arguments.new) if arguments.new else None
    if arguments.file:
        return load_work.file_asks(arguments.file, arguments.requests, chat, new, arguments.seed, extra)
    ids = parse_range(arguments.token_ids) if arguments.token_ids else None
    return load_work.random_asks(
        arguments.requests, chat, parse_range(arguments.prompt), new or (128, 128), arguments.seed, ids, extra
    )


class _progress:  # noqa: N801  (used as a context manager, like a function)
    """A bar on a terminal's stderr; nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Any = None

    def __enter__(self) -> Any:
        if not sys.stderr.isatty():
            return lambda outcome: None
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._bar.start()
        task = self._bar.add_task("requests", total=self._total)
        return lambda outcome: self._bar.advance(task)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def lines(found: dict[str, Any]) -> list[str]:
    """The figures for people."""
    flag = " (estimated: the server gave no usage)" if found["output_tokens_estimated"] else ""
    asked, speed, whole = (found[f"{name}_per_s"] for name in ("requests", "output_tokens", "total_tokens"))
    shown = [
        f"requests          {found['completed']} completed, {found['failed']} failed, in {found['duration_s']:.2f} s",
        f"output tokens     {found['output_tokens']:,}{flag}, prompt tokens {found['prompt_tokens']:,}",
        f"rates             {asked:.2f} requests/s, {speed:.1f} output tokens/s, {whole:.1f} tokens/s in all",
    ]
    if found["tokens_per_chunk"] >= 1.5:
        shown.append(
            f"chunks            {found['tokens_per_chunk']:.2f} tokens each; ITL shares a chunk's gap out among them"
        )
    if "goodput" in found:
        good = found["goodput"]
        limits = ", ".join(f"{name} ≤ {limit * 1e3:g} ms" for name, limit in good["slo_s"].items())
        shown.append(f"goodput           {good['requests_per_s']:.2f} requests/s, {good['share']:.1%} met {limits}")
    shown += [f"failed            {count} x {error}" for error, count in found["errors"].items()]
    names = {"ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT", "e2e_s": "E2E", "late_s": "sent late"}
    columns = ("mean", *(f"p{share}" for share in SHARES), "max")
    rows: list[list[Cell]] = [
        [f"{title}, ms", *(milliseconds(found[name].get(column)) for column in columns)]
        for name, title in names.items()
    ]
    return [*shown, "", table(("", *columns), rows)]
