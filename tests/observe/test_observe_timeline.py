"""The timeline's arithmetic on made-up times, its trace file and its picture."""

import json
from pathlib import Path

import pytest

from tandem.errors import TandemError
from tandem.observe.picture import write_picture
from tandem.observe.timeline import CAUSES, Timeline
from tandem.observe.trace_file import events, slot_letter, write_trace
from tandem.plan import Span, StepPlan, StepResult, StepTimes
from tandem.request import Change, Request, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


def tell_step(
    timeline: Timeline, step: int, host: tuple[float, ...], device: tuple[float, ...], changes: tuple[Change, ...] = ()
) -> None:
    """host: plan began, planned, submitted, wait began, home, settled. device: ready, began, computed, home."""
    plan = StepPlan(step, [Span("a", 0, step, 1, (), True)], num_decodes=1)
    submit_step(timeline, plan, host)
    collect_step(timeline, plan, host, device, changes)


def submit_step(timeline: Timeline, plan: StepPlan, host: tuple[float, ...]) -> None:
    timeline.step_submitted(plan, host[0], host[1], host[2])


def collect_step(
    timeline: Timeline, plan: StepPlan, host: tuple[float, ...], device: tuple[float, ...], changes: tuple[Change, ...]
) -> None:
    result = StepResult(plan.step, [1], times=StepTimes(host[1], *device))
    timeline.step_collected(plan, result, changes, host[3], host[4], host[5])


def synchronous(num_steps: int = 3) -> Timeline:
    """Steps 10 long, everything in turn: plan 1, launch 2, copy in 3, launch 0.5, compute 10, copy out 4, settle 5."""
    timeline = Timeline(depth=1)
    timeline.request_added(Request("a", [1], PARAMS), 0.5)
    for step in range(num_steps):
        t = 1.0 + 25.5 * step
        host = (t, t + 1, t + 3, t + 3, t + 20.5, t + 25.5)
        tell_step(timeline, step, host, (t + 6, t + 6.5, t + 16.5, t + 20.5))
    return timeline


def test_idle_has_its_causes() -> None:
    numbers = synchronous().numbers()
    assert numbers["num_steps"] == 3
    assert numbers["idle_s"] == pytest.approx(
        {"plan": 2.0, "launch": 2 * 2.5, "copy": 2 * 7.0, "settle": 2 * 5.0, "nothing": 0.0}
    )
    assert numbers["device_active_s"] == pytest.approx(30.0)
    assert numbers["device_span_s"] == pytest.approx(61.0)
    assert numbers["device_active_share"] == pytest.approx(30 / 61)
    assert numbers["host_step_s"] == pytest.approx({"plan": 1.0, "submit": 2.0, "wait": 17.5, "settle": 5.0})


def test_active_and_idle_sum_to_the_span() -> None:
    numbers = synchronous(7).numbers()
    assert sum(numbers["idle_s"].values()) + numbers["device_active_s"] == pytest.approx(numbers["device_span_s"])
    assert sum(numbers["idle_share"].values()) + numbers["device_active_share"] == pytest.approx(1.0)


def test_steps_in_flight_leave_no_gap() -> None:
    timeline = Timeline(depth=2)
    timeline.request_added(Request("a", [1], PARAMS), 0.5)
    plans = [StepPlan(step, [Span("a", 0, step, 1, (), True)], num_decodes=1) for step in range(4)]
    hosts = [(1.0 + 10 * s, 2.0 + 10 * s, 3.0 + 10 * s, 14.0 + 10 * s, 25.0 + 10 * s, 26.0 + 10 * s) for s in range(4)]
    devices = [(4.0 + 10 * s, 14.0 + 10 * s, 24.0 + 10 * s, 25.0 + 10 * s) for s in range(4)]
    submit_step(timeline, plans[0], hosts[0])
    for step in range(4):
        if step < 3:
            submit_step(timeline, plans[step + 1], hosts[step + 1])
        collect_step(timeline, plans[step], hosts[step], devices[step], ())
    numbers = timeline.numbers()
    assert numbers["device_active_share"] == pytest.approx(1.0)
    assert all(seconds == 0.0 for seconds in numbers["idle_s"].values())


def test_an_empty_engine_has_nothing_to_do() -> None:
    timeline = Timeline(depth=1)
    timeline.request_added(Request("a", [1], PARAMS), 0.0)
    tell_step(timeline, 0, (0.1, 0.2, 0.3, 0.3, 2.0, 2.5), (0.4, 0.5, 1.5, 2.0), (Change("a", (1,), "length"),))
    timeline.request_added(Request("b", [1], PARAMS), 90.0)
    tell_step(timeline, 1, (90.5, 91.0, 92.0, 92.0, 99.0, 99.5), (92.0, 93.0, 98.0, 99.0))
    idle_s = timeline.numbers()["idle_s"]
    assert idle_s == pytest.approx({"copy": 0.5, "settle": 0.5 + 0.5, "nothing": 87.5, "plan": 0.5, "launch": 2.0})


def test_reset_forgets_the_warm_up_and_the_ring_forgets_the_oldest() -> None:
    timeline = Timeline(depth=1, capacity=4)
    for step in range(9):
        tell_step(
            timeline,
            step,
            tuple(step + x for x in (0.1, 0.2, 0.3, 0.3, 0.8, 0.9)),
            (step + 0.3, step + 0.4, step + 0.7, step + 0.8),
        )
    assert [record.step for record in timeline.steps] == [5, 6, 7, 8]
    assert timeline.numbers()["num_steps"] == 9
    timeline.reset()
    assert timeline.numbers()["device_active_share"] == 0.0 and not timeline.steps


def test_a_runner_without_device_times_is_no_division_by_zero() -> None:
    timeline = Timeline()
    tell_step(timeline, 0, (1.0, 2.0, 3.0, 3.0, 4.0, 5.0), (0.0, 0.0, 0.0, 0.0))
    numbers = timeline.numbers()
    assert numbers["device_active_share"] == 0.0 and numbers["host_step_s"]["plan"] == 1.0
    assert len(timeline.lines()) == 3 + len(CAUSES)


def test_trace_file_is_what_viewers_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write_trace(synchronous(), path, machine="none")
    document = json.loads(path.read_text())
    assert document["otherData"] == {"machine": "none"}
    complete = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert {e["name"].split()[0] for e in complete} == {"plan", "submit", "wait", "settle", "in", "compute", "out"}
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in complete)
    computes = [e for e in complete if e["name"].startswith("compute")]
    assert [(e["ts"], e["dur"]) for e in computes] == [
        pytest.approx(((6.5 + 25.5 * step) * 1e6, 10e6)) for step in range(3)
    ]
    names = {e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert names == {"host", "device", "in", "compute", "out"}
    sent = [e["id"] for e in document["traceEvents"] if e["ph"] == "s"]
    assert sent == [e["id"] for e in document["traceEvents"] if e["ph"] == "f"] == [0, 1, 2]
    assert len([e for e in events(Timeline()) if e["ph"] == "X"]) == 0


def test_slots_take_turns() -> None:
    assert [slot_letter(step, 2) for step in range(4)] == ["A", "B", "A", "B"]
    assert [slot_letter(step, 3) for step in range(4)] == ["A", "B", "C", "A"]


def test_picture_shows_something(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    write_picture(synchronous(6), path, title="made up")
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    assert pixels.shape[1] > 1000 and pixels.shape[0] > 300
    colours = {tuple(colour) for colour in (pixels[::3, ::3].reshape(-1, 3) * 255).round().astype(int).tolist()}
    assert {(0x3B, 0x6F, 0xB6), (0x2F, 0x37, 0x42), (0xC0, 0x50, 0x4D), (0x7D, 0x88, 0x96)} <= colours


def test_picture_of_nothing_is_an_error_that_teaches(tmp_path: Path) -> None:
    with pytest.raises(TandemError, match="hint"):
        write_picture(Timeline(), tmp_path / "timeline.png")


def test_recent_gives_the_newest_steps_behind_a_number_oldest_first() -> None:
    timeline = Timeline(depth=2, capacity=8)
    for step in range(20):
        plan = StepPlan(step, [])
        timeline.step_submitted(plan, step + 0.1, step + 0.2, step + 0.3)
        timeline.step_collected(plan, StepResult(step, []), [], step + 0.3, step + 0.8, step + 0.9)
    assert [record.step for record in timeline.recent(15, 10)] == [16, 17, 18, 19]
    assert [record.step for record in timeline.recent(-1, 3)] == [17, 18, 19]
    assert [record.step for record in timeline.recent(-1, 100)] == list(range(12, 20))
    assert timeline.recent(19, 5) == []
