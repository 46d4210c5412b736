"""Pictures of figures: speeds as bars. It knows how they should look; matplotlib is loaded only when it draws."""

from collections.abc import Sequence
from pathlib import Path

from tandem.bench.offline import Comparison
from tandem.bench.report import show
from tandem.errors import TandemError

COLOURS = ("#8a95a3", "#e08e2b", "#3b6fb6", "#4f9d69", "#a05195", "#d45087", "#665191")


def plot_speeds(comparisons: Sequence[Comparison], path: str | Path) -> None:
    """Generated tokens a second, one group of bars a workload. Raises TandemError if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TandemError("matplotlib is not installed.", hint='pip install "tandem-llm[plot]"') from error
    figure = Figure(figsize=(4.4 + 2.2 * len(comparisons), 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(dict.fromkeys(name for comparison in comparisons for name in _speeds(comparison)))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        heights = [_speeds(comparison).get(name, 0.0) for comparison in comparisons]
        places = [group + (index - (len(names) - 1) / 2) * width for group in range(len(comparisons))]
        bars = axes.bar(places, heights, width * 0.92, label=name, color=COLOURS[index % len(COLOURS)])
        axes.bar_label(bars, labels=[show(height) for height in heights], fontsize=7)
    axes.set_xticks(range(len(comparisons)), [comparison.workload.name for comparison in comparisons], fontsize=8)
    axes.set_ylabel("tokens a second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)


def _speeds(comparison: Comparison) -> dict[str, float]:
    return {run.name: run.num_new_tokens / run.wall_s for run in comparison.runs} | comparison.others
