"""FlashInfer's prefill in the steps of the GPU runner: which steps take it, and on a GPU that it never waits."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from runner_drive import Drive, greedy

from tandem.attention import flashinfer
from tandem.attention.contract import KVCache
from tandem.layers.linear import linear_scheme
from tandem.models.registry import build, spec_from_config
from tandem.runner.cuda import CudaRunner
from tandem.runner.device_sampling import GREEDY
from tandem.runner.streams import CudaStreams, EagerStreams

pytest.importorskip("triton")
NUM_BLOCKS, BLOCK_SIZE = 600, 16


def model_of(place, dtype, head_dim, hidden_size):
    config = {
        "model_type": "llama", "vocab_size": 997, "hidden_size": hidden_size, "intermediate_size": hidden_size,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim,
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip
    model = build(spec_from_config(config), dtype, place, linear=linear_scheme(None, place, False))
    generator = torch.Generator().manual_seed(1)
    for _, target in sorted(model.targets().items()):
        weight = torch.randn(target.shape, generator=generator)
        target.write((weight * target.shape[-1] ** -0.5 if len(target.shape) > 1 else 1 + 0.1 * weight).to(dtype))
    return model


def runner_of(model, backend, streams):
    spec, place = model.spec, model.embedding_VE.device
    cache = KVCache.allocate(
        2, NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, model.embedding_VE.dtype, place
    )
    return CudaRunner(model, cache, backend, streams, num_rows=8, max_length=2048, max_tokens=2048, depth=2)


class Recording(Drive):
    """Keeps the spans of several tokens of each step that has any."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.long: list[list[tuple[int, int]]] = []

    def plan(self):
        plan = super().plan()
        spans = [(span.start, span.length) for span in (plan.spans if plan else ()) if span.length > 1]
        self.long += [spans] if spans else []
        return plan


def recording(runner, chunk, lengths):
    asked = [(f"r{i}", [(31 * i + 17 * j * j) % 997 for j in range(n)], greedy(4)) for i, n in enumerate(lengths)]
    driven = Recording(asked, 8, NUM_BLOCKS, BLOCK_SIZE, chunk=chunk, join=0.5)
    return driven.run(runner), driven.long


def counted(module, plans):
    """The same module, whose plans are kept: (tokens, tokens in the cache) of each span."""

    def plan(*args):
        starts, lengths = args[3].tolist(), args[5].tolist()
        spans = zip(pairwise(starts), lengths, strict=True)
        plans.append([(total - (end - start), end - start) for (start, end), total in spans])
        return module.plan(*args)

    return SimpleNamespace(plan=plan, paged_run=module.paged_run)


@pytest.mark.filterwarnings("ignore")  # of the interpreter's numpy
@torch.inference_mode()
def test_steps_with_prompts_are_planned_once_from_what_the_host_knows(monkeypatch):
    monkeypatch.setattr(flashinfer, "paged_is_worth_it", lambda spans: sum(length for _, length in spans) > 20)
    plans, runs = [], []
    module = SimpleNamespace(plan=lambda *a: None, paged_run=lambda *a: runs.append(a[3].shape[0]) or a[10].zero_())
    place = torch.device("cpu")
    backend = flashinfer.FlashInferAttention(place, counted(module, plans), torch.float32, 16)
    runner = runner_of(model_of(place, torch.float32, 16, 64), backend, EagerStreams())
    _, long = recording(runner, 16, [40, 9, 33, 21])
    expected = [spans for spans in long if sum(length for _, length in spans) > 20]
    assert plans == expected and 2 <= len(expected) < len(long)
    assert runs == [sum(length for _, length in spans) for spans in expected for _ in range(2)], "once a layer"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of what FlashInfer imports
@torch.inference_mode()
def test_gpu_steps_do_not_synchronise():
    """Chunks, mixed steps and graphs, two steps in flight: near what our kernels give, and the host never waits."""
    from tandem.attention.triton import TritonAttention

    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    place = torch.device("cuda", 0)
    try:
        backend = flashinfer.flashinfer_attention(place, torch.bfloat16, 128, deterministic=False, builds=False)
    except flashinfer.UnavailableError as reason:
        pytest.skip(str(reason))
    model, plans = model_of(place, torch.bfloat16, 128, 512), []
    backend._module = counted(backend._module, plans)

    def run(backend):
        runner = runner_of(model, backend, CudaStreams(place))
        runner.warm_up((GREEDY,), 60.0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return recording(runner, 400, [700 + 90 * i for i in range(6)])
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run(backend)  # compiles
    plans.clear()
    found, long = run(backend)
    assert sorted(map(sorted, plans)) == sorted(sorted(spans) for spans in long if flashinfer.paged_is_worth_it(spans))
    expected, _ = run(TritonAttention(place))
    first = [found[id][0] == expected[id][0] for id in expected]
    assert sum(first) >= len(first) - 1, "the first tokens, up to a near tie"
