"""Observers on a whole engine, turned by hand: what they say must be what its clients saw."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.bench.drive import RecordingMailbox, turn
from tandem.engine.build import make_loop
from tandem.engine.contract import Abort, Call, Mail
from tandem.engine.loop import Loop
from tandem.engine.null_model import KV_ELEMENTS
from tandem.errors import TandemError
from tandem.observe.metrics import Histogram, Metrics
from tandem.observe.requests import RequestLedger
from tandem.observe.timeline import Timeline
from tandem.observer import Observer
from tandem.plan import StepPlan
from tandem.request import Request, SamplingParams
from tandem.runner.null import NullRunner
from tandem.schedule import Scheduler

BLOCK_BYTES = 16 * KV_ELEMENTS * 4


class Clients(RecordingMailbox):
    """Sends what it is given, records what comes back, calls included."""

    def __init__(self, requests: Sequence[Request] = ()) -> None:
        super().__init__(requests)
        self.answers: dict[int, Any] = {}

    def send(self, *mail: Mail) -> None:
        self._mail.extend(mail)

    def answer(self, number: int, value: Any, error: TandemError | None) -> None:
        assert error is None, error
        self.answers[number] = value


def requests() -> list[Request]:
    """A hog, 4 plain ones, 2 with n=3, 2 that will be aborted, 1 that is longer than the context."""

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    made = [Request("hog", [5] * 8, params(100))]
    made += [Request(f"plain{i}", [9, i + 10], params(40)) for i in range(4)]
    for parent in ("x", "y"):
        made.append(Request(parent, [11, len(made)] * 4, params(12)))
        made += [Request(f"{parent}.{i}", made[-1].prompt, params(12), fork_of=parent) for i in (1, 2)]
    made += [Request(f"gone{i}", [13] * 40, params(40)) for i in range(2)]
    return [*made, Request("refused", [1] * 200, params(10))]


def ask(loop: Any, clients: Clients, name: str, argument: str = "") -> Any:
    number = len(clients.answers) + 1
    clients.send(Call(number, name, argument))
    loop.turn()
    return clients.answers[number]


def test_c27_an_engines_figures_are_what_its_clients_saw() -> None:
    asked = requests()
    clients = Clients(asked)
    settings = {
        "device": "null", "max_num_seqs": 4, "kv_cache_memory": 12 * BLOCK_BYTES, "max_model_len": 128
    }  # fmt: skip
    loop, _ = make_loop(settings, clients)
    for _ in range(5):
        loop.turn()
    clients.send(Abort("gone0"), Abort("gone1"))
    turn(loop)
    figures: dict[str, Any] = {}
    for family in ask(loop, clients, "metrics"):
        values = {tuple(s["labels"].values()): s["value"] for s in family["samples"]}
        figures[family["name"]] = values[()] if set(values) == {()} else {key[0]: v for key, v in values.items()}
    accounts = {request.id: ask(loop, clients, "account", request.id) for request in asked[:-1]}
    timeline = ask(loop, clients, "timeline")
    loop.close()

    records = clients.records
    tokens = sum(len(record.tokens) for record in records.values())
    assert records["refused"].error and records["gone0"].finish == records["gone1"].finish == "abort"
    assert figures["request_accepted"] == sum(figures["request_success"].values()) == 13
    assert figures["request_success"] == {"stop": 0, "length": 11, "abort": 2, "error": 0}
    assert figures["request_refused"] == 1
    assert figures["generation_tokens"] == tokens == 100 + 4 * 40 + 6 * 12
    assert figures["time_to_first_token_seconds"]["count"] == 11
    assert figures["prompt_tokens"] == 8 + 4 * 2 + 2 * 8, "once for n answers, not for those who never began"
    assert figures["num_preemptions"] >= 1, "12 blocks are too few for all of them"
    assert figures["num_requests_running"] == figures["num_requests_waiting"] == 0
    assert figures["inter_token_latency_seconds"]["count"] == tokens - 11
    means = [
        figures[name]["sum"] / figures[name]["count"]
        for name in ("request_queue_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds")
    ]
    assert 0 <= means[0] <= means[1] <= means[2]

    for name, account in accounts.items():
        assert sum(account["parts_s"].values()) == pytest.approx(account["total_s"], rel=0.01), name
        assert account["finish"] == records[name].finish and account["tokens"] == len(records[name].tokens)
    assert sum(a["preemptions"] for a in accounts.values()) == figures["num_preemptions"]
    assert any(set(a["queue_why_s"]) & {"rows", "blocks"} for a in accounts.values())
    assert timeline["num_steps"] == figures["steps"]
    assert timeline["device_active_s"] + sum(timeline["idle_s"].values()) == pytest.approx(timeline["device_span_s"])


class Written(Observer):
    """Shows others plans and changes with every span and change written out."""

    def __init__(self, *others: Observer) -> None:
        self.others = others

    def request_added(self, request: Request, now_s: float) -> None:
        for other in self.others:
            other.request_added(request, now_s)

    def step_submitted(self, plan: StepPlan, began_s: float, planned_s: float, submitted_s: float) -> None:
        for other in self.others:
            other.step_submitted(replace(plan, spans=list(plan.spans)), began_s, planned_s, submitted_s)

    def step_collected(self, plan: StepPlan, result: Any, changes: Any, *times_s: float) -> None:
        for other in self.others:
            other.step_collected(replace(plan, spans=list(plan.spans)), result, list(changes), *times_s)


@pytest.mark.parametrize("depth", [1, 2])
def test_columns_are_counted_as_if_written_out(depth: int) -> None:
    asked = requests()[:-1]
    runner = NullRunner(12, 16, 4, depth=depth)
    scheduler = Scheduler(12, 16, 4, 64, 128)
    seen, written = (Timeline(), Metrics(), RequestLedger()), (Timeline(), Metrics(), RequestLedger())
    turn(Loop(scheduler, runner, Clients(asked), observers=[*seen, Written(*written)]))
    assert seen[0].numbers() == written[0].numbers()
    for one, other in zip(seen[1].families(), written[1].families(), strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            if isinstance(a.value, Histogram):
                assert (a.value.counts, a.value.sum) == (b.value.counts, pytest.approx(b.value.sum)), one.name
            else:
                assert a == b, one.name
    assert [a.as_dict() for a in seen[2].accounts()] == [a.as_dict() for a in written[2].accounts()]
    assert seen[1].num_preemptions and len(seen[2].accounts()) == len(asked)
