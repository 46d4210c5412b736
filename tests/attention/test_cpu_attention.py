"""The CPU backend against the reference, and the reference against the formula, on mixed and ragged batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.attention import cpu
from tandem.attention.choice import attention_backend
from tandem.attention.contract import AttentionShape, Batch
from tandem.attention.cpu import CpuAttention
from tandem.attention.reference import ReferenceAttention
from tandem.errors import SettingError


def make(
    spans: list[tuple[int, int]], shape: AttentionShape, block_size: int, padding: int = 0, on_host: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Batch]:
    """Random queries and caches for spans (start, length), with scattered blocks and arbitrary table ends."""
    generator = torch.Generator().manual_seed(len(spans) + block_size)
    columns = max(-(-(start + count) // block_size) for start, count in spans) + 1
    num_blocks = len(spans) * columns + 2
    tables_SB = torch.randperm(num_blocks, generator=generator)[: len(spans) * columns].view(len(spans), columns)
    caches = (
        torch.randn(num_blocks, block_size, shape.num_kv_heads, shape.head_dim, generator=generator) for _ in "kv"
    )
    lengths, starts = [start + count for start, count in spans], [0]
    for _, count in spans:
        starts.append(starts[-1] + count)
    starts += [starts[-1]] * padding
    tables_SB = torch.cat((tables_SB, torch.zeros(padding, columns, dtype=torch.int64)))
    num_decodes = next((n for n, (_, count) in enumerate(spans) if count != 1), len(spans))
    batch = Batch(
        ids_T=torch.zeros(starts[-1], dtype=torch.int64),
        positions_T=torch.cat([torch.arange(start, start + count) for start, count in spans]),
        slots_T=torch.zeros(starts[-1], dtype=torch.int64),
        query_starts_S1=torch.tensor(starts, dtype=torch.int32),
        lengths_S=torch.tensor(lengths + [0] * padding, dtype=torch.int32),
        tables_SB=tables_SB.to(torch.int32),
        sampled_R=None,
        num_decodes=num_decodes,
        max_query=max(count for _, count in spans),
        max_length=max(lengths),
        host_spans=spans if on_host else [],
    )
    queries_THD = torch.randn(starts[-1], shape.num_heads, shape.head_dim, generator=generator)
    keys_NPKD, values_NPKD = caches
    return queries_THD, keys_NPKD, values_NPKD, batch


def agree(spans: list[tuple[int, int]], shape: AttentionShape, block_size: int, **rest: int) -> None:
    queries_THD, keys_NPKD, values_NPKD, batch = make(spans, shape, block_size, **rest)
    expected = ReferenceAttention().attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)
    backend = CpuAttention()
    backend.prepare(batch, block_size)
    for _ in range(2):
        found = backend.attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def shape_of(heads: int = 4, kv_heads: int = 2, dim: int = 64, **rest: object) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, dim**-0.5, **rest)  # type: ignore[arg-type]


MIXED = [(37, 1), (0, 1), (15, 1), (16, 1), (20, 9), (0, 33), (5, 1)]


@pytest.mark.parametrize("window", [None, 1, 7, 16, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("block_size", [16, 1, 5])
def test_mixed_batch(window: int | None, softcap: float | None, block_size: int) -> None:
    agree(MIXED, shape_of(window=window, softcap=softcap), block_size)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_large_groups(window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches when no group is small enough for batched products."""
    monkeypatch.setattr(cpu, "PRODUCTS_LIMIT_BYTES", 0)
    agree(MIXED, shape_of(window=window, softcap=softcap), 16)
    agree([(9, 1)], shape_of(9, 3, window=window, softcap=softcap), 5)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("limit_bytes", [cpu.PRODUCTS_LIMIT_BYTES, 0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("block_size", [16, 1, 5])
def test_what_is_left_of_others_in_the_cache_reaches_nobody(
    name: str, limit_bytes: int, window: int | None, softcap: float | None, block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """NaN in every slot that belongs to none of the requests, behind the ends of tables and of last blocks too."""
    monkeypatch.setattr(cpu, "PRODUCTS_LIMIT_BYTES", limit_bytes)
    shape = shape_of(window=window, softcap=softcap)
    queries_THD, keys_NPKD, values_NPKD, batch = make([(90, 1), (2, 1), *MIXED], shape, block_size)
    expected = ReferenceAttention().attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)
    is_own_NP = torch.zeros(keys_NPKD.shape[:2], dtype=torch.bool)
    for table_B, length in zip(batch.tables_SB, batch.lengths_S.tolist(), strict=True):
        place = torch.arange(length)
        is_own_NP[table_B[place // block_size].long(), place % block_size] = True
    for cache_NPKD in (keys_NPKD, values_NPKD):
        cache_NPKD[~is_own_NP] = torch.nan
    found = attention_backend(name, "cpu").attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (8, 4), (9, 3), (16, 1)])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_head_groups_and_dimensions(heads: int, kv_heads: int, dim: int) -> None:
    agree(MIXED, shape_of(heads, kv_heads, dim), 16)


@settings(deadline=None, max_examples=40)
@given(
    decodes=st.lists(st.integers(0, 400), max_size=6),
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=3),
    block_size=st.sampled_from([1, 4, 16, 32]),
    window=st.none() | st.integers(1, 80),
    padding=st.integers(0, 2),
)
def test_any_batch(
    decodes: list[int], chunks: list[tuple[int, int]], block_size: int, window: int | None, padding: int
) -> None:
    spans = [(start, 1) for start in decodes] + chunks
    if spans:
        agree(spans, shape_of(4, 2, 16, window=window), block_size, padding=padding, on_host=padding == 0)


def test_decodes_of_very_different_lengths_do_not_pad_each_other() -> None:
    """3 short rows beside one of 2,000 positions: the gathered positions stay near the sum of the lengths."""
    spans = [(20, 1), (1999, 1), (25, 1), (30, 1)]
    shape = shape_of(2, 1, 16)
    queries_THD, keys_NPKD, values_NPKD, batch = make(spans, shape, 16)
    backend = CpuAttention()
    backend.attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)
    (work,) = batch.scratch.values()
    assert sum(len(group.blocks_C) * 16 for group in work.groups) < 2000 + 3 * 100  # type: ignore[attr-defined]
    agree(spans, shape, 16)


def test_a_window_gathers_only_what_it_sees() -> None:
    shape = shape_of(2, 1, 16, window=32)
    queries_THD, keys_NPKD, values_NPKD, batch = make([(999, 1), (500, 1), (600, 8)], shape, 16)
    CpuAttention().attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)
    (work,) = batch.scratch.values()
    assert sum(len(group.blocks_C) for group in work.groups) <= 6  # type: ignore[attr-defined]
    assert [len(span.blocks_B) for span in work.spans] == [3]  # type: ignore[attr-defined]


def test_reference_equals_the_formula() -> None:
    """One query, written out by hand: softmax over the visible positions only."""
    shape = AttentionShape(2, 1, 4, 0.5, window=3)
    queries_THD, keys_NPKD, values_NPKD, batch = make([(6, 1)], shape, 4)
    table = batch.tables_SB[0].tolist()
    seen = [(keys_NPKD[table[p // 4], p % 4, 0], values_NPKD[table[p // 4], p % 4, 0]) for p in (4, 5, 6)]
    for head in range(2):
        weights = torch.stack([0.5 * torch.dot(queries_THD[0, head], key) for key, _ in seen]).softmax(0)
        expected = sum(weight * value for weight, (_, value) in zip(weights, seen, strict=True))
        found = ReferenceAttention().attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)[0, head]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_padding_is_zero(name: str) -> None:
    shape = shape_of()
    queries_THD, keys_NPKD, values_NPKD, batch = make([(3, 1), (9, 1)], shape, 16, on_host=False)
    batch.lengths_S[1] = 0
    found = attention_backend(name, "cpu").attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)
    assert bool((found[1] == 0).all()) and bool((found[0] != 0).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    shape = shape_of()
    queries_THD, keys_NPKD, values_NPKD, batch = make(MIXED, shape, 16)
    expected = ReferenceAttention().attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)
    lowered = (x.to(dtype) for x in (queries_THD, keys_NPKD, values_NPKD))
    found = CpuAttention().attend(*lowered, batch, shape)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)


def test_choice() -> None:
    assert attention_backend(None, "cpu").name == "cpu"
    assert attention_backend("reference", "cuda").name == "reference"
    with pytest.raises(SettingError, match="'cpu' cannot run on cuda"):
        attention_backend("cpu", "cuda")
    with pytest.raises(SettingError, match="'spiral'"):
        attention_backend("spiral", "cpu")


def test_deterministic_decodes_are_the_same_bits_beside_any_neighbours() -> None:
    shape, lengths = shape_of(), [37, 0, 90, 200, 61, 150]
    queries_THD, keys_NPKD, values_NPKD, batch = make([(start, 1) for start in lengths], shape, 16)
    backend = attention_backend(None, "cpu", deterministic=True)
    together_THD = backend.attend(queries_THD, keys_NPKD, values_NPKD, batch, shape)
    for span, start in enumerate(lengths):
        alone = Batch(
            *(batch.ids_T[:1], batch.positions_T[:1], batch.slots_T[:1], batch.query_starts_S1[:2]),
            batch.lengths_S[span : span + 1], batch.tables_SB[span : span + 1], None, 1, 1, start + 1,
            host_spans=[(start, 1)],
        )  # fmt: skip
        found = backend.attend(queries_THD[span : span + 1], keys_NPKD, values_NPKD, alone, shape)
        assert torch.equal(found[0], together_THD[span])
