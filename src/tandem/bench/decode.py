"""Time of a pure decode step over models and batch sizes, beside the floor that memory bandwidth sets."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from tandem.bench.bandwidth import copy_bandwidth, step_bytes
from tandem.bench.bed import Bed
from tandem.bench.drive import Run
from tandem.bench.lengths import Lengths
from tandem.bench.report import Cell, milliseconds, percent, table
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
    floor_s  see bandwidth.py, at the mean context; None where the bandwidth is unknown.
    note     why there are no times, which are None then: no two steps in a row decoded the whole batch.
    without_deterministic_s   step_s of the same without batch-invariant kernels, where deterministic was asked for.
    host_s   what the host plans, submits and settles for one, median, in seconds by part.
    """

    model: str
    batch: int
    prompt: int
    new: int
    floor_s: float | None
    step_s: float | None
    p50_s: float | None
    p99_s: float | None
    tokens_per_s: float
    device_active_share: float
    host_s: dict[str, float] | None
    note: str | None = None
    without_deterministic_s: float | None = None

    @property
    def deterministic_cost(self) -> float | None:
        """The share of time that determinism adds."""
        if self.step_s is None or not self.without_deterministic_s:
            return None
        return self.step_s / self.without_deterministic_s - 1.0


def default_lengths(batch: int) -> tuple[int, int]:
    """Prompt and new tokens for a batch size: short contexts for small batches, as in the project's targets."""
    return (256, 512) if batch <= 8 else (256, 2048) if batch <= 32 else (1024, 512)


def measure_decode(
    settings: Mapping[str, Any], models: Sequence[str | None], batches: Sequence[int], *, prompt: int | None = None,
    new: int | None = None, depth: int = 2, params: Any = None, on_phase: Callable[[str], None] = lambda text: None,
) -> tuple[list[DecodeFigure], list[dict[str, Any]]]:  # fmt: skip
    """Measure every model at every batch size; each model is built once. Returns figures, and settings by model.

    With deterministic in the settings each model is measured without it first, for the figures' comparison.
    """
    figures: list[DecodeFigure] = []
    used = []
    for model in models:
        chosen = {**settings, **({"model": model} if model is not None else {})}
        room = Lengths(chosen, on_phase=on_phase)
        lengths = [(batch, *room.fit(prompt, new, default_lengths(batch))) for batch in batches]
        chosen = {"max_model_len": max(prompt + new for _, prompt, new in lengths), **chosen}
        plain: list[DecodeFigure] = []
        if settings.get("deterministic"):
            plain, _ = _measure_model({**chosen, "deterministic": False}, lengths, depth, params, on_phase)
        found, resolved = _measure_model(chosen, lengths, depth, params, on_phase)
        for index, figure in enumerate(plain):
            found[index] = found[index]._replace(without_deterministic_s=figure.step_s)
        figures += found
        used.append(resolved)
    return figures, used


def _measure_model(
    settings: Mapping[str, Any], lengths: Sequence[tuple[int, int, int]], depth: int, params: Any,
    on_phase: Callable[[str], None],
) -> tuple[list[DecodeFigure], dict[str, Any]]:  # fmt: skip
    with Bed(settings, max(batch for batch, *_ in lengths), padded=False, depth=depth, on_phase=on_phase) as bed:
        bandwidth = copy_bandwidth(bed.built.resolved.settings.device or "cpu")
        figures = []
        kernels = ", deterministic" if settings.get("deterministic") else ""
        for batch, prompt, new in lengths:
            on_phase(f"{bed.built.source.name}: batch {batch}{kernels}")
            figures.append(_measure(bed, batch, (prompt, new), depth, params, bandwidth))
        return figures, bed.settings


def _measure(
    bed: Bed, batch: int, lengths: tuple[int, int], depth: int, params: Any, bandwidth: float | None
) -> DecodeFigure:
    prompt, new = lengths
    workload = fixed(batch, prompt, new, bed.num_logits)
    bed.warm(workload, depth)
    options = {"params": params} if params is not None else {}
    run = bed.run(depth, workload, batch=batch, **options)
    times = sorted(decode_times(run, batch))
    floor_s = step_bytes(bed.built, batch, prompt + new / 2) / bandwidth if bandwidth else None
    assert run.timeline is not None
    active = run.timeline.numbers()["device_active_share"]
    speed = run.num_new_tokens / run.wall_s
    name = bed.built.source.name
    if not times:
        note = why_none(batch, prompt, new, depth, bed.built.resolved.settings.max_batch_tokens or batch)
        return DecodeFigure(name, batch, prompt, new, floor_s, None, None, None, speed, active, None, note)
    return DecodeFigure(
        name, batch, prompt, new, floor_s, sum(times) / len(times), median(times), times[int(0.99 * len(times))],
        speed, active, host_parts(full_steps(run, batch)),
    )  # fmt: skip


def why_none(batch: int, prompt: int, new: int, depth: int, max_batch_tokens: int) -> str:
    """Why no two steps in a row decoded the whole batch, and how many new tokens are enough.

    While k requests decode, prompts get max_batch_tokens - k tokens of a step. From the step with the end of the first
    prompt to that with the end of the last, the first request must not end.
    """
    num_steps, left, first = 0, batch * prompt, 0
    while left > 0:
        done = batch - -(-left // prompt)  # whole prompts, which decode now
        first = first or (num_steps if done else 0)
        left -= max(1, max_batch_tokens - done)
        num_steps += 1
    num_steps -= max(0, first - 1)
    enough = num_steps + 2
    cause = f"no two steps in a row decoded the whole batch before the first had its {new} tokens"
    if new >= enough:  # prompts were cut further, for the time that a step may take
        return f"{cause}: raise --new or --target-step-ms."
    wider = f", or --max-batch-tokens to {batch * prompt} with --new 3" if num_steps > 1 else ""
    return f"{cause}: --new {enough} is enough{wider}."


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
    """The figures as a table, and below it a line for each that has no times."""
    compared = any(f.without_deterministic_s is not None for f in figures)
    rows: list[list[Cell]] = []
    for f in figures:
        over = f.step_s / f.floor_s if f.floor_s and f.step_s is not None else None
        row: list[Cell] = [
            f.model, f.batch, f"{f.prompt} → {f.new}", milliseconds(f.floor_s or None), milliseconds(f.step_s),
            None if over is None else f"{over:.2f} ×", milliseconds(f.p50_s), milliseconds(f.p99_s), f.tokens_per_s,
            percent(f.device_active_share), None if f.host_s is None else f"{sum(f.host_s.values()) * 1e6:.0f}",
        ]  # fmt: skip
        if compared:
            cost = f.deterministic_cost
            row += [milliseconds(f.without_deterministic_s), None if cost is None else f"{cost * 100:+.1f} %"]
        rows.append(row)
    header = (*HEADER, "step ms without deterministic", "its cost") if compared else HEADER
    notes = [f"note: {f.model}, batch {f.batch}: {f.note}" for f in figures if f.note]
    return "\n".join([table(header, rows), *notes])
