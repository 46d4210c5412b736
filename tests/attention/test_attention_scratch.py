"""Scratch memory of the Triton backend: taken once, enough for whatever comes, and counted where the cache is sized."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.attention.contract import AttentionShape, Batch
from tandem.attention.triton import TritonAttention
from tandem.config import Settings
from tandem.models.registry import build, spec_from_config
from tandem.runner import startup

pytest.importorskip("triton")
from tandem.kernels import attention_decode, attention_invariant
from tandem.kernels.attention_form import graph_bound

META = torch.device("meta")
SHAPE = AttentionShape(32, 8, 128, 128**-0.5)  # Llama 3.1 8B


@pytest.fixture(autouse=True)
def no_launches(monkeypatch):
    """Everything up to the launches, for a device of 132 multiprocessors."""
    for module in (attention_decode, attention_invariant):
        monkeypatch.setattr(module, "start", lambda *_, **__: None)
        monkeypatch.setattr(module, "options", lambda *_, **__: {})


def decode(backend, count, max_length, is_uneven=False):
    queries = torch.empty((count, SHAPE.num_heads, SHAPE.head_dim), dtype=torch.bfloat16, device=META)
    cache = torch.empty((2, 16, SHAPE.num_kv_heads, SHAPE.head_dim), dtype=torch.bfloat16, device=META)
    ints = torch.empty((count + 1,), dtype=torch.int32, device=META)
    tables = torch.empty((count, -(-max_length // 16)), dtype=torch.int32, device=META)
    batch = Batch(ints, ints, ints, ints, ints[:count], tables, None, count, 1, max_length, is_uneven=is_uneven)
    backend.attend(queries, cache, cache, batch, SHAPE)


def lengths(most):
    """Exact, of steps with prompts, and the bound of graphs."""
    return st.integers(1, most).flatmap(lambda n: st.sampled_from([n, graph_bound(n)]))


@settings(deadline=None, max_examples=60)
@given(
    deterministic=st.booleans(), num_rows=st.integers(1, 256),
    max_length=st.sampled_from([1, 17, 100, 700, 8192, 131072]), data=st.data(),
)  # fmt: skip
def test_what_was_reserved_at_start_is_enough_and_bounded(deterministic, num_rows, max_length, data):
    backend = TritonAttention(META, deterministic)
    held = backend.reserve(num_rows, max_length, SHAPE, 2)
    assert held == backend.scratch.num_bytes < 80 << 20
    steps = st.tuples(st.integers(1, num_rows), lengths(max_length), st.booleans())
    for count, longest, is_uneven in [
        (num_rows, max_length, True),
        (num_rows, graph_bound(max_length), False),
        *data.draw(st.lists(steps, max_size=12)),
    ]:
        decode(backend, count, longest, is_uneven)
    assert backend.scratch.num_bytes == held and not backend.scratch.retired


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(st.integers(1, 256), lengths(32768)), min_size=1, max_size=40))
def test_without_a_reservation_what_is_kept_for_graphs_is_no_more_than_what_is_used(steps):
    backend, scratch, most = TritonAttention(META, True), None, 0
    for count, longest in sorted(steps):
        alone = TritonAttention(META, True)
        decode(alone, count, longest)
        most = max(most, alone.scratch.num_bytes)
        decode(backend, count, longest)
        scratch = backend.scratch
        kept = sum(tensor.nbytes for tensor in scratch.retired)
        assert kept <= scratch.num_bytes - kept and scratch.num_bytes <= 4 * most


@pytest.mark.parametrize("deterministic", [True, False])
def test_it_is_counted_where_the_cache_is_sized(deterministic, monkeypatch):
    """The largest step that is measured has no decodes, so their scratch memory is counted beside it."""
    config = {
        "model_type": "llama", "vocab_size": 89, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    }  # fmt: skip
    model = build(spec_from_config(config), torch.float32, "cpu")
    for target in model.targets().values():
        target.write(torch.zeros(target.shape))
    backend = TritonAttention(torch.device("cpu"), deterministic)
    monkeypatch.setattr(backend, "attend", lambda queries, *_: torch.zeros_like(queries))
    weights = 5 << 20

    def allocated(_):  # weights, the trial's cache of two blocks, and what the backend holds
        return weights + 2 * 2 * 16 * 4 * 8 * 4 + backend.scratch.num_bytes

    monkeypatch.setattr(startup, "torch", SimpleNamespace(**{**vars(torch), "cuda": SimpleNamespace(
        synchronize=lambda _: None, empty_cache=lambda: None, reset_peak_memory_stats=lambda _: None,
        memory_allocated=allocated, max_memory_allocated=lambda device: allocated(device) + (3 << 20),
        mem_get_info=lambda _: (1 << 30, 2 << 30), memory_reserved=lambda _: 1 << 20,
    )}))  # fmt: skip
    asked = Settings(dtype="float32", max_num_seqs=64, max_batch_tokens=32, max_model_len=4096, block_size=16)
    facts = startup.measure(model, backend, asked, torch.float32, None)
    assert facts.weights == weights and backend.scratch.num_bytes > 0
    assert facts.activations == (3 << 20) + backend.scratch.num_bytes
