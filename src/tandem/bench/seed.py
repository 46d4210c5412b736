"""The experiment that tandem exists for: the same requests with static batching and at depths 1, 2 and 3.

It shows time, time a step, the device's active share, and why the device stood still when it did.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.bench.bandwidth import copy_bandwidth, step_bytes
from tandem.bench.bed import NAMES, STATIC, Bed
from tandem.bench.drive import Run
from tandem.bench.lengths import Lengths
from tandem.bench.offline import Comparison, compare_batching
from tandem.bench.report import Cell, percent, table
from tandem.bench.workload import Workload, fixed
from tandem.observe.picture import write_picture
from tandem.observe.timeline import CAUSES

PROMPT, NEW = 256, 8192
HEADER = ("", "time s", "ms/step", "device active", *(f"idle: {cause}" for cause in CAUSES))


class SeedResult:
    """The comparison, and the floor that the device's copy bandwidth sets for it."""

    def __init__(
        self, comparison: Comparison, settings: dict[str, Any], floor_s: float | None, bandwidth: float | None
    ) -> None:
        self.comparison, self.settings = comparison, settings
        self.floor_s, self.bandwidth = floor_s, bandwidth

    @property
    def equal(self) -> bool:
        return not any(self.comparison.differing().values())

    def table(self) -> str:
        rows: list[list[Cell]] = [_row(run) for run in self.comparison.runs]
        steps = max(a.max_tokens for a in self.comparison.workload.asked)
        if self.floor_s:
            rows.append(["floor", self.floor_s, self.floor_s / steps * 1e3, "100 %", *[None] * len(CAUSES)])
        return table(HEADER, rows)

    def as_dict(self) -> dict[str, Any]:
        figures = self.comparison.as_dict()
        return {**figures, "equal": self.equal, "floor_s": self.floor_s, "copy_bytes_per_s": self.bandwidth}


def run_seed(
    settings: Mapping[str, Any], *, batch: int = 32, prompt: int | None = None, new: int | None = None,
    depths: Sequence[int] = (STATIC, 1, 2, 3), on_phase: Callable[[str], None] = lambda text: None,
) -> SeedResult:  # fmt: skip
    """Build one engine and run the requests at each depth on it.

    prompt, new   tokens; None: 256 and 8,192, or what the model's context has room for.
    """
    lengths = Lengths(settings, new_option="--tokens", on_phase=on_phase)
    prompt, new = lengths.fit(prompt, new, (PROMPT, NEW))
    chosen = {**settings, "max_model_len": settings.get("max_model_len", prompt + new)}
    with Bed(chosen, batch, padded=STATIC in depths, depth=max(1, *depths), on_phase=on_phase) as bed:
        bandwidth = copy_bandwidth(bed.built.resolved.settings.device or "cpu")  # first, so that it costs no run
        workload = fixed(batch, prompt, new, bed.num_logits)
        for depth in sorted(set(depths) & {1, max(depths)}):
            bed.warm(workload, depth, num_steps=min(16, new))
        comparison = compare_batching(bed, workload, depths, on_run=on_phase)
        return SeedResult(comparison, bed.settings, floor_of(bed, workload, bandwidth), bandwidth)


def floor_of(bed: Bed, workload: Workload, bandwidth: float | None) -> float | None:
    """Seconds that a copy would take over the bytes of all decode steps of requests of equal lengths."""
    if bandwidth is None:
        return None
    batch, first = len(workload.asked), workload.asked[0]
    context = len(first.prompt) + first.max_tokens / 2
    return first.max_tokens * step_bytes(bed.built, batch, context) / bandwidth


def write_pictures(result: SeedResult, folder: Path) -> list[Path]:
    """Timelines in the middle of decoding: the synchronous run and the one at depth 2, as far as they were run."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for run in result.comparison.runs:
        if run.timeline is None or run.name not in (NAMES[1], NAMES[2]):
            continue
        path = folder / f"timeline-depth-{run.timeline.depth}.png"
        write_picture(run.timeline, path, title=result.comparison.workload.name, num_steps=8)
        found.append(path)
    return found


def _row(run: Run) -> list[Cell]:
    assert run.timeline is not None
    numbers = run.timeline.numbers()
    idle = [percent(numbers["idle_share"][cause]) for cause in CAUSES]
    steps = max(1, numbers["num_steps"])
    return [run.name, run.wall_s, run.wall_s / steps * 1e3, percent(numbers["device_active_share"]), *idle]
