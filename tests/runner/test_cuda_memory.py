"""Memory that runs out anywhere in a step of the GPU runner: one request ends, the others' tokens are as if alone."""

import dataclasses
import random
from collections import deque

import numpy as np
import pytest
import torch
from runner_drive import Drive, greedy
from test_cuda_runner import BLOCK_SIZE, drive, make, model, prompt  # noqa: F401  (model is a fixture)

from tandem.plan import Arrival, Span, StepPlan
from tandem.request import Constraint, Request
from tandem.runner import device_sampling
from tandem.runner.clock import Timekeeper
from tandem.runner.cuda import CudaRunner
from tandem.runner.device_sampling import DeviceSampling
from tandem.runner.slots import Slot
from tandem.runner.streams import EagerStreams
from tandem.sampling.counts import CountTables
from tandem.sampling.rows import SamplerRows
from tandem.sampling.upload import pinning
from tandem.schedule import Scheduler

PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.8}


def fails_at(monkeypatch, place, name, *calls):
    """The calls of so many numbers, from 1, find no memory."""
    real, count = getattr(place, name), [0]

    def fails(*arguments, **settings):
        count[0] += 1
        if count[0] in calls:
            raise torch.OutOfMemoryError("made up")
        return real(*arguments, **settings)

    monkeypatch.setattr(place, name, fails)
    return count


def each_alone(model, asked, **how):  # noqa: F811
    return {one[0]: drive(make(model, **how), [one])[0][one[0]] for one in asked}


def check_all_but_failed(runner, outputs, driven, alone, num_failed):
    runner._sampling.samplers.check()
    failed = {stream.id for stream in driven.sequences if stream.error}
    assert all("out of memory" in stream.error for stream in driven.sequences if stream.error)
    assert len(failed) == num_failed
    assert {name: tokens for name, tokens in outputs.items() if name not in failed} == {
        name: tokens for name, tokens in alone.items() if name not in failed
    }


@pytest.mark.parametrize("call", [2, 4, 6])
def test_a_step_that_is_repeated_for_its_logprobs_counts_tokens_once(model, monkeypatch, call):  # noqa: F811
    asked = [("a", prompt(1), greedy(14, **PENALTIES))]
    asked += [(name, prompt(i), greedy(14, logprobs=3)) for i, name in ((2, "b"), (3, "c"))]
    alone = each_alone(model, asked)
    fails_at(monkeypatch, device_sampling, "logprobs_of", call)
    runner = make(model, depth=2)
    check_all_but_failed(runner, *drive(runner, asked, join=0.3, seed=3), alone, 1)


def test_a_step_that_is_repeated_for_a_prompts_logprobs_counts_tokens_once(model, monkeypatch):  # noqa: F811
    asked = [(name, prompt(i), greedy(14, **PENALTIES)) for i, name in ((1, "a"), (2, "b"))]
    asked.append(("c", [5] * 20, greedy(14, prompt_logprobs=2)))
    alone, real = each_alone(model, asked), device_sampling.draw_prompts

    def fails(packed, *rest):
        if packed.stretches:
            raise torch.OutOfMemoryError("made up")
        real(packed, *rest)

    monkeypatch.setattr(device_sampling, "draw_prompts", fails)
    runner = make(model, depth=2)
    check_all_but_failed(runner, *drive(runner, asked, join=0.3, seed=3), alone, 1)


@pytest.mark.parametrize(
    ("place", "name"), [(SamplerRows, "upload"), (CountTables, "_allocate"), (CountTables, "take")]
)
@pytest.mark.parametrize("call", [1, 2, 3, 5, 9])
def test_who_finds_no_memory_at_arrival_leaves_rows_and_counts_as_they_were(model, monkeypatch, place, name, call):  # noqa: F811
    asked = [(f"r{i}", prompt(i % 4), greedy(6, **PENALTIES)) for i in range(12)]
    alone = each_alone(model, asked, num_rows=4)
    runner = make(model, depth=2, num_rows=4)
    count = fails_at(monkeypatch, place, name, call)
    outputs, driven = drive(runner, asked, join=0.3, seed=3)
    check_all_but_failed(runner, outputs, driven, alone, count[0] >= call)


@pytest.mark.parametrize("call", [1, 2])
def test_tables_of_counts_that_cannot_grow_keep_what_they_have(monkeypatch, call):
    """The first or the second of the two tensors is not there."""
    counts, real = CountTables(4, 10, torch.device("cpu")), torch.zeros
    counts.take(3, [1, 2, 2], 1)
    before, left = counts.output_CV.clone(), [call]

    def zeros(*arguments, **settings):
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("made up")
        return real(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", zeros)
        with pytest.raises(torch.OutOfMemoryError):
            counts.take(0, [5], 1)
    counts.check({3})
    assert torch.equal(counts.output_CV, before) and counts.output_CV.sum() == 2
    counts.take(0, [5], 1)
    counts.check({0, 3})


def test_a_table_that_cannot_be_filled_is_free_again(monkeypatch):
    counts = CountTables(4, 10, torch.device("cpu"))
    with monkeypatch.context() as patch:
        fails_at(patch, torch, "ones_like", 1)
        with pytest.raises(torch.OutOfMemoryError):
            counts.take(0, [5, 6], 1)
    counts.check(set())
    counts.take(0, [5, 6], 1)
    counts.check({0})


class Bound(Drive):
    """Each sampling span of "b" comes with a mask."""

    def plan(self):
        plan = super().plan()
        if plan is None:
            return None
        return dataclasses.replace(
            plan, masks=[(s.row, b"\xff" * 12) for s in plan.spans if s.request == "b" and s.samples]
        )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("with_another", [True, False])
def test_who_is_bound_by_a_grammar_and_finds_no_memory_ends_alone(model, monkeypatch, depth, chunk, with_another):  # noqa: F811
    """Its mask comes in the same step, or, behind its prompt's first chunk, in one that is planned before it fails."""
    asked = [("b", prompt(2), greedy(6, constraint=Constraint("regex", "x"))), ("a", prompt(1), greedy(6))]
    asked = asked if with_another else asked[:1]
    alone = each_alone(model, asked)
    monkeypatch.setattr(SamplerRows, "arrive", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("made up")))
    runner = make(model, depth=depth)
    driven = Bound(asked, 8, 96, BLOCK_SIZE, chunk=chunk)
    check_all_but_failed(runner, driven.run(runner), driven, alone, 1)
    departing = [arrival.row for arrival in driven.sequences if arrival.row >= 0] or driven.departed
    runner._sampling.depart(departing)
    assert not runner._sampling.lost


def test_the_row_of_a_token_that_is_none_counts_in_its_own_table():
    counts = CountTables(4, 10, torch.device("cpu"))
    tables = [counts.take(row, [1], 1) for row in range(3)]
    counts.record(torch.tensor(tables), torch.tensor([5, -1, 6]))
    assert counts.output_CV[tables[0]].nonzero().tolist() == [[5]]
    assert counts.output_CV[tables[2]].nonzero().tolist() == [[6]]


@pytest.mark.parametrize("which", ["pinned", "empty"])
def test_staging_that_cannot_grow_stays_as_large_as_it_was(monkeypatch, which):
    slot = Slot(EagerStreams(), 64, torch.zeros(4, dtype=torch.int64))
    slot.take(Timekeeper(slot.streams, 1).begin(idle=True))
    with monkeypatch.context() as patch:
        fails_at(patch, EagerStreams if which == "pinned" else torch, which, 1)
        with pytest.raises(torch.OutOfMemoryError):
            slot.send({"ids": np.arange(40)})
    assert slot.staging_bytes == 64
    for count in (7, 40):
        sent = slot.send({"ids": np.arange(count)})
        slot.streams.wait("compute", slot.moments.ready)
        assert sent["ids"].tolist() == list(range(count))


def test_pinned_memory_that_is_not_there_is_told_as_memory():
    with pytest.raises(torch.OutOfMemoryError, match="pinned"), pinning():
        raise RuntimeError("CUDA error: out of memory")
    with pytest.raises(torch.OutOfMemoryError, match=r"^made up"), pinning():
        raise torch.OutOfMemoryError("made up")
    with pytest.raises(RuntimeError, match="illegal"), pinning():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_runs_out_now_and_then_changes_nobody_elses_tokens(model, monkeypatch, seed):  # noqa: F811
    rng = random.Random(seed)
    kinds = [{}, PENALTIES, {"logprobs": 2}, {"logit_bias": ((5, 3.0),)}, {"prompt_logprobs": 1}]
    asked = [(f"r{i}", prompt(i), greedy(rng.randint(1, 16), **rng.choice(kinds))) for i in range(12)]
    alone = each_alone(model, asked)
    places = [
        (model, "forward"), (CudaRunner, "_send"), (CudaRunner, "_change"), (DeviceSampling, "choose"),
        (SamplerRows, "upload"), (CountTables, "_allocate"), (device_sampling, "logprobs_of"),
        (device_sampling, "process"),
    ]  # fmt: skip
    for place, name in places:
        fails_at(monkeypatch, place, name, *(call for call in range(1, 400) if rng.random() < 0.02))
    runner = make(model, depth=1 + seed % 3)
    outputs, driven = drive(runner, asked, chunk=6, join=0.6, seed=seed)
    num_failed = sum(stream.error is not None for stream in driven.sequences)
    assert 0 < num_failed < 12
    check_all_but_failed(runner, outputs, driven, alone, num_failed)


def test_who_was_preempted_is_no_newer_for_that(model, monkeypatch):  # noqa: F811
    """The older one arrives again, behind the newer one; memory that runs out ends the newer."""
    runner, forward = make(model, depth=1), model.forward
    new = Arrival("new", 0, [1, 2, 3], 3, greedy(4), place=7)
    old = Arrival("old", 1, [4, 5, 6], 2, greedy(4), resumed=True, place=3)

    def small_steps_alone(batch, *rest):
        if len(batch.ids_T) > 3:
            raise torch.OutOfMemoryError("made up")
        return forward(batch, *rest)

    monkeypatch.setattr(model, "forward", small_steps_alone)
    runner.collect(runner.submit(StepPlan(0, [Span("new", 0, 0, 3, [1], True)], [new])))
    spans = [Span("new", 0, 3, 1, [], True), Span("old", 1, 0, 3, [2], True)]
    result = runner.collect(runner.submit(StepPlan(1, spans, [old], num_decodes=1)))
    assert set(result.failed) == {"new"} and len(result.tokens) == 2


def served(model, runner, asked):  # noqa: F811
    """Under the real scheduler with its prefix cache, one request behind the other: tokens, and errors."""
    scheduler, flight, tokens, errors = Scheduler(96, BLOCK_SIZE, 8, 16, 96), deque(), {}, {}
    for request in asked:
        scheduler.add(request)
        while True:
            plan = scheduler.plan() if len(flight) < 2 else None
            if plan is not None:
                flight.append(runner.submit(plan))
            elif not flight:
                break
            if flight and (plan is None or len(flight) == 2):
                for change in scheduler.commit(runner.collect(flight.popleft())):
                    tokens.setdefault(change.request, []).extend(change.tokens)
                    if change.error:
                        errors[change.request] = change.error
    return tokens, errors


def test_who_fails_alone_in_a_step_writes_over_nobodys_blocks(model, monkeypatch):  # noqa: F811
    """Its prompt has a second chunk, planned before the failure of the first is known."""
    warm = Request("warm", [7] * 16, greedy(1))
    alone = Request("alone", [i % 89 for i in range(30)], greedy(4))
    beside = Request("beside", [*[7] * 16, 3], greedy(8))
    want, _ = served(model, make(model, depth=2), [warm, alone, beside])
    count = fails_at(monkeypatch, CudaRunner, "_change", 2)
    tokens, errors = served(model, make(model, depth=2), [warm, alone, beside])
    assert count[0] > 2 and list(errors) == ["alone"] and "out of memory" in errors["alone"]
    assert tokens["beside"] == want["beside"]


def test_memory_that_is_there_neither_at_arrival_nor_behind_it_is_one_failure(model, monkeypatch):  # noqa: F811
    real = CudaRunner._change

    def fails(runner, packed, sent):
        if not any(span.request == "b" for span in packed.plan.spans):
            raise torch.OutOfMemoryError("made up")
        real(runner, packed, sent)

    asked = [Request("a", [5, 6], greedy(3, frequency_penalty=0.5)), Request("b", [7, 8], greedy(3))]
    want, _ = served(model, make(model, depth=2), asked[1:])
    fails_at(monkeypatch, SamplerRows, "upload", 1)
    monkeypatch.setattr(CudaRunner, "_change", fails)
    tokens, errors = served(model, make(model, depth=2), asked)
    assert list(errors) == ["a"] and tokens["b"] == want["b"]
