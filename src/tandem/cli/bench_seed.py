"""The experiment that tandem exists for: does the device wait for the host?

The same requests run with static batching and with 1, 2 and 3 steps in flight, on the same weights, kernels and cache.
Prints time, time a step, the device's active share and why it stood still; draws the timelines.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from tandem.bench.offline import lines_about_tokens
from tandem.bench.report import check_folder, free_folder, write_json
from tandem.bench.seed import SeedResult, run_seed, write_pictures
from tandem.cli.options import EXIT_ERROR, add_settings, count, settings_of
from tandem.observe.picture import can_draw
from tandem.observe.trace_file import write_trace

FOLDER, RESULT = "tandem-seed", "seed.json"
EPILOG = """
examples:
  tandem bench seed --model-config llama-3.1-8b                   32 requests, 256 tokens in, 8,192 out
  tandem bench seed --tokens 64 --batch 8 --prompt 32             a small one, with the embedded model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument("--model-config", metavar="NAME", help="a built-in shape with random weights, as llama-3.1-8b")
    group.add_argument("--tokens", type=count, metavar="N", help="new tokens a request (default: 8192, or what fits)")
    group.add_argument("--batch", type=count, default=32, metavar="N", help="requests (default: 32)")
    group.add_argument("--prompt", type=count, metavar="N", help="prompt tokens (default: 256, or what fits)")
    group.add_argument(
        "--depths",
        type=int,
        nargs="+",
        default=[0, 1, 2, 3],
        metavar="N",
        choices=range(5),
        help="steps in flight; 0: static batching (default: 0 1 2 3)",
    )
    group.add_argument(
        "--out", metavar="FOLDER",
        help="for seed.json, the pictures and trace files (default: tandem-seed, or with a number if that is taken)",
    )  # fmt: skip
    add_settings(parser, without=("max_num_seqs", "depth", "prefix_cache"))


def main(arguments: argparse.Namespace) -> int:
    named = {"model": arguments.model_config, "load_format": "random"} if arguments.model_config else {}
    folder = Path(arguments.out) if arguments.out else free_folder(FOLDER)
    check_folder(folder)
    if (folder / RESULT).exists():
        _say(f"note: {folder} holds an earlier result; files of the same names will be replaced")
    try:
        result = run_seed(
            {**settings_of(arguments), **named}, batch=arguments.batch, prompt=arguments.prompt, new=arguments.tokens,
            depths=sorted(set(arguments.depths)), on_phase=_say,
        )  # fmt: skip
    except BaseException:
        with suppress(OSError):  # it holds something
            folder.rmdir()
        raise
    print(f"{result.comparison.workload.name}")
    print(result.table())
    print("\n".join(lines_about_tokens(result.comparison)))
    if result.bandwidth is not None:
        print(f"copy bandwidth {result.bandwidth / 1e9:,.1f} GB/s; floor: all weights and cached tokens at that speed")
    else:
        print("no floor: this device copies nothing, or has no memory left to measure it with")
    _write(result, folder)
    return 0 if result.equal else EXIT_ERROR


def _write(result: SeedResult, folder: Path) -> None:
    """The files, each told."""
    write_json(folder / RESULT, "tandem " + " ".join(sys.argv[1:]), result.as_dict(), result.settings)
    written = [folder / RESULT]
    if can_draw():
        written += write_pictures(result, folder)
    else:
        _say('note: no pictures, for want of matplotlib: pip install "tandem-llm[plot]"')
    for run in result.comparison.runs:
        if run.timeline is not None:
            written.append(folder / f"{run.name.split(' (')[0]}-{run.timeline.depth}.trace.json")
            write_trace(run.timeline, written[-1])
    print("written:", *written, sep="\n  ")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
