"""Writes a timeline in the Chrome trace event format, which Perfetto and chrome://tracing read.

It knows the file's format; it does not know how the timeline was recorded. Format: "Trace Event Format", the
document of the Chromium project: complete events (ph X) with microseconds, metadata (M) for names, counters (C) and
flow arrows (s, f).
"""

import json
from pathlib import Path
from typing import Any

from tandem.observe.timeline import StepRecord, Timeline

HOST, DEVICE = 1, 2
LANES = {"host": (HOST, 1), "in": (DEVICE, 1), "compute": (DEVICE, 2), "out": (DEVICE, 3)}


def slot_letter(step: int, depth: int) -> str:
    """The letter of the slot that a step uses: slots take turns."""
    return chr(ord("A") + step % depth)


def events(timeline: Timeline) -> list[dict[str, Any]]:
    """Trace events of the steps that the ring buffer still holds; time 0 is where the first was planned."""
    found = _names()
    if not timeline.steps:
        return found
    origin_s = timeline.steps[0].plan_began_s
    for record in timeline.steps:
        found += _step_events(record, origin_s, timeline.depth)
    return found


def write_trace(timeline: Timeline, path: str | Path, **facts: Any) -> None:
    """Write the timeline as JSON; facts (settings, machine, figures) go under "otherData"."""
    document = {"traceEvents": events(timeline), "displayTimeUnit": "ms", "otherData": facts}
    Path(path).write_text(json.dumps(document))


def _names() -> list[dict[str, Any]]:
    processes = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in ((HOST, "host"), (DEVICE, "device"))
    ]
    threads = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
        for lane, (pid, tid) in LANES.items()
    ]
    return processes + threads


def _step_events(record: StepRecord, origin_s: float, depth: int) -> list[dict[str, Any]]:
    facts = {
        "step": record.step,
        "slot": slot_letter(record.step, depth),
        "requests": record.num_spans,
        "tokens": record.num_tokens,
        "decodes": record.num_decodes,
    }
    found: list[dict[str, Any]] = []

    def stretch(lane: str, name: str, from_s: float, to_s: float) -> None:
        if to_s > from_s > 0.0:
            pid, tid = LANES[lane]
            start, length = (from_s - origin_s) * 1e6, (to_s - from_s) * 1e6
            found.append(
                {"ph": "X", "name": f"{name} {record.step}", "pid": pid, "tid": tid, "ts": start, "dur": length,
                 "args": facts}
            )  # fmt: skip

    stretch("host", "plan", record.plan_began_s, record.planned_s)
    stretch("host", "submit", record.planned_s, record.submitted_s)
    stretch("host", "wait", record.wait_began_s, record.host_home_s)
    stretch("host", "settle", record.host_home_s, record.settled_s)
    stretch("in", "in", record.submitted_s, record.ready_s)
    stretch("compute", "compute", record.began_s, record.computed_s)
    stretch("out", "out", record.computed_s, record.home_s)
    if record.computed_s > record.began_s:
        flow = {"name": "step", "cat": "step", "id": record.step}
        sent, begun = (record.planned_s - origin_s) * 1e6, (record.began_s - origin_s) * 1e6
        found.append({"ph": "s", "pid": HOST, "tid": 1, "ts": sent, **flow})
        found.append({"ph": "f", "bp": "e", "pid": DEVICE, "tid": 2, "ts": begun, **flow})
        sizes = {"requests": record.num_spans, "tokens": record.num_tokens}
        found.append({"ph": "C", "name": "batch", "pid": DEVICE, "tid": 2, "ts": begun, "args": sizes})
    return found
