"""Compare static, synchronous and tandem batching over the same requests and weights, in one process.

With --compare, transformers' continuous batching and padded generate, or llama.cpp, run the same lengths too. Answers
have full length unless --chat is given. The exit status is 1 if two of our own runs gave different greedy tokens.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from tandem.bench import offline
from tandem.bench.bed import STATIC, Bed
from tandem.bench.compare_llama import run_llama
from tandem.bench.machine import load_warning
from tandem.bench.report import check_file, write_json
from tandem.bench.workload import Workload, chat, chat_messages, fixed, parse_range, random_lengths
from tandem.cli.options import EXIT_ERROR, add_settings, count, settings_of
from tandem.errors import SettingError, TandemError
from tandem.observe.picture import can_draw

EPILOG = """
examples:
  tandem bench offline                                         32 requests, 64 tokens in, 64 out
  tandem bench offline --requests 1 8 32 --compare transformers
  tandem bench offline --requests 256 --prompt 100-1024 --new 100-1024 --model qwen3-0.6b --load-format random
  tandem bench offline --chat --new 64                         real chat prompts, which end by themselves
  tandem bench offline --compare llama.cpp --llama-batched-bench /path/to/llama-batched-bench --quantize int4
"""
PEERS = ("transformers", "llama.cpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--requests",
        type=count,
        nargs="+",
        default=[32],
        metavar="N",
        help="how many at once; several make a sweep (default: 32)",
    )
    group.add_argument("--prompt", default="64", metavar="N or N-M", help="prompt tokens (default: 64)")
    group.add_argument("--new", default="64", metavar="N or N-M", help="new tokens (default: 64)")
    group.add_argument("--chat", action="store_true", help="chat prompts instead of random ids, ending by themselves")
    group.add_argument("--workload-seed", type=int, default=0, metavar="N", help="of random.Random (default: 0)")
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--batch", type=count, default=None, metavar="N", help="most requests in a step (default: all, at most 256)"
    )
    group.add_argument(
        "--depths",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        metavar="N",
        help="steps in flight; 0: static batching (default: 0 1 2)",
    )
    group.add_argument(
        "--repeats", type=count, default=2, metavar="N", help="runs of each, the best counts (default: 2)"
    )
    group.add_argument(
        "--compare", choices=PEERS, action="append", default=[], help="a peer to run as well; may be given again"
    )
    group.add_argument(
        "--llama-batched-bench", default="llama-batched-bench", metavar="PATH", help="the program of llama.cpp"
    )
    group.add_argument("--json", metavar="PATH", help="write all figures, settings and the machine there")
    group.add_argument("--plot", metavar="PATH", help="draw the speeds into a PNG")
    add_settings(parser, without=("max_num_seqs", "depth", "prefix_cache"))


def main(arguments: argparse.Namespace) -> int:
    counts = sorted(set(arguments.requests))
    batch = arguments.batch or min(max(counts), 256)
    depths = sorted(set(arguments.depths))
    settings = settings_of(arguments, **_length(arguments))
    _check(arguments)
    for path in filter(None, (arguments.json, arguments.plot)):
        check_file(path)
    if arguments.plot and not can_draw():
        raise TandemError("matplotlib is not installed; --plot needs it.", hint='pip install "tandem-llm[plot]"')
    if warning := load_warning():
        _say(warning)
    with Bed(settings, batch, padded=STATIC in depths, depth=max(1, *depths), on_phase=_say) as bed:
        workloads = [_workload(arguments, number, bed) for number in counts]
        path = offline.weights_path(bed)
        if arguments.compare and path is None:
            raise SettingError("random weights exist here only; a peer needs a file or folder.", hint="give --model.")
        bed.warm(workloads[-1])
        options = {"eos": bed.built.source.eos_ids, "repeats": arguments.repeats}
        comparisons = [
            offline.compare_batching(bed, workload, depths, batch=min(batch, number), on_run=_say, **options)
            for workload, number in zip(workloads, counts, strict=True)
        ]
        resolved = bed.settings
    try:
        _run_peers(arguments, comparisons, path, resolved)
    except BaseException:  # what was measured until then is not thrown away
        _report(arguments, comparisons, resolved)
        raise
    return _report(arguments, comparisons, resolved)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse wrong usage before anything is loaded."""
    if not set(arguments.depths) <= {0, 1, 2, 3, 4}:
        raise SettingError(f"depths are {arguments.depths}; each must be from 0 to 4.")
    lengths = (*parse_range(arguments.prompt), *parse_range(arguments.new))
    fixed_lengths = lengths[0] == lengths[1] and lengths[2] == lengths[3] and not arguments.chat
    if "llama.cpp" in arguments.compare and not fixed_lengths:
        raise SettingError("llama-batched-bench computes fixed lengths.", hint="give --prompt N and --new N.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _length(arguments: argparse.Namespace) -> dict[str, Any]:
    """Room for the longest request, so that the cache is not larger than the workload needs. Chats: 512 more."""
    prompt, new = parse_range(arguments.prompt)[1], parse_range(arguments.new)[1]
    return {"max_model_len": new + (512 if arguments.chat else prompt)}


def _workload(arguments: argparse.Namespace, count: int, bed: Bed) -> Workload:
    prompt, new = parse_range(arguments.prompt), parse_range(arguments.new)
    if arguments.chat:
        return chat(encode_chats(bed, count, arguments.workload_seed), new[1])
    if prompt[0] == prompt[1] and new[0] == new[1]:
        return fixed(count, prompt[0], new[0], bed.num_known, arguments.workload_seed)
    return random_lengths(count, prompt, new, bed.num_known, arguments.workload_seed)


def encode_chats(bed: Bed, count: int, seed: int) -> list[list[int]]:
    """Chat prompts in the model's own template and tokens."""
    from tandem.engine.frontend import FrontEnd

    front = FrontEnd(bed.built.card(), lambda mail: None)
    return [front.encode_chat(messages) for messages in chat_messages(count, seed)]


def _run_peers(
    arguments: argparse.Namespace, comparisons: list[offline.Comparison], path: Path | None, resolved: dict[str, Any]
) -> None:
    settings = resolved["settings"]
    if "transformers" in arguments.compare and path is not None:
        from tandem.bench.compare_transformers import Transformers

        _say("loading the weights through transformers")
        peer = Transformers(path, settings["dtype"])
        for comparison in comparisons:
            offline.add_transformers(comparison, peer, arguments.repeats, _say)
    if "llama.cpp" in arguments.compare and path is not None:
        prompt, new = parse_range(arguments.prompt), parse_range(arguments.new)
        _say("running llama.cpp")
        counts = [len(comparison.workload.asked) for comparison in comparisons]
        figures = run_llama(
            arguments.llama_batched_bench, path, counts, prompt[0], new[0], settings["threads"], arguments.repeats
        )
        for comparison, figure in zip(comparisons, figures, strict=True):
            comparison.others["llama.cpp"] = figure.tokens_per_s


def _report(arguments: argparse.Namespace, comparisons: list[offline.Comparison], resolved: dict[str, Any]) -> int:
    chosen = resolved["settings"]
    name = chosen["model"] or ("null" if chosen["device"] == "null" else "embedded")
    for comparison in comparisons:
        print(f"\n{comparison.workload.name}, model {name}")
        print(offline.table_of(comparison))
        print("\n".join(offline.lines_about_tokens(comparison)))
    if len(comparisons) > 1 or arguments.compare:
        print("\nratios of tokens a second")
        print(offline.ratios_table(comparisons))
    if arguments.json:
        results = {"comparisons": [comparison.as_dict() for comparison in comparisons]}
        write_json(arguments.json, "tandem " + " ".join(sys.argv[1:]), results, resolved)
    if arguments.plot:
        from tandem.bench.plots import plot_speeds

        plot_speeds(comparisons, arguments.plot)
    own = {run.name for comparison in comparisons for run in comparison.own}
    unequal = any(num for c in comparisons for name, num in c.differing().items() if name in own)
    return EXIT_ERROR if unequal else 0
