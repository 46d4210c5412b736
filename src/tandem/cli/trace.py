"""Record host and device over time while a small workload runs.

Writes timeline.json (for ui.perfetto.dev or chrome://tracing) and timeline.png, and prints the figures: the device's
active share, and its idle time by cause.
"""

import argparse
import sys
from pathlib import Path

from tandem.bench.bed import Bed
from tandem.bench.machine import machine_facts
from tandem.bench.report import write_json
from tandem.bench.workload import fixed
from tandem.cli.options import add_settings, count, settings_of
from tandem.observe.picture import can_draw, write_picture
from tandem.observe.trace_file import write_trace

EPILOG = """
examples:
  tandem trace                                 8 requests, 32 tokens in, 32 out, at depth 2
  tandem trace --depth 1 --out before          the same, one step at a time
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--requests", type=count, default=8, metavar="N", help="requests at once (default: 8)")
    group.add_argument("--prompt", type=count, default=32, metavar="N", help="prompt tokens (default: 32)")
    group.add_argument("--new", type=count, default=32, metavar="N", help="new tokens (default: 32)")
    group.add_argument("--out", default=".", metavar="FOLDER", help="where the files go (default: here)")
    group.add_argument("--no-picture", action="store_true", help="no PNG, which needs matplotlib")
    group.add_argument(
        "--picture-steps", type=count, default=12, metavar="N", help="steps in the picture (default: 12)"
    )
    add_settings(parser, without=("max_num_seqs", "prefix_cache"))


def main(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments, max_model_len=arguments.prompt + arguments.new)
    depth = settings.pop("depth", 2)
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    picture = not arguments.no_picture and can_draw()
    if not picture and not arguments.no_picture:
        _say('note: no picture will be drawn, for want of matplotlib. To get it: pip install "tandem-llm[plot]"')
    with Bed(settings, arguments.requests, padded=False, depth=depth, on_phase=_say) as bed:
        workload = fixed(arguments.requests, arguments.prompt, arguments.new, bed.num_known)
        bed.warm(workload, depth)
        run = bed.run(depth, workload)
        resolved = bed.settings
    timeline = run.timeline
    assert timeline is not None
    print("\n".join(timeline.lines()))
    write_trace(timeline, folder / "timeline.json", machine=machine_facts(), figures=timeline.numbers())
    print(folder / "timeline.json")
    if picture:
        write_picture(timeline, folder / "timeline.png", title=workload.name, num_steps=arguments.picture_steps)
        print(folder / "timeline.png")
    write_json(folder / "timeline-figures.json", "tandem " + " ".join(sys.argv[1:]), run.as_dict(), resolved)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
