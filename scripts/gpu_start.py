"""From the command to the first token, by phase: a model with random weights, one prompt of 200 tokens.

    python3 scripts/gpu_start.py llama-3.1-8b [--device cpu]

Run it on a fresh machine to have kernels compiled, and again to have them in Triton's cache. "Before" is what the
interpreter took until this file's first line.
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FIRST_LINE_S = time.time()
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))


def process_age_s() -> float:
    """Seconds since this process began, by Linux's own clock (proc_pid_stat(5), field 22)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def compiled_in_this_process() -> list[str]:
    """Grows with each kernel that is not found in Triton's cache from now on: its name and the seconds it took."""
    found: list[str] = []
    with suppress(ImportError, AttributeError):
        import triton

        def note(src: Any = None, times: Any = None, cache_hit: bool = True, **_: Any) -> None:
            if not cache_hit:
                found.append(f"{src.name} {times.total / 1e6:.2f}")

        triton.knobs.compilation.listener = note
    return found


def main(arguments: list[str]) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default=None)
    parser.add_argument("--longest", type=int, default=4096, help="most tokens of a request")
    asked = parser.parse_args(arguments)
    before_s = process_age_s() - (time.time() - FIRST_LINE_S)
    began_s = time.perf_counter()
    import torch  # noqa: F401

    imported_s = time.perf_counter()
    from tandem import LLM, SamplingParams

    compiled_here = compiled_in_this_process()
    chosen = {} if asked.device is None else {"device": asked.device}
    with LLM(model=asked.model, load_format="random", max_model_len=asked.longest, **chosen) as llm:
        built_s = time.perf_counter()
        llm.generate([[1, 2, 3, 4] * 50], SamplingParams(temperature=0.0, max_tokens=1))
        first_s, whole_s = time.perf_counter(), process_age_s()
        phases = {name: round(seconds, 2) for name, seconds in llm.card.phases_s.items()}
    print(f"{asked.model}: {whole_s:.1f} s from the process's start to the first token: before {before_s:.1f}, torch "
          f"{imported_s - began_s:.1f}, engine {built_s - imported_s:.1f} {phases}, "
          f"first token {first_s - built_s:.2f}; compiled in this process: {compiled_here or 'nothing'}")  # fmt: skip
    return whole_s


if __name__ == "__main__":
    main(sys.argv[1:])
