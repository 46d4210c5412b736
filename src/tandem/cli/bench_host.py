"""Measure what the host costs a step: plan, submit, collect, and commit with delivery, in microseconds.

The device does nothing and answers at once, so everything that is seen is the host's. Medians of pure decode steps.
"""

import argparse
import sys
from typing import Any

from tandem.bench.host import HostFigure, measure_host
from tandem.bench.report import Cell, check_file, table, write_json
from tandem.cli.options import add_settings, count, settings_of

EPILOG = """
examples:
  tandem bench host
  tandem bench host --batch 256 --waiting 0 50000 --json host.json
"""
HEADER = (
    "batch",
    "waiting",
    "plan µs",
    "submit µs",
    "collect µs",
    "commit+deliver µs",
    "sum µs",
    "p99 µs",
    "observers µs",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--batch",
        type=count,
        nargs="+",
        default=[32, 256, 1024],
        metavar="N",
        help="decoding requests (default: 32 256 1024)",
    )
    group.add_argument(
        "--waiting",
        type=int,
        nargs="+",
        default=[0, 50000],
        metavar="N",
        help="requests in the queue (default: 0 50000)",
    )
    group.add_argument("--steps", type=count, default=300, metavar="N", help="steps to measure (default: 300)")
    group.add_argument("--json", metavar="PATH", help="write all figures, settings and the machine there")
    add_settings(parser, without=("device", "max_num_seqs", "max_waiting", "max_model_len", "kv_cache_memory"))


def main(arguments: argparse.Namespace) -> int:
    if arguments.json:
        check_file(arguments.json)
    settings = settings_of(arguments)
    figures: list[HostFigure] = []
    used: dict[str, Any] = {}
    for batch in arguments.batch:
        for waiting in arguments.waiting:
            print(f"batch {batch}, {waiting} waiting", file=sys.stderr, flush=True)
            figure, used = measure_host(settings, batch, waiting, num_steps=arguments.steps)
            figures.append(figure)
    rows: list[list[Cell]] = [
        [
            str(f.batch),
            f.waiting,
            f.plan_us,
            f.submit_us,
            f.collect_us,
            f.settle_us,
            f.total_us,
            f.p99_us,
            f.observers_us,
        ]
        for f in figures
    ]
    print(table(HEADER, rows))
    if arguments.json:
        results = {"figures": [figure._asdict() for figure in figures]}
        write_json(arguments.json, "tandem " + " ".join(sys.argv[1:]), results, used)
    return 0
