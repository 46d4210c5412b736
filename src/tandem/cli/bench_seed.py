"""The experiment that tandem exists for: does the device wait for the host?

The same requests run with static batching and with 1, 2 and 3 steps in flight, on the same weights, kernels and cache.
Prints time, time a step, the device's active share and why it stood still; draws the timelines.
"""

import argparse
import sys
from pathlib import Path

from tandem.bench.offline import lines_about_tokens
from tandem.bench.report import write_json
from tandem.bench.seed import run_seed, write_pictures
from tandem.cli.options import EXIT_ERROR, add_settings, count, settings_of
from tandem.observe.picture import can_draw
from tandem.observe.trace_file import write_trace

EPILOG = """
examples:
  tandem bench seed --model-config llama-3.1-8b                   32 requests, 256 tokens in, 8,192 out
  tandem bench seed --tokens 64 --batch 8 --prompt 32             a small one, with the embedded model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument("--model-config", metavar="NAME", help="a built-in shape with random weights, as llama-3.1-8b")
    group.add_argument("--tokens", type=count, default=8192, metavar="N", help="new tokens a request (default: 8192)")
    group.add_argument("--batch", type=count, default=32, metavar="N", help="requests (default: 32)")
    group.add_argument("--prompt", type=count, default=256, metavar="N", help="prompt tokens (default: 256)")
    group.add_argument(
        "--depths",
        type=int,
        nargs="+",
        default=[0, 1, 2, 3],
        metavar="N",
        choices=range(5),
        help="steps in flight; 0: static batching (default: 0 1 2 3)",
    )
    group.add_argument("--out", metavar="FOLDER", help="write seed.json, the pictures and trace files there")
    add_settings(parser, without=("max_num_seqs", "depth", "prefix_cache"))


def main(arguments: argparse.Namespace) -> int:
    named = {"model": arguments.model_config, "load_format": "random"} if arguments.model_config else {}
    result = run_seed(
        {**settings_of(arguments), **named}, batch=arguments.batch, prompt=arguments.prompt, new=arguments.tokens,
        depths=sorted(set(arguments.depths)), on_phase=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(f"{result.comparison.workload.name}")
    print(result.table())
    print("\n".join(lines_about_tokens(result.comparison)))
    print(f"copy bandwidth {result.bandwidth / 1e9:,.1f} GB/s; floor: all weights and cached tokens at that speed")
    if arguments.out:
        folder = Path(arguments.out)
        write_json(folder / "seed.json", "tandem " + " ".join(sys.argv[1:]), result.as_dict(), result.settings)
        if can_draw():
            print(*write_pictures(result, folder), sep="\n")
        else:
            print('note: no pictures, for want of matplotlib: pip install "tandem-llm[plot]"', file=sys.stderr)
        for run in result.comparison.runs:
            if run.timeline is not None:
                write_trace(run.timeline, folder / f"{run.name.split(' (')[0]}-{run.timeline.depth}.trace.json")
    return 0 if result.equal else EXIT_ERROR
