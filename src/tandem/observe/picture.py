"""Draws a timeline as a picture: host, in, compute and out over time, with the letters of the slots.

It knows how it should look; it does not know how the times came about. matplotlib is loaded only when it draws.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.errors import TandemError
from tandem.observe.timeline import CAUSE_TEXTS, StepRecord, Timeline
from tandem.observe.trace_file import slot_letter

LANES = ("host", "in", "compute", "out")
COLOURS = ("#3b6fb6", "#e08e2b", "#4f9d69", "#a05195")
HOST_COLOURS = {"plan": "#2f3742", "submit": "#c0504d", "settle": "#7d8896", "wait": "#eceff2"}


def can_draw() -> bool:
    """Whether matplotlib is there; it is not loaded."""
    return find_spec("matplotlib") is not None


def write_picture(timeline: Timeline, path: str | Path, *, title: str = "", num_steps: int = 12) -> None:
    """Draw num_steps steps from the middle of the run into a PNG (or what else the suffix says).

    Raises TandemError if there is nothing to draw or matplotlib is missing.
    """
    steps = _middle(list(timeline.steps), num_steps)
    if not steps:
        raise TandemError("the timeline holds no step.", hint="run some requests first.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TandemError("matplotlib is not installed.", hint='pip install "tandem-llm[plot]"') from error
    figure = Figure(figsize=(14, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    origin_s = steps[0].plan_began_s
    end_s = max(max(record.settled_s, record.home_s) for record in steps)
    for record in steps:
        _draw_step(axes, record, origin_s, (end_s - origin_s) / 700, timeline.depth)
    _frame(axes, end_s - origin_s, timeline, title)
    figure.savefig(path)


def _middle(steps: list[StepRecord], num_steps: int) -> list[StepRecord]:
    first = max(0, (len(steps) - num_steps) // 2)
    return steps[first : first + num_steps]


def _draw_step(axes: Any, record: StepRecord, origin_s: float, least_s: float, depth: int) -> None:
    """Bars of one step. Stretches shorter than least_s are drawn that long, or nobody would see them."""
    colour = COLOURS[record.step % depth % len(COLOURS)]

    def bar(lane: str, from_s: float, to_s: float, fill: str, text: str = "") -> None:
        if not to_s > from_s > 0.0:
            return
        left, width = (from_s - origin_s) * 1e3, max(to_s - from_s, least_s) * 1e3
        edge = {"edgecolor": "white", "linewidth": 0.4} if to_s - from_s > 3 * least_s else {}
        axes.barh(LANES.index(lane), width, left=left, height=0.62, color=fill, **edge)
        if text:
            look = {"ha": "center", "va": "center", "color": "white", "fontsize": 7, "clip_on": True}
            axes.text(left + width / 2, LANES.index(lane), text, **look)

    bar("host", record.wait_began_s, record.host_home_s, HOST_COLOURS["wait"])
    bar("host", record.plan_began_s, record.planned_s, HOST_COLOURS["plan"])
    bar("host", record.planned_s, record.submitted_s, HOST_COLOURS["submit"])
    bar("host", record.host_home_s, record.settled_s, HOST_COLOURS["settle"])
    bar("in", record.submitted_s, record.ready_s, colour)
    bar("compute", record.began_s, record.computed_s, colour, f"{record.step}\n{slot_letter(record.step, depth)}")
    bar("out", record.computed_s, record.home_s, colour)


def _frame(axes: Any, span_s: float, timeline: Timeline, title: str) -> None:
    from matplotlib.patches import Patch

    numbers = timeline.numbers()
    axes.set_xlim(0.0, span_s * 1e3)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    idle = ", ".join(
        f"{CAUSE_TEXTS[cause]} {share:.2%}" for cause, share in numbers["idle_share"].items() if share >= 5e-5
    )
    axes.set_title(
        f"{title + ' · ' if title else ''}depth {timeline.depth} · device active {numbers['device_active_share']:.2%}"
        + (f" · idle: {idle}" if idle else ""),
        loc="left",
        fontsize=9,
    )
    patches = [Patch(color=colour, label=name) for name, colour in HOST_COLOURS.items()]
    for slot in range(timeline.depth):
        patches.append(Patch(color=COLOURS[slot % len(COLOURS)], label=f"slot {slot_letter(slot, timeline.depth)}"))
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)
