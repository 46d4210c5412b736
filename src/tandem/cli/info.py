"""Show version, machine, and the settings in force for a model, each with its reason.

It loads no weights: everything comes from the model's description and the machine.
"""

import argparse
import json
import sys

from tandem.bench.machine import machine_facts
from tandem.cli.options import add_settings, settings_of
from tandem.cli.progress import waiting

EPILOG = """
examples:
  tandem info                                  the embedded model on this machine
  tandem info --model Qwen/Qwen3-0.6B --max-num-seqs 64
  tandem info --json                           for scripts
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(parser)


def main(arguments: argparse.Namespace) -> int:
    from tandem.engine.build import describe

    with waiting() as screen:
        resolved, lines = describe(settings_of(arguments), screen.phase)
    machine = machine_facts()
    if arguments.json:
        json.dump({"machine": machine, **resolved.as_dict()}, sys.stdout, indent=1, default=str)
        print()
        return 0
    for name, value in machine.items():
        if value is not None:
            print(f"{name:<24} {value}")
    print()
    print("\n".join(lines))
    return 0
