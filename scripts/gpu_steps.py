"""Where the time of real steps goes on a GPU: kernel by kernel, beside the time from step to step without a profiler.

    python3 scripts/gpu_steps.py qwen3-0.6b:256x600 qwen3-0.6b:256x600:sampled qwen3-0.6b:4x8192:prefill

Each case is model:requests x prompt tokens; decode steps are looked at, or with ":prefill" those with prompts in them;
":sampled" draws at temperature 0.8 with top-p 0.95. A model is built once if its cases stand together. Prints the
largest kernels, the first and last of a step with the gaps between them, and what the host takes for a step; all
kernels go to $OUT/steps.json. --device cpu runs the same on a CPU, where no kernel is seen.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch

from tandem.bench.bed import Bed
from tandem.bench.decode import host_parts
from tandem.bench.drive import Run
from tandem.bench.workload import fixed
from tandem.observer import Observer
from tandem.plan import StepPlan
from tandem.request import SamplingParams

SETTLED, PROFILED, COMPARED = 16, 8, 40
LOOK = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
FIRST = ("_advance_kernel", "_spread_kernel")  # a step's first kernel of ours


class Profiler(Observer):
    """Has the profiler look at some steps of the kind asked for: begins behind ``settled``, ends ``profiled`` later."""

    def __init__(self, count: int, prefill: bool) -> None:
        self.count, self.prefill = count, prefill
        self.settled, self.profiled = (1, 2) if prefill else (SETTLED, PROFILED)
        self.seen = 0
        self.profile: Any = None
        self.stopped = False
        self.events: list[tuple[int, int, str]] = []

    def wants(self, plan: StepPlan) -> bool:
        return plan.num_decodes < len(plan.spans) if self.prefill else len(plan.spans) == self.count == plan.num_decodes

    def step_submitted(self, plan: StepPlan, began_s: float, planned_s: float, submitted_s: float) -> None:
        if not torch.cuda.is_available():
            return
        self.seen += self.wants(plan)
        if self.seen == self.settled and self.profile is None:
            torch.cuda.synchronize()
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profile.start()
        elif self.seen == self.settled + self.profiled:
            self.stop()

    def stop(self) -> None:
        """Stop looking, if it does. Idempotent."""
        if self.profile is not None and not self.stopped:
            self.stopped = True
            torch.cuda.synchronize()
            self.profile.stop()
            found = [e for e in self.profile.profiler.kineto_results.events() if str(e.device_type()).endswith("CUDA")]
            self.events = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in found)


def kernels_of(events: list[tuple[int, int, str]], num_steps: int) -> list[dict[str, Any]]:
    """Kernels by name, the most expensive first, µs."""
    times: dict[str, list[float]] = defaultdict(list)
    for first, last, name in events:
        times[name].append((last - first) / 1e3)
    found = [
        {"kernel": name[:90], "calls": len(each) / num_steps, "us": round(sum(each) / len(each), 2),
         "us_a_step": round(sum(each) / num_steps, 1)} for name, each in times.items()
    ]  # fmt: skip
    return sorted(found, key=lambda row: -row["us_a_step"])


def covered_us(events: list[tuple[int, int, str]]) -> float:
    """Time in which some kernel is at work."""
    covered, end = 0, 0
    for first, last, _ in events:
        covered += max(0, last - max(first, end))
        end = max(end, last)
    return covered / 1e3


def steps_of(events: list[tuple[int, int, str]]) -> list[list[tuple[int, int, str]]]:
    """Events by step: from one first kernel to the next."""
    starts = [place for place, (_, _, name) in enumerate(events) if name.startswith(FIRST)]
    return [events[a:b] for a, b in pairwise(starts)]


def print_ends(step: list[tuple[int, int, str]], ends: int = 9) -> None:
    """A step's first and last kernels, with the gap before each."""
    end = step[0][0]
    for place, (first, last, name) in enumerate(step):
        if place < ends or place >= len(step) - ends:
            took = f"{(last - first) / 1e3:8.2f} us  gap {(first - end) / 1e3:6.2f}"
            print(f"      at {(first - step[0][0]) / 1e3:9.1f}  {took}  {name[:70]}")
        end = max(end, last)


def run_case(bed: Bed, count: int, prompt: int, kinds: list[str]) -> tuple[Run, Profiler]:
    prefill = "prefill" in kinds
    profiler = Profiler(count, prefill)
    params = SamplingParams(temperature=0.8, top_p=0.95) if "sampled" in kinds else SamplingParams(temperature=0.0)
    workload = fixed(count, prompt, 1 if prefill else SETTLED + PROFILED + COMPARED + 8, bed.num_logits)
    run = bed.run(2, workload, params=params, observers=[profiler])
    profiler.stop()
    return run, profiler


def figures_of(run: Run, profiler: Profiler) -> dict[str, Any]:
    """Step time and host times of the steps that the profiler did not see, µs."""
    assert run.timeline is not None
    records = [r for r in run.timeline.steps if profiler.prefill or r.num_decodes == r.num_spans == profiler.count]
    apart = records[: profiler.settled] if profiler.prefill else records[SETTLED + PROFILED + 6 : -2]
    gaps = [b.computed_s - a.computed_s for a, b in pairwise(apart) if b.step == a.step + 1]
    if profiler.prefill:
        gaps = [r.computed_s - r.began_s for r in apart]
    parts = host_parts(apart)
    found = {f"{name}_us": round(seconds * 1e6, 1) for name, seconds in parts.items()}
    return {"step_us": median(gaps) * 1e6 if gaps else 0.0, **found}


def look_at(bed: Bed, case: str, count: int, prompt: int, kinds: list[str]) -> dict[str, Any]:
    if "prefill" in kinds:
        run_case(bed, count, prompt, kinds)  # compiles, and lets the library choose
    look = None
    with suppress(FileNotFoundError):
        look = subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={LOOK}", "--format=csv,noheader", "-lms", "250"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    run, profiler = run_case(bed, count, prompt, kinds)
    clocks: list[str] = []
    if look is not None:
        look.terminate()
        clocks = (look.communicate()[0] or "").strip().splitlines()
    events, num_steps = [e for e in profiler.events if e[1] > e[0]], profiler.profiled
    rows, figures = kernels_of(events, num_steps), figures_of(run, profiler)
    whole_us = (events[-1][1] - events[0][0]) / 1e3 / num_steps if events else 0.0
    busy_us, sum_us = covered_us(events) / num_steps, sum(row["us_a_step"] for row in rows)
    print(f"{case}: step {figures['step_us']:.0f} us; profiled {whole_us:.0f}, of it some kernel at work "
          f"{busy_us:.0f}, kernels' sum {sum_us:.0f}; host plan {figures['plan_us']:.0f}, submit "
          f"{figures['submit_us']:.0f}, settle {figures['settle_us']:.0f} us")  # fmt: skip
    for row in rows[:14]:
        print(f"   {row['us_a_step']:9.1f} = {row['calls']:6.1f} x {row['us']:8.2f}  {row['kernel'][:80]}")
    steps = steps_of(events)
    if steps:
        print_ends(steps[len(steps) // 2])
    if clocks:
        print("   sm, mem, W, C, reasons:", clocks[-1], flush=True)
    return {"case": case, **figures, "profiled_us": whole_us, "covered_us": busy_us, "kernels": rows, "clocks": clocks}


def main(arguments: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="MODEL:NxP[:KIND]")
    parser.add_argument("--rows", type=int, default=256, help="most requests in a step")
    parser.add_argument("--longest", type=int, default=8704, help="most tokens of a request")
    parser.add_argument("--device", default=None)
    asked = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    bed, last, out = None, "", Path(os.environ.get("OUT", "."))
    for case in asked.cases:
        model, shape, *kinds = case.split(":")
        count, prompt = (int(number) for number in shape.split("x"))
        if model != last:
            if bed is not None:
                bed.close()
            began_s = time.perf_counter()
            settings: dict[str, Any] = {"model": model, "load_format": "random", "max_model_len": asked.longest}
            if asked.device is not None:
                settings["device"] = asked.device
            bed = Bed(settings, asked.rows, padded=False)
            phases = {name: round(seconds, 2) for name, seconds in bed.built.phases_s.items()}
            print(f"{model} built in {time.perf_counter() - began_s:.1f} s: {phases}")
            print("   ", *bed.built.runner.facts.notes, sep="\n   ", flush=True)
            last = model
        assert bed is not None
        found.append(look_at(bed, case, count, prompt, kinds))
        (out / "steps.json").write_text(json.dumps(found, indent=0))
    if bed is not None:
        bed.close()
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
