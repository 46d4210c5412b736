"""Time a pure decode step over models and batch sizes, beside the floor that memory bandwidth sets.

floor = (weights once + each cached token once) / the bandwidth that a copy reaches on this device.
With --deterministic each step is measured without it, too, and the cost is printed in percent.
"""

import argparse
import sys

from tandem.bench.decode import decode_table, measure_decode
from tandem.bench.report import check_file, write_json
from tandem.cli.options import add_settings, count, settings_of
from tandem.request import SamplingParams

EPILOG = """
examples:
  tandem bench decode --models llama-3.1-8b qwen3-0.6b --batch 1 8 32 64 128 256 --load-format random
  tandem bench decode --batch 1 8 32 --prompt 64 --new 32          the embedded model
  tandem bench decode --deterministic                              what batch-invariant kernels cost
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--models", nargs="+", default=[None], metavar="MODEL", help="as --model; default: the embedded one"
    )
    group.add_argument(
        "--batch", type=count, nargs="+", default=[1, 8, 32], metavar="N", help="requests at once (default: 1 8 32)"
    )
    group.add_argument(
        "--prompt", type=count, metavar="N", help="prompt tokens (default: 256; 1024 for batches above 32)"
    )
    group.add_argument("--new", type=count, metavar="N", help="new tokens (default: 512; 2048 for batches of 9 to 32)")
    group.add_argument("--depth", type=int, default=2, choices=(1, 2, 3, 4), help="steps in flight (default: 2)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="as in tandem run (default: 1)")
    group.add_argument("--json", metavar="PATH", help="write all figures, settings and the machine there")
    add_settings(parser, without=("model", "max_num_seqs", "depth", "prefix_cache"))


def main(arguments: argparse.Namespace) -> int:
    params = SamplingParams(temperature=arguments.temperature, top_p=arguments.top_p)
    if arguments.json:
        check_file(arguments.json)
    figures, used = measure_decode(
        settings_of(arguments), arguments.models, sorted(set(arguments.batch)), prompt=arguments.prompt,
        new=arguments.new, depth=arguments.depth, params=params,
        on_phase=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(decode_table(figures))
    if arguments.json:
        results = {"figures": [figure._asdict() for figure in figures], "models": used}
        write_json(arguments.json, "tandem " + " ".join(sys.argv[1:]), results, used[0] if used else {})
    return 0
