"""Static, synchronous and tandem batching over the same requests, and whoever else is asked for. It draws no plots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.bench.bed import STATIC, Bed
from tandem.bench.drive import Run
from tandem.bench.report import Cell, milliseconds, percent, table
from tandem.bench.workload import Workload

HEADER = (
    "", "tok/s", "time s", "TTFT ms p50", "p90", "p99", "ITL ms p50", "p90", "p99", "E2E s p50", "p90", "p99",
    "padding", "active",
)  # fmt: skip


@dataclass(slots=True)
class Comparison:
    """All runs over one workload. others: figures that have no tokens to compare, as tokens a second by name."""

    workload: Workload
    runs: list[Run]
    others: dict[str, float] = field(default_factory=dict)

    @property
    def own(self) -> list[Run]:
        return [run for run in self.runs if not run.name.startswith("transformers")]

    def differing(self) -> dict[str, int]:
        """How many requests got other tokens than in the first run, by run."""
        first = self.runs[0].tokens
        return {
            run.name: sum(a != b for a, b in zip(first, run.tokens, strict=True))
            for run in self.runs[1:]
            if len(run.tokens) == len(first)
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "workload": self.workload.as_dict(),
            "runs": [run.as_dict() for run in self.runs],
            "others_tokens_per_s": dict(self.others),
            "requests_that_differ": self.differing(),
        }


def compare_batching(
    bed: Bed, workload: Workload, depths: Sequence[int] = (STATIC, 1, 2), *, repeats: int = 1, batch: int | None = None,
    on_run: Callable[[str], None] = lambda text: None, **options: Any,
) -> Comparison:  # fmt: skip
    """Run the workload at each depth (0: static), the best of so many repeats each, in turn so that all see the same
    weather on a shared machine."""
    best: dict[int, Run] = {}
    for _ in range(repeats):
        for depth in depths:
            on_run(f"{workload.name}: {'static' if depth == STATIC else f'depth {depth}'}")
            run = bed.run(depth, workload, batch=batch, **options)
            if depth not in best or run.wall_s < best[depth].wall_s:
                best[depth] = run
    return Comparison(workload, [best[depth] for depth in depths])


def add_transformers(comparison: Comparison, peer: Any, repeats: int, on_run: Callable[[str], None]) -> None:
    """Run the same requests through transformers (compare_transformers.Transformers)."""
    for how in ("continuous", "static"):
        on_run(f"{comparison.workload.name}: transformers {how}")
        runs = [getattr(peer, how)(comparison.workload) for _ in range(repeats)]
        comparison.runs.append(min(runs, key=lambda run: run.wall_s))


def table_of(comparison: Comparison) -> str:
    rows: list[list[Cell]] = []
    for run in comparison.runs:
        found = run.as_dict()
        row: list[Cell] = [run.name, found["tokens_per_s"], run.wall_s]
        for name, scale in (("ttft_s", 1e3), ("itl_s", 1e3), ("e2e_s", 1.0)):
            row += [_scaled(found[name].get(p), scale) for p in ("p50", "p90", "p99")]
        active = run.timeline.numbers()["device_active_share"] if run.timeline is not None else None
        row += [percent(run.padding_share) if run.timeline or run.padding_share else None, percent(active)]
        rows.append(row)
    for name, speed in comparison.others.items():
        rows.append([name, speed, *[None] * (len(HEADER) - 2)])
    return table(HEADER, rows)


def ratios_table(comparisons: Sequence[Comparison]) -> str:
    """Tokens a second of the deepest tandem run over everyone else's, a line a workload."""
    names = [run.name for run in comparisons[0].runs] + list(comparisons[0].others)
    ours = comparisons[0].own[-1].name
    rows: list[list[Cell]] = []
    for comparison in comparisons:
        speeds = {run.name: run.num_new_tokens / run.wall_s for run in comparison.runs} | comparison.others
        row: list[Cell] = [f"{len(comparison.workload.asked)} requests"]
        row += [speeds[ours] / speeds[name] if speeds.get(name) else None for name in names if name != ours]
        rows.append(row)
    return table([f"{ours}, times", *[name for name in names if name != ours]], rows)


def lines_about_tokens(comparison: Comparison) -> list[str]:
    """Whether all gave the same tokens."""
    count = len(comparison.workload.asked)
    first = comparison.runs[0].name
    return [
        f"tokens of {name} and {first}: " + (f"{num} of {count} requests differ" if num else f"equal for all {count}")
        for name, num in comparison.differing().items()
    ]


def weights_path(bed: Bed) -> Path | None:
    """The file or folder that the weights came from; None for random weights."""
    source = bed.built.source
    return source.path if source.kind != "random" else None


def _scaled(value: float | None, scale: float) -> float | None:
    return milliseconds(value) if scale == 1e3 else value
