"""What a GPU computes: bfloat16 near float32, and in deterministic mode the same tokens whatever runs beside them."""

import pytest
import torch
from runner_drive import Drive, greedy

from tandem.attention.contract import Batch, KVCache
from tandem.attention.reference import ReferenceAttention
from tandem.layers.linear import linear_scheme
from tandem.models.registry import build, spec_from_config
from tandem.runner.cuda import CudaRunner

pytestmark = pytest.mark.gpu

SHAPES = {
    "llama": {
        "model_type": "llama", "vocab_size": 4099, "hidden_size": 512, "intermediate_size": 1408,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3", "vocab_size": 66001, "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
}  # fmt: skip
BLOCK_SIZE, MAX_LENGTH, NUM_BLOCKS = 16, 512, 1600


def model_of(name, dtype, invariant=False):
    device = torch.device("cuda")
    model = build(spec_from_config(SHAPES[name]), dtype, device, linear=linear_scheme(None, device, invariant))
    generator = torch.Generator().manual_seed(3)
    for _, target in sorted(model.targets().items()):
        weight = torch.randn(target.shape, generator=generator)
        weight = weight * target.shape[-1] ** -0.5 if len(target.shape) > 1 else 1.0 + 0.1 * weight
        target.write(weight.bfloat16())  # the same numbers in either dtype
    return model


def cache_of(model):
    spec, dtype = model.spec, model.embedding_VE.dtype
    shape = (spec.num_layers, NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    return KVCache.allocate(*shape, dtype, torch.device("cuda"))


def logits_of(model, backend, ids_ST, chunks):
    """float32 [S, chunks' last tokens, V] of prompts computed in chunks; chunks of one token are decode steps."""
    cache, found, start = cache_of(model), [], 0
    spans, length = ids_ST.shape
    width = -(-length // BLOCK_SIZE)
    tables = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))[: spans * width]
    tables = tables.view(spans, width).cuda()
    for chunk in chunks:
        end = start + chunk
        positions = torch.arange(start, end, device="cuda")
        slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = torch.arange(spans + 1, device="cuda") * chunk
        batch = Batch(
            ids_ST[:, start:end].reshape(-1).cuda(), positions.repeat(spans), slots.reshape(-1), starts.int(),
            torch.full((spans,), end, dtype=torch.int32, device="cuda"), tables.int(), starts[1:] - 1,
            spans if chunk == 1 else 0, chunk, end, host_spans=[(start, chunk)] * spans,
        )  # fmt: skip
        found.append(model.logits(model(batch, cache, backend)))
        start = end
    return torch.stack(found, 1)


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_bfloat16_logits_are_near_float32(name):
    from tandem.attention.triton import TritonAttention

    ids_ST = torch.randint(0, 4099, (6, 90), generator=torch.Generator().manual_seed(2))
    chunks = [40, 33, *[1] * 17]
    torch.backends.cuda.matmul.allow_tf32 = False
    want = logits_of(model_of(name, torch.float32), ReferenceAttention(), ids_ST, chunks)
    for invariant in (False, True):
        backend = TritonAttention(torch.device("cuda"), invariant)
        got = logits_of(model_of(name, torch.bfloat16, invariant), backend, ids_ST, chunks)
        error = float((got.double() - want.double()).norm() / want.double().norm())
        assert error < 2e-2, f"deterministic {invariant}: relative error {error:.2e}"


@pytest.mark.parametrize("name", SHAPES)
def test_deterministic_tokens_alone_and_among_63_neighbours(name):
    from tandem.attention.triton import TritonAttention
    from tandem.runner.streams import CudaStreams

    model, place = model_of(name, torch.bfloat16, True), torch.device("cuda", 0)
    asked = [
        (f"r{i}", [(31 * i + 17 * j * j) % 4099 for j in range(1 + (13 * i) % 150)], greedy(20 + i % 40))
        for i in range(64)
    ]

    def outputs_of(requests, depth, uses_graphs, **how):
        runner = CudaRunner(
            model, cache_of(model), TritonAttention(place, True), CudaStreams(place), num_rows=64,
            max_length=MAX_LENGTH, max_tokens=2048, depth=depth, uses_graphs=uses_graphs,
        )  # fmt: skip
        return Drive(requests, 64, NUM_BLOCKS, BLOCK_SIZE, **how).run(runner)

    alone = {}
    for request in asked[::9]:
        alone |= outputs_of([request], 1, False)
    for depth, uses_graphs, chunk in ((1, True, None), (2, True, 37), (2, False, None)):
        among = outputs_of(asked, depth, uses_graphs, chunk=chunk, join=0.7, seed=depth)
        assert {name: among[name] for name in alone} == alone, f"depth {depth}, graphs {uses_graphs}"
