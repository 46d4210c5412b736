"""Time of a pure decode step over models and batch sizes, beside the floor that memory bandwidth sets."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from tandem.bench.bandwidth import copy_bandwidth, step_bytes
from tandem.bench.bed import Bed
from tandem.bench.drive import Run
from tandem.bench.report import Cell, percent, table
from tandem.bench.workload import fixed
from tandem.observe.timeline import StepRecord

HEADER = (
    "model",
    "batch",
    "prompt → new",
    "floor ms",
    "step ms",
    "of floor",
    "p50 ms",
    "p99 ms",
    "tok/s",
    "device active",
    "host µs",
)


class DecodeFigure(NamedTuple):
    """One cell of the table.

    step_s   mean time from one decode step to the next, with the capture of graphs that fell within.
    p50_s    median of these: the context grows from step to step, so this is the time at the mean context.
    floor_s  see bandwidth.py, at the mean context.
    host_s   what the host plans, submits and settles for one, median, in seconds by part.
    """

    model: str
    batch: int
    prompt: int
    new: int
    floor_s: float
    step_s: float
    p50_s: float
    p99_s: float
    tokens_per_s: float
    device_active_share: float
    host_s: dict[str, float]


def default_lengths(batch: int) -> tuple[int, int]:
    """Prompt and new tokens for a batch size: short contexts for small batches, as in the project's targets."""
    return (256, 512) if batch <= 8 else (256, 2048) if batch <= 32 else (1024, 512)


def measure_decode(
    settings: Mapping[str, Any], models: Sequence[str | None], batches: Sequence[int], *, prompt: int | None = None,
    new: int | None = None, depth: int = 2, params: Any = None, on_phase: Callable[[str], None] = lambda text: None,
) -> tuple[list[DecodeFigure], list[dict[str, Any]]]:  # fmt: skip
    """Measure every model at every batch size; each model is built once. Returns figures, and settings by model."""
    figures, used = [], []
    bandwidth = 0.0
    for model in models:
        named = {"model": model} if model is not None else {}
        longest = max(sum(_lengths(batch, prompt, new)) for batch in batches)
        chosen = {"max_model_len": longest, **settings, **named}
        with Bed(chosen, max(batches), padded=False, depth=depth, on_phase=on_phase) as bed:
            device = bed.built.resolved.settings.device or "cpu"
            bandwidth = bandwidth or copy_bandwidth(device)
            used.append(bed.settings)
            for batch in batches:
                on_phase(f"{bed.built.source.name}: batch {batch}")
                figures.append(_measure(bed, batch, _lengths(batch, prompt, new), depth, params, bandwidth))
    return figures, used


def _lengths(batch: int, prompt: int | None, new: int | None) -> tuple[int, int]:
    usual = default_lengths(batch)
    return prompt or usual[0], new or usual[1]


def _measure(bed: Bed, batch: int, lengths: tuple[int, int], depth: int, params: Any, bandwidth: float) -> DecodeFigure:
    prompt, new = lengths
    workload = fixed(batch, prompt, new, bed.num_logits)
    bed.warm(workload, depth)
    options = {"params": params} if params is not None else {}
    run = bed.run(depth, workload, batch=batch, **options)
    times = sorted(decode_times(run, batch)) or [0.0]
    floor_s = step_bytes(bed.built, batch, prompt + new / 2) / bandwidth
    assert run.timeline is not None
    return DecodeFigure(
        bed.built.source.name, batch, prompt, new, floor_s, sum(times) / len(times), median(times),
        times[int(0.99 * len(times))], run.num_new_tokens / run.wall_s,
        run.timeline.numbers()["device_active_share"], host_parts(full_steps(run, batch)),
    )  # fmt: skip


def host_parts(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Median seconds that the host took to plan, submit and settle one of these steps, by part."""
    parts = {
        "plan": [r.planned_s - r.plan_began_s for r in steps], "submit": [r.submitted_s - r.planned_s for r in steps],
        "settle": [r.settled_s - r.host_home_s for r in steps],
    }  # fmt: skip
    return {name: median(times) if times else 0.0 for name, times in parts.items()}


def full_steps(run: Run, batch: int) -> list[StepRecord]:
    """The pure decode steps of the whole batch."""
    assert run.timeline is not None
    return [r for r in run.timeline.steps if r.num_decodes == r.num_spans == batch]


def decode_times(run: Run, batch: int) -> list[float]:
    """Seconds from the end of one full decode step on the device to the end of the next."""
    steps = full_steps(run, batch)
    return [b.computed_s - a.computed_s for a, b in pairwise(steps) if b.step == a.step + 1]


def decode_table(figures: Sequence[DecodeFigure]) -> str:
    rows: list[list[Cell]] = []
    for f in figures:
        over = f.step_s / f.floor_s if f.floor_s else None
        rows.append([
            f.model, f.batch, f"{f.prompt} → {f.new}", f.floor_s * 1e3, f.step_s * 1e3,
            None if over is None else f"{over:.2f} ×", f.p50_s * 1e3, f.p99_s * 1e3, f.tokens_per_s,
            percent(f.device_active_share), f"{sum(f.host_s.values()) * 1e6:.0f}",
        ])  # fmt: skip
    return table(HEADER, rows)
