"""Where the time of real steps goes on a GPU: kernel by kernel, beside the time from step to step without a profiler.

    python3 scripts/gpu_steps.py qwen3-0.6b:256x600 qwen3-0.6b:4x8192:prefill llama-3.1-8b:256x600

Each case is model:requests x prompt tokens; decode steps are looked at, or with ":prefill" those with prompts in them.
A model is built once if its cases stand together. Prints the largest kernels; all of them go to $OUT/steps.json.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict, deque
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch

from tandem.bench.bed import Bed
from tandem.bench.drive import SharedRunner, requests_of
from tandem.bench.workload import fixed
from tandem.request import SamplingParams

NEW, SETTLED, PROFILED = 72, 24, 8
LOOK = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


class Busy:
    """Kernels of the profiled stretch."""

    def __init__(self, profile: Any, num_steps: int) -> None:
        events = [e for e in profile.profiler.kineto_results.events() if str(e.device_type()).endswith("CUDA")]
        spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events if e.duration_ns())
        self.kernels: dict[str, list[float]] = defaultdict(list)
        self.covered_us, end = 0.0, 0
        for first, last, name in spans:
            self.kernels[name].append((last - first) / 1e3)
            self.covered_us += max(0, last - max(first, end)) / 1e3
            end = max(end, last)
        self.whole_us = (end - spans[0][0]) / 1e3 / num_steps if spans else 0.0
        self.covered_us /= num_steps
        self.num_steps = num_steps

    def rows(self) -> list[dict[str, Any]]:
        found = [
            {"kernel": name[:90], "calls": len(times) / self.num_steps, "us": round(sum(times) / len(times), 2),
             "us_a_step": round(sum(times) / self.num_steps, 1)} for name, times in self.kernels.items()
        ]  # fmt: skip
        return sorted(found, key=lambda row: -row["us_a_step"])


def step_times(bed: Bed, count: int, prompt: int, prefill: bool) -> tuple[list[float], Any, int]:
    """Run the requests; profile a few steps of the kind asked for. Returns the other steps' seconds and the profile."""
    planner, runner = bed._planner(2), SharedRunner(bed.built.runner, 2, bed._taken)
    workload = fixed(count, prompt, 1 if prefill else NEW, bed.num_logits)
    for request in requests_of(workload, SamplingParams(temperature=0.0)):
        planner.add(request)
    flight: deque[Any] = deque()
    ends, seen, profile, profiled = [], 0, None, 0
    settled, most = (0, 2) if prefill else (SETTLED, PROFILED)
    while not planner.idle:
        plan = planner.plan() if len(flight) < 2 else None
        if plan is not None:
            wanted = prefill or len(plan.spans) == count == plan.num_decodes
            if wanted and seen == settled and profile is None:
                torch.cuda.synchronize()
                profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                profile.start()
            seen += wanted
            profiled += profile is not None and profiled < most
            flight.append(runner.submit(plan))
            if profile is not None and profiled == most and profile.profiler is not None and seen == settled + most:
                torch.cuda.synchronize()
                profile.stop()
        if flight and (plan is None or len(flight) == 2):
            result = runner.collect(flight.popleft())
            planner.commit(result)
            ends.append(result.times.computed_s)
    bed._taken = runner.taken
    gaps = [b - a for a, b in pairwise(ends)]
    return (gaps[-2:] if prefill else gaps[-(NEW - SETTLED - PROFILED - 8) : -2]), profile, most


def main() -> None:
    found, bed, last = [], None, ""
    out = Path(os.environ.get("OUT", "."))
    for case in sys.argv[1:]:
        model, shape, *kind = case.split(":")
        count, prompt = (int(number) for number in shape.split("x"))
        if model != last:
            if bed is not None:
                bed.close()
            began_s = time.perf_counter()
            bed = Bed({"model": model, "load_format": "random", "max_model_len": 8704}, 256, padded=False)
            print(f"{model} built in {time.perf_counter() - began_s:.1f} s: {bed.built.phases_s}", flush=True)
            last = model
        assert bed is not None
        if kind:
            step_times(bed, count, prompt, True)  # compiles, and lets the library choose
        look = subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={LOOK}", "--format=csv,noheader", "-lms", "250"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with torch.inference_mode():
            times, profile, most = step_times(bed, count, prompt, bool(kind))
        look.terminate()
        busy, clocks = Busy(profile, most), (look.communicate()[0] or "").strip().splitlines()
        step_us = sorted(times)[len(times) // 2] * 1e6 if times else 0.0
        rows = busy.rows()
        found.append({"case": case, "step_us": step_us, "profiled_us": busy.whole_us, "covered_us": busy.covered_us,
                      "kernels": rows, "clocks": clocks})  # fmt: skip
        print(f"{case}: step {step_us:.0f} us, profiled {busy.whole_us:.0f}, of it some kernel at work "
              f"{busy.covered_us:.0f}, kernels' sum {sum(r['us_a_step'] for r in rows):.0f}")  # fmt: skip
        for row in rows[:16]:
            print(f"   {row['us_a_step']:9.1f} = {row['calls']:6.1f} x {row['us']:8.2f}  {row['kernel'][:80]}")
        print("   sm, mem, W, C, reasons:", *clocks[-3:], sep="\n      ", flush=True)
        (out / "steps.json").write_text(json.dumps(found, indent=0))
    if bed is not None:
        bed.close()


if __name__ == "__main__":
    main()
