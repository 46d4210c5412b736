"""What observers have noted, as plain data that crosses a process border. It knows observers; not who asks."""

import operator
import time
from typing import Any

from tandem.observe.metrics import Histogram, Metrics
from tandem.observe.timeline import Timeline

MOMENTS = (
    "step", "num_spans", "num_tokens", "num_decodes", "plan_began_s", "planned_s", "submitted_s", "wait_began_s",
    "host_home_s", "settled_s", "ready_s", "began_s", "computed_s", "home_s",
)  # fmt: skip
_moments = operator.attrgetter(*MOMENTS)


def plain_metrics(metrics: Metrics) -> list[dict[str, Any]]:
    """Metrics.families() as plain data that crosses a process border."""

    def plain(value: float | Histogram) -> Any:
        if isinstance(value, Histogram):
            return {"buckets": value.cumulative(), "sum": value.sum, "count": value.count}
        return value

    return [
        {**family._asdict(), "samples": [{"labels": s.labels, "value": plain(s.value)} for s in family.samples]}
        for family in metrics.families()
    ]


def plain_steps(timeline: Timeline, wanted: str) -> dict[str, Any]:
    """Moments of the newest steps. wanted: "AFTER LIMIT", see Timeline.recent."""
    after, _, limit = wanted.partition(" ")
    steps = timeline.recent(int(after or -1), int(limit or 100))
    return {
        "now_s": time.perf_counter(),
        "depth": timeline.depth,
        "fields": MOMENTS,
        "steps": list(map(_moments, steps)),
    }
