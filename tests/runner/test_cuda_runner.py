"""The GPU runner's logic, acted out on the CPU (EagerStreams): the tokens of the CPU runner, whatever the path.

Copies there are put off until an event is waited for, so a missing wait or a buffer that is written again too early
would change tokens. tests/runner/test_cuda_device.py has what needs a GPU.
"""

import numpy as np
import pytest
import torch
from runner_drive import Drive, greedy

from tandem.attention.contract import KVCache
from tandem.attention.reference import ReferenceAttention
from tandem.kernels.sample import NOBODY, winners_torch
from tandem.models.registry import build, spec_from_config
from tandem.request import SamplingParams
from tandem.runner.cpu import CpuRunner
from tandem.runner.cuda import CudaRunner
from tandem.runner.device_sampling import GENERAL, GREEDY, PLAIN
from tandem.runner.slots import Slot
from tandem.runner.streams import EagerStreams

CONFIG = {
    "model_type": "llama", "vocab_size": 89, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "tie_word_embeddings": True,
}  # fmt: skip
BLOCK_SIZE, MAX_LENGTH = 4, 96


@pytest.fixture(scope="module")
def model():
    model = build(spec_from_config(CONFIG), torch.float32, "cpu")
    torch.manual_seed(1)
    for target in model.targets().values():
        target.write(torch.randn(target.shape) * (0.3 if len(target.shape) > 1 else 1.0))
    return model


def cache_of(model, num_blocks=96):
    spec = model.spec
    return KVCache.allocate(
        spec.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, torch.float32, torch.device("cpu")
    )


def make(model, **how):
    how = {"num_rows": 8, "max_length": MAX_LENGTH, "max_tokens": 64, **how}
    return CudaRunner(model, cache_of(model), ReferenceAttention(), EagerStreams(), **how)


def prompt(i):
    return [(7 * i + 3 * j) % 89 for j in range(1 + (5 * i) % 23)]


def requests(params_of, count=8):
    return [(f"r{i}", prompt(i), params_of(i)) for i in range(count)]


def drive(runner, asked, **how):
    driven = Drive(asked, runner.facts.num_rows, runner.facts.num_blocks, BLOCK_SIZE, **how)
    return driven.run(runner), driven


def plain(i):
    return SamplingParams(temperature=0.5 + 0.1 * i, top_k=(0, 5, 20)[i % 3], top_p=(1.0, 0.8)[i % 2], max_tokens=14)


def general(i):
    kinds = [
        greedy(20), plain(i),
        SamplingParams(temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=18),
        greedy(12, logit_bias=((5, 3.0),), min_tokens=4, presence_penalty=0.7), greedy(9, logprobs=2),
    ]  # fmt: skip
    return kinds[i % len(kinds)]


@pytest.mark.parametrize("uses_graphs", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_greedy_tokens_are_the_cpu_runners(model, depth, uses_graphs):
    asked = requests(lambda i: greedy(10 + i))
    cpu = CpuRunner(model, cache_of(model), ReferenceAttention(), num_rows=8, max_length=MAX_LENGTH)
    expected, _ = drive(cpu, asked)
    cpu.close()
    for chunk, preempt in ((None, 0.0), (5, 0.05)):
        outputs, driven = drive(
            make(model, depth=depth, uses_graphs=uses_graphs), asked, chunk=chunk, preempt=preempt, join=0.5, seed=depth
        )
        assert outputs == expected
        assert driven.num_steady > 3


class LateStreams(EagerStreams):
    """What the constructor starts is on another stream, which a busy device comes to when the first step is at work."""

    def __init__(self):
        super().__init__()
        self.late = []

    def settle(self):
        while self.late:
            self.late.pop()()


def test_steps_begin_when_what_they_work_on_is_there(model, monkeypatch):
    asked, streams = requests(lambda i: greedy(12)), LateStreams()

    class Elsewhere:
        def __getattr__(self, name):
            return getattr(torch, name)

        def full(self, *args, **how):
            made = torch.zeros_like(whole := torch.full(*args, **how))
            streams.late.append(lambda: made.copy_(whole))
            return made

    def forward(*args, **how):
        streams.settle()
        return type(model).forward(model, *args, **how)

    expected, _ = drive(make(model, depth=2), asked, join=0.4, seed=8)
    with monkeypatch.context() as patch:
        patch.setattr("tandem.runner.cuda.torch", Elsewhere())
        runner = CudaRunner(
            model, cache_of(model), ReferenceAttention(), streams, num_rows=8, max_length=MAX_LENGTH, max_tokens=64,
            depth=2,
        )  # fmt: skip
    monkeypatch.setattr(model, "forward", forward)
    assert drive(runner, asked, join=0.4, seed=8)[0] == expected


@pytest.mark.parametrize("params_of", [plain, general])
def test_tokens_depend_on_nothing_but_the_request(model, params_of):
    asked = requests(params_of)
    alone = {}
    for request in asked:
        alone |= drive(make(model, depth=1, uses_graphs=False), [request])[0]
    for depth, chunk, preempt, uses_graphs in ((2, 6, 0.05, True), (3, None, 0.0, True), (4, 3, 0.0, False)):
        runner = make(model, depth=depth, uses_graphs=uses_graphs)
        assert drive(runner, asked, chunk=chunk, preempt=preempt, join=0.6, seed=depth)[0] == alone
        if uses_graphs:
            assert runner.statistics()["graphs"] > 0


def test_a_steady_step_copies_nothing_in_and_new_blocks_lie_in_pinned_memory(model, monkeypatch):
    sent, posted, post = [], [], Slot.post
    monkeypatch.setattr(Slot, "post", lambda slot, *rows: posted.append(4 * sum(map(len, rows))) or post(slot, *rows))

    class Counting(EagerStreams):
        def copy(self, stream, target, source):
            if stream == "in":
                sent.append(source.nbytes)
            super().copy(stream, target, source)

    runner = CudaRunner(
        model, cache_of(model), ReferenceAttention(), Counting(), num_rows=8, max_length=MAX_LENGTH, max_tokens=64
    )
    _, driven = drive(runner, [(f"r{i}", [1, 2, 3], greedy(33)) for i in range(4)])
    steps = 33
    assert driven.num_steady == steps - 2
    assert len(sent) == 2, "the prompts, and the list of rows"
    assert posted == [4 * 8] * 8, "a new block every fourth step, for all rows at once"


def test_every_path_of_a_graph_is_used_and_padding_writes_nowhere(model):
    cache = cache_of(model)
    runner = CudaRunner(
        model, cache, ReferenceAttention(), EagerStreams(), num_rows=16, max_length=MAX_LENGTH, max_tokens=64
    )
    runner.warm_up((GREEDY, PLAIN), 60.0)
    assert runner.statistics()["graphs"] == 2 * len(runner._graphs.buckets)
    assert not any(layer.any() for layer in (*cache.keys, *cache.values)), "warming up wrote into the cache"
    asked = requests(general, 9)  # 9 spans in a bucket of 10
    drive(runner, asked)
    paths = {key.path for key in runner._graphs._replays}
    assert paths == {GREEDY, PLAIN, GENERAL}
    assert all(key.bucket in runner._graphs.buckets for key in runner._graphs._replays)


def test_logprobs_and_prompt_logprobs_come_home(model):
    asked = [("a", prompt(4), greedy(6, logprobs=3, prompt_logprobs=1)), ("b", prompt(2), greedy(8))]
    cpu = CpuRunner(model, cache_of(model), ReferenceAttention(), num_rows=8, max_length=MAX_LENGTH)
    _, expected = drive(cpu, asked, chunk=7)
    cpu.close()
    _, driven = drive(make(model, depth=3), asked, chunk=7)
    ours, theirs = driven.sequences[0], expected.sequences[0]
    for kind in ("logprobs", "prompt_logprobs"):
        pairs = list(zip(getattr(ours, kind), getattr(theirs, kind), strict=True))
        assert len(pairs) >= 6
        for one, other in pairs:
            assert (one.token, one.rank) == (other.token, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [t for t, _ in one.top] == [t for t, _ in other.top]


def test_out_of_memory_ends_the_newest_request_of_the_step_alone(model):
    class Hungry(torch.nn.Module):
        spec, logits, embedding_VE = model.spec, model.logits, model.embedding_VE
        raise_winners = model.raise_winners

        def forward(self, batch, cache, backend):
            if len(batch.ids_T) > 20:
                raise torch.OutOfMemoryError("made up")
            return model(batch, cache, backend)

    asked = [("a", prompt(1), greedy(12)), ("b", prompt(2), greedy(12)), ("c", [5] * 30, greedy(12))]
    alone = {}
    for request in asked[:2]:
        alone |= drive(make(model), [request])[0]
    for depth in (1, 2, 3):
        runner = make(Hungry(), depth=depth)
        outputs, driven = drive(runner, asked)
        assert "out of memory" in driven.sequences[2].error
        assert outputs == {**alone, "c": []}
        assert runner.statistics()["out_of_memory"] >= 1


@pytest.mark.parametrize("uses_graphs", [False, True])
def test_greedy_steps_take_winners_where_products_raise_them(model, uses_graphs, monkeypatch):
    asked, raised = requests(lambda i: greedy(9 + i)), []
    want = drive(make(model), asked)[0]
    runner = make(model, uses_graphs=uses_graphs)

    def raise_winners(hidden_RE, num_tokens, winners_RW):
        assert (winners_RW == NOBODY).all(), "the last step has left them so"
        winners_RW[:, 0] = winners_torch(model.logits(hidden_RE)[:, :num_tokens])
        raised.append(len(hidden_RE))
        return True

    monkeypatch.setattr(model, "raise_winners", raise_winners)
    assert drive(runner, asked)[0] == want and raised
    assert (runner._lanes.winners_SW == NOBODY).all()
    monkeypatch.setattr(model, "raise_winners", lambda _, __, winners_RW: winners_RW[:, :1].fill_(SEVEN) is not None)
    wrong = drive(make(model, uses_graphs=uses_graphs), asked)[0]
    assert all(set(tokens[1:]) == {7} for tokens in wrong.values()), "all but the first, which prompts' steps choose"


def test_steps_with_sampled_rows_take_no_winners(model, monkeypatch):
    asked = requests(lambda i: SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=12))
    want = drive(make(model), asked)[0]

    def refuse(*_):
        raise AssertionError("a sampled row's token is not its best")

    monkeypatch.setattr(model, "raise_winners", refuse)
    assert drive(make(model), asked)[0] == want


SEVEN = (5 << 32) | (0x7FFFFFFF - 7)


def test_memory_that_a_step_in_flight_owns_is_not_written(model):
    runner = make(model, depth=2)
    driven = Drive([("a", [1, 2], greedy(9))], 8, 96, BLOCK_SIZE)
    tickets = [runner.submit(driven.plan()), runner.submit(driven.plan())]
    with pytest.raises(AssertionError, match="depth"):
        runner.submit(driven.plan())
    with pytest.raises(AssertionError, match="not the oldest"):
        runner.collect(type(tickets[0])(99, 1))
    times = runner.collect(tickets[0]).times
    assert times.submitted_s <= times.began_s <= times.computed_s <= times.home_s


def test_a_step_brings_no_more_than_its_memory_was_made_for(model, monkeypatch):
    """Prompt log-probabilities of a full budget, every row new, and whole tables at once: nothing is allocated."""
    allocated = []
    pinned = EagerStreams.pinned
    monkeypatch.setattr(EagerStreams, "pinned", lambda streams, size: allocated.append(size) or pinned(streams, size))
    runner = make(model, max_tokens=8 * 20)
    made = len(allocated)
    asked = [
        (f"r{i}", [i] * 20, SamplingParams(temperature=0.9, max_tokens=5, logprobs=20, prompt_logprobs=20))
        for i in range(8)
    ]
    drive(runner, asked)
    slot = runner._slots[0]
    slot.take(runner._times.begin(idle=True))
    slot.send({"growth": np.zeros((2, 8 * (MAX_LENGTH // BLOCK_SIZE + 1)), dtype=np.int32)})
    assert len(allocated) == made


@pytest.mark.parametrize("method", ["_send", "_change", "_resend"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_memory_that_runs_out_beside_the_forward_pass_ends_the_newest_request_alone(model, monkeypatch, method, step):
    asked = [("a", prompt(1), greedy(12)), ("b", prompt(2), greedy(12)), ("c", prompt(3), greedy(12))]
    alone = {}
    for request in asked[:2]:
        alone |= drive(make(model), [request])[0]
    real, forward, left = getattr(CudaRunner, method), model.forward, [step]

    def fails(*arguments):
        left[0] -= 1
        if left[0] == -1:
            raise torch.OutOfMemoryError("made up")
        return real(*arguments)

    runner = make(model, depth=2)
    if method == "_resend":  # memory runs out in the forward pass, and again as the rest is sent

        def too_much(batch, *rest):
            if len(batch.ids_T) > 8:
                raise torch.OutOfMemoryError("made up")
            return forward(batch, *rest)

        monkeypatch.setattr(model, "forward", too_much)
        left[0], alone = 0, {**alone, "b": []}
    monkeypatch.setattr(CudaRunner, method, fails)
    outputs, driven = drive(runner, asked)
    errors = [stream.error for stream in driven.sequences]
    assert errors[0] is None and "out of memory" in errors[2]
    assert outputs["a"] == alone["a"] and (outputs["b"] == alone["b"] or "out of memory" in errors[1])
    assert (errors[1] is None) == (method != "_resend")


def test_memory_that_is_never_there_ends_requests_and_not_the_runner(model, monkeypatch):
    asked = [("a", prompt(1), greedy(3)), ("b", prompt(2), greedy(3))]
    runner, real = make(model, depth=2), Slot.send

    def never(*_):
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(Slot, "send", never)
    outputs, driven = drive(runner, asked)
    assert outputs == {"a": [], "b": []} and all("out of memory" in stream.error for stream in driven.sequences)
    monkeypatch.setattr(Slot, "send", real)
    asked, taken = [("d", prompt(2), greedy(5))], [row for row in range(8) if runner._packer.rows.rows[row] is not None]
    driven = Drive(asked, 8, 96, BLOCK_SIZE, departed=taken)
    driven.step = runner.statistics()["steps"]
    assert driven.run(runner) == drive(make(model), asked)[0]


def test_blocks_are_copied_without_memory_for_a_copy(model, monkeypatch):
    cache, sources, targets = cache_of(model, 9), torch.tensor([1, 2]), torch.tensor([7, 8])
    for layer in (*cache.keys, *cache.values):
        layer.copy_(torch.randn(layer.shape))
    index = torch.Tensor.__getitem__

    def full(tensor, which):
        if isinstance(which, torch.Tensor):
            raise torch.OutOfMemoryError("made up")
        return index(tensor, which)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__getitem__", full)
        cache.copy_blocks(sources, targets)
    for layer in (*cache.keys, *cache.values):
        assert torch.equal(layer[7:9], layer[1:3])
