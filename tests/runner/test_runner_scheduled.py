"""Runners under the real scheduler: preemption in a small pool, prefix hits, forks, grammars, ghosts."""

from collections import deque

import pytest
import torch

from tandem.attention.contract import KVCache
from tandem.attention.reference import ReferenceAttention
from tandem.models.registry import build, spec_from_config
from tandem.request import Constraint, Request, SamplingParams
from tandem.runner.cpu import CpuRunner
from tandem.runner.cuda import CudaRunner
from tandem.runner.streams import EagerStreams
from tandem.schedule.scheduler import Scheduler

CONFIG = {
    "model_type": "qwen3", "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
BLOCK_SIZE, MAX_LENGTH = 4, 128


@pytest.fixture(scope="module")
def model():
    model = build(spec_from_config(CONFIG), torch.float32, "cpu")
    torch.manual_seed(2)
    for target in model.targets().values():
        target.write(torch.randn(target.shape) * (0.3 if len(target.shape) > 1 else 1.0))
    return model


def make(kind, model, num_blocks, depth, num_rows=8):
    spec = model.spec
    shape = (spec.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    cache = KVCache.allocate(*shape, torch.float32, torch.device("cpu"))
    how = {"num_rows": num_rows, "max_length": MAX_LENGTH, "depth": depth}
    if kind == "cpu":
        return CpuRunner(model, cache, ReferenceAttention(), **how)
    return CudaRunner(model, cache, ReferenceAttention(), EagerStreams(), max_tokens=48, **how)


def run(runner, requests, *, chunk=48, prefix_cache=True, masks=None, later=()):
    """All tokens by request, and the scheduler when it is done."""
    facts = runner.facts
    scheduler = Scheduler(
        facts.num_blocks, BLOCK_SIZE, facts.num_rows, chunk, MAX_LENGTH, prefix_cache=prefix_cache
    )  # fmt: skip
    for request in requests:
        scheduler.add(request, (masks or {}).get(request.id))
    outputs, errors, flight, later = {r.id: [] for r in (*requests, *later)}, {}, deque(), list(later)
    while not scheduler.idle or later:
        if scheduler.idle:
            scheduler.add(later.pop(0))
        plan = scheduler.plan() if len(flight) < runner.depth else None
        if plan is not None:
            flight.append(runner.submit(plan))
        if flight and (plan is None or len(flight) == runner.depth):
            for change in scheduler.commit(runner.collect(flight.popleft())):
                outputs[change.request] += change.tokens
                if change.error:
                    errors[change.request] = change.error
            scheduler.check()
    runner.close()
    assert not errors
    return outputs, scheduler


def requests_of(count):
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=20),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=22),
    ]
    return [
        Request(f"r{i}", [(5 * i * j + j) % 101 for j in range(4 + (9 * i) % 26)], kinds[i % 3]) for i in range(count)
    ]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_c01_tokens_survive_preemption_at_every_depth(model, kind):
    asked = requests_of(7)
    alone = {}
    for request in asked:
        alone |= run(make(kind, model, 64, 1), [request])[0]
    for depth in (1, 2, 3):
        outputs, scheduler = run(make(kind, model, 28, depth), asked, chunk=16)
        assert outputs == alone
        assert scheduler.statistics().num_preemptions > 0


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_prefix_hits_and_forks_change_no_token(model, kind):
    shared = [(7 * j) % 101 for j in range(26)]
    first = Request("a", shared, SamplingParams(temperature=0.8, seed=1, max_tokens=12))
    forks = [
        Request(f"a{i}", shared, SamplingParams(temperature=0.8, seed=1 + i, max_tokens=12), fork_of="a")
        for i in range(1, 4)
    ]
    late = Request("b", [*shared[:20], 3, 4], SamplingParams(temperature=0.0, max_tokens=8))
    alone = {}
    for request in (first, *forks, late):
        single = Request(request.id, request.prompt, request.params)
        alone |= run(make(kind, model, 64, 1), [single], prefix_cache=False)[0]
    outputs, scheduler = run(make(kind, model, 64, 2), [first, *forks], later=[late])
    assert outputs == alone and len({tuple(tokens) for tokens in outputs.values()}) > 3
    assert scheduler.statistics().kv.num_hit_tokens == 20 and scheduler.statistics().kv.num_copies == 3


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_end_by_a_stop_token_leaves_a_ghost_that_harms_nobody(model, kind):
    asked = requests_of(6)
    whole, _ = run(make(kind, model, 96, 1), asked)
    ends = [Request(r.id, r.prompt, r.params, eos=[whole[r.id][5]] if i % 2 else ()) for i, r in enumerate(asked)]
    expected = {
        r.id: whole[r.id][: whole[r.id].index(r.eos[0]) + 1] if r.eos else whole[r.id] for r in ends
    }  # fmt: skip
    for depth in (1, 2, 4):
        assert run(make(kind, model, 96, depth, num_rows=3), ends)[0] == expected


class Odd:
    """A grammar of odd ids."""

    def allowed(self):
        words = bytearray(16)
        for token in range(1, 101, 2):
            words[token // 8] |= 1 << token % 8
        return bytes(words)

    def accept(self, tokens):
        assert all(token % 2 for token in tokens)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_grammar_binds_its_own_request_alone(model, kind):
    free, bound = requests_of(2)
    bound = Request(
        "g", bound.prompt, SamplingParams(temperature=0.0, max_tokens=10, constraint=Constraint("regex", "odd"))
    )
    alone, _ = run(make(kind, model, 64, 1), [free])
    outputs, _ = run(make(kind, model, 64, 2), [free, bound], masks={"g": Odd()})
    assert outputs["r0"] == alone["r0"]
    assert len(outputs["g"]) == 10 and all(token % 2 for token in outputs["g"])
