"""Triton attention through the contract against float64: mixed batches, scattered tables, poisoned slots."""

import re

import pytest
import torch
from sm90 import ptx_of

from tandem.attention.contract import AttentionShape, Batch
from tandem.attention.triton import TritonAttention
from tandem.kernels.attention_form import DecodeForm

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [  # of the interpreter's numpy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
SHAPES = [  # query heads, KV heads, head dimension, block size, window, softcap
    (4, 1, 64, 16, None, None), (3, 3, 80, 16, 20, None), (16, 1, 64, 32, None, 8.0), (6, 2, 128, 64, 17, None),
    (2, 1, 256, 16, None, None),
]  # fmt: skip


def case(shape, spans, seed=0):
    """spans: (tokens in the step, tokens in the cache with them); those of one token first."""
    heads, kv, dim, block, window, softcap = shape
    generator = torch.Generator().manual_seed(seed)
    queries, lengths = [n for n, _ in spans], [n for _, n in spans]
    width = -(-max(lengths) // block)
    pool = len(spans) * width + 3
    tables = torch.randperm(pool, generator=generator)[: len(spans) * width].view(len(spans), width)
    keys, values = (torch.randn(pool, block, kv, dim, generator=generator) for _ in range(2))
    for table, length in zip(tables, lengths, strict=True):  # what lies behind a span must not matter, be it NaN
        for position in range(length, width * block):
            keys[table[position // block], position % block] = torch.nan
            values[table[position // block], position % block] = torch.nan
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()])
    empty = torch.empty(0, dtype=torch.int64)
    batch = Batch(
        empty, empty, empty, starts.int().to(DEVICE), torch.tensor(lengths).int().to(DEVICE), tables.int().to(DEVICE),
        None, sum(n == 1 for n in queries), max(queries), max(lengths),
        host_spans=[(total - n, n) for n, total in spans],
    )  # fmt: skip
    hidden = torch.randn(sum(queries), heads, dim, generator=generator)
    asked = AttentionShape(heads, kv, dim, dim**-0.5, window, softcap)
    return hidden.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), batch, asked


def slow(queries, keys, values, batch, asked):
    out = torch.zeros(queries.shape, dtype=torch.float64, device=DEVICE)
    for span, length in enumerate(batch.lengths_S.tolist()):
        first, last = batch.query_starts_S1[span : span + 2].tolist()
        columns = torch.arange(length, device=DEVICE)
        blocks = batch.tables_SB[span, columns // keys.shape[1]].long()
        group = asked.num_heads // asked.num_kv_heads
        k, v = (c[blocks, columns % keys.shape[1]].double().repeat_interleave(group, 1) for c in (keys, values))
        score = torch.einsum("thd,nhd->htn", queries[first:last].double(), k) * asked.scale
        if asked.softcap:
            score = asked.softcap * torch.tanh(score / asked.softcap)
        positions = torch.arange(length - (last - first), length, device=DEVICE)[:, None]
        hidden = columns > positions
        if asked.window:
            hidden |= columns <= positions - asked.window
        out[first:last] = torch.einsum("htn,nhd->thd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return out


def assert_near(got, want):
    error = (got.double() - want).norm() / want.norm()
    assert error < 1e-5, f"relative error {error:.2e}"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    from tandem.kernels import attention_invariant, attention_prefill

    for module in (attention_invariant, attention_prefill):
        for name, size in (("NEAR", 64), ("SHORT", 32), ("LONG", 64)):
            monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_mixed_batch(shape, deterministic):
    sent = case(shape, [(1, 1), (1, 37), (9, 9), (13, 41), (2, 64)])
    backend = TritonAttention(torch.device(DEVICE), deterministic)
    assert_near(backend.attend(*sent), slow(*sent))


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_of_a_decode(splits, monkeypatch):
    sent = case((4, 2, 64, 16, None, None), [(1, 90), (1, 1), (1, 64)])
    backend = TritonAttention(torch.device(DEVICE))
    monkeypatch.setattr(backend, "decode_form", lambda *_: DecodeForm(splits, 16))
    for _ in range(2):  # the tickets of the first launch must be back at zero
        assert_near(backend.attend(*sent), slow(*sent))
    assert not backend.scratch.tickets.any()


def test_spans_that_scratch_cannot_hold_at_once_are_attended_in_turns(monkeypatch):
    from tandem.kernels import attention_invariant

    spans = [(1, length) for length in (90, 1, 64, 33, 70, 17, 96, 2, 9)]
    sent = case((4, 2, 64, 16, None, None), spans)
    backend, launched, start = TritonAttention(torch.device(DEVICE), True), [], attention_invariant.start
    at_once = backend.attend(*sent)
    assert_near(at_once, slow(*sent))
    monkeypatch.setattr(attention_invariant, "SCRATCH_BYTES", 0)
    monkeypatch.setattr(attention_invariant, "start", lambda *a, **k: launched.append(1) or start(*a, **k))
    backend = TritonAttention(torch.device(DEVICE), True)
    assert torch.equal(backend.attend(*sent), at_once) and not backend.scratch.tickets.any()
    assert len(launched) == 3 and backend.scratch.num_bytes == 4 * 3 * 4 * (64 + 2) * 4 + 4 * 4 * 2


def test_the_order_of_spans_changes_no_result(monkeypatch):
    sent = case((4, 2, 64, 16, None, None), [(1, 20), (1, 90), (1, 1), (1, 64)])
    backend = TritonAttention(torch.device(DEVICE))
    monkeypatch.setattr(backend, "decode_form", lambda *_: DecodeForm(1, 16, by_length=True))
    as_they_come = backend.attend(*sent)
    sent[3].order_S = torch.tensor([1, 3, 0, 2], device=DEVICE)
    assert torch.equal(backend.attend(*sent), as_they_come)
    assert_near(as_they_come, slow(*sent))


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("splits", [2, 4])
def test_ordered_splits_are_shares_of_the_longest_span(splits, window, monkeypatch):
    from tandem.kernels import attention_decode

    sent = case((4, 2, 64, 16, window, None), [(1, 20), (1, 90), (1, 1), (1, 64), (1, 33)])
    sent[3].lengths_S[2] = 0  # padding
    sent[3].order_S = torch.tensor([1, 3, 4, 0, 2], device=DEVICE)
    sent[3].is_uneven = True
    backend = TritonAttention(torch.device(DEVICE))
    monkeypatch.setattr(backend, "decode_form", lambda *_: DecodeForm(splits, 16, by_length=True))
    real, orders = attention_decode.decode_attention, []
    monkeypatch.setattr(
        attention_decode, "decode_attention", lambda *a, **k: orders.append(k["order_S"]) or real(*a, **k)
    )
    for _ in range(2):
        got = backend.attend(*sent)
        assert not got[2].any() and orders[-1] is sent[3].order_S
        kept = torch.tensor([0, 1, 3, 4], device=DEVICE)
        sent[3].lengths_S[2] = 1
        assert_near(got[kept], slow(*sent)[kept])
        sent[3].lengths_S[2] = 0
    assert not backend.scratch.tickets.any()


def test_padding_rows_give_zeros():
    queries, keys, values, batch, asked = case((4, 2, 64, 16, None, None), [(1, 20), (1, 5)])
    batch.lengths_S[1] = 0
    for deterministic in (False, True):
        out = TritonAttention(torch.device(DEVICE), deterministic).attend(queries, keys, values, batch, asked)
        assert not out[1].any() and out[0].any()


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize(("num_queries", "length"), [(12, 75), (40, 40), (80, 140)])
def test_deterministic_decode_equals_deterministic_prefill_bit_for_bit(window, num_queries, length):
    shape = (4, 2, 64, 16, window, None)
    queries, keys, values, batch, asked = case(shape, [(num_queries, length)])
    backend = TritonAttention(torch.device(DEVICE), deterministic=True)
    whole = backend.attend(queries, keys, values, batch, asked)
    for token in {0, 5, 31, 32, num_queries - 1} & set(range(num_queries)):
        one = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
        batch.lengths_S[0] = length - num_queries + token + 1
        alone = Batch(
            batch.ids_T, batch.positions_T, batch.slots_T, one, batch.lengths_S, batch.tables_SB, None, 1, 1, 200
        )
        got = backend.attend(queries[token : token + 1].contiguous(), keys, values, alone, asked)
        assert torch.equal(got[0], whole[token])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (8, 2, 128, 16, None, None), (4, 2, 128, 32, 300, 30.0), (10, 2, 64, 16, None, None), (16, 1, 96, 64, 77, None),
        (8, 8, 64, 16, None, 20.0), (32, 1, 128, 16, None, None), (2, 1, 256, 16, None, None),
    ],
    ids=str,
)  # fmt: skip
def test_deterministic_decode_of_few_and_many_equals_prefill_on_a_card(dtype, shape, monkeypatch):
    """Few spans are attended in tiles of 64 rows, many in tiles of 16, prompts in tiles of 64, and all add up alike."""
    monkeypatch.undo()  # chunks of the real sizes
    lengths = [1, 64, 127, 128, 129, 500, 511, 512, 513, 768, 1000, 1313]
    queries, keys, values, batch, asked = case(shape, [(min(length, 70), length) for length in lengths])
    queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    backend = TritonAttention(torch.device(DEVICE), deterministic=True)
    last = batch.query_starts_S1[1:].long() - 1
    want = backend.attend(queries, keys, values, batch, asked)[last]
    for copies in (1, 60):
        starts = torch.arange(copies * len(lengths) + 1, dtype=torch.int32, device=DEVICE)
        lengths_S, tables_SB = batch.lengths_S.repeat(copies), batch.tables_SB.repeat(copies, 1)
        decodes = Batch(
            batch.ids_T, batch.positions_T, batch.slots_T, starts, lengths_S, tables_SB, None, len(lengths_S), 1, 1313
        )
        got = backend.attend(queries[last].repeat(copies, 1, 1), keys, values, decodes, asked)
        assert torch.equal(got, want.repeat(copies, 1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(8, 2, 128, 16, None, None), (4, 2, 128, 32, 300, 30.0), (16, 1, 96, 64, 77, None)], ids=str
)
@pytest.mark.parametrize(
    "lengths", [(1, 64, 127), (128, 129, 500, 512), (65,) * 16, (511,) * 16, (513, 1000, 1313)], ids=str
)
def test_deterministic_decode_that_reads_ahead_equals_prefill_on_a_card(lengths, shape, dtype, monkeypatch):
    from tandem.kernels.attention_invariant import invariant_form

    monkeypatch.undo()  # chunks of the real sizes
    queries, keys, values, batch, asked = case(shape, [(min(length, 70), length) for length in lengths])
    queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    assert invariant_form(len(lengths), max(lengths), keys, shape[0] // shape[1], shape[4]).ahead
    backend = TritonAttention(torch.device(DEVICE), deterministic=True)
    last = batch.query_starts_S1[1:].long() - 1
    want = backend.attend(queries, keys, values, batch, asked)[last]
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    decodes = Batch(
        batch.ids_T, batch.positions_T, batch.slots_T, starts, batch.lengths_S, batch.tables_SB, None, len(lengths), 1,
        max(lengths),
    )  # fmt: skip
    for _ in range(3):
        assert torch.equal(backend.attend(queries[last], keys, values, decodes, asked), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize("num_spans", [1, 4, 8, 16, 24, 32, 40, 96, 200])
def test_every_form_of_a_decode_on_a_card(dtype, is_uneven, num_spans):
    lengths = torch.randint(1, 700, (num_spans,), generator=torch.Generator().manual_seed(num_spans)).tolist()
    queries, keys, values, batch, asked = case((16, 8, 128, 16, None, None), [(1, length) for length in lengths])
    batch.is_uneven, batch.order_S = is_uneven, batch.lengths_S.argsort(descending=True)
    queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    backend, want = TritonAttention(torch.device(DEVICE)), slow(queries, keys, values, batch, asked)
    for _ in range(2):
        out = backend.attend(queries, keys, values, batch, asked).double()
        assert out.isfinite().all() and (out - want).norm() / want.norm() < 6e-3
    assert not backend.scratch.tickets.any()


@pytest.mark.parametrize(("num_spans", "max_length", "window"), [(3, 90, None), (1, 400, 40), (9, 200, 20)])
def test_deterministic_programs_are_as_many_as_a_window_needs(num_spans, max_length, window):
    from tandem.kernels.attention_invariant import invariant_form

    def chunk(position):
        return position // 32 if position < 64 else 2 + (position - 64) // 64

    form = invariant_form(num_spans, max_length, torch.empty(3, 16, 2, 64), 2, window)
    for length in range(1, max_length + 1):
        first = 0 if window is None else max(length - window, 0) // form.tile * form.tile
        touched = {chunk(position) for position in range(first, length)}
        assert len(touched) <= form.num_chunks


@pytest.mark.parametrize("spans", [[(37, 37), (20, 20)], [(48, 48)], [(1, 9), (1, 30), (37, 37), (20, 20)]])
def test_whole_prompts_by_the_library(spans, monkeypatch):
    from tandem.kernels import attention_library as library

    monkeypatch.setattr(library, "STEP", 16)
    queries, keys, values, batch, asked = case((4, 2, 64, 16, None, None), spans)
    keys, values = keys.nan_to_num(), values.nan_to_num()
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    real, taken = library.whole_prompt_attention, []
    monkeypatch.setattr(library, "is_worth_it", lambda start, *_: start == 0)
    monkeypatch.setattr(library, "whole_prompt_attention", lambda *a: taken.append(a[5]) or real(*a))
    out = TritonAttention(torch.device(DEVICE)).attend(queries, keys, values, batch, asked)
    want = slow(queries, keys, values, batch, asked)
    assert taken == [length for length, _ in spans if length > 1] and out.is_contiguous()
    assert (out.double() - want).norm() / want.norm() < (2e-3 if DEVICE == "cuda" else 1e-5)


def test_the_library_is_asked_where_it_was_faster():
    from tandem.kernels import attention_library as library

    assert library.is_worth_it(0, 8192, torch.bfloat16, 128) and library.is_worth_it(0, 2500, torch.bfloat16, 128)
    assert not library.is_worth_it(16, 8192, torch.bfloat16, 128)
    assert not library.is_worth_it(0, 100, torch.bfloat16, 128)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("splits", "num_warps"), [(1, 2), (2, 1), (4, 2)])
def test_a_tile_read_ahead_holds_the_steps_own_token(shape, splits, num_warps, monkeypatch):
    sent = case(shape, [(1, 90), (1, 1)] if splits == 4 else [(1, 64), (1, 65)])
    backend = TritonAttention(torch.device(DEVICE))
    monkeypatch.setattr(backend, "decode_form", lambda *_: DecodeForm(splits, 16, num_warps, ahead=True))
    want = slow(*sent)
    for _ in range(2):
        assert_near(backend.attend(*sent), want)
    sent[3].lengths_S[1] = 0  # padding, whatever its table names
    got = backend.attend(*sent)
    assert not got[1].any() and torch.equal(got[0], backend.attend(*sent)[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chunk_read_ahead_gives_the_same_numbers(shape, monkeypatch):
    from tandem.kernels import attention_invariant as invariant

    sent = case(shape, [(1, 90), (1, 65), (1, 64), (1, 1)])
    backend, form = TritonAttention(torch.device(DEVICE), deterministic=True), invariant.invariant_form
    outs = []
    for ahead in (False, True):
        monkeypatch.setattr(invariant, "invariant_form", lambda *a, ahead=ahead: form(*a)._replace(ahead=ahead))
        outs.append(backend.attend(*sent).clone())
        sent[3].lengths_S[3] = 0  # padding, whatever its table names
        outs.append(backend.attend(*sent))
        sent[3].lengths_S[3] = 1
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3]), "to the bit"
    assert not outs[3][3].any() and torch.equal(outs[3][:3], outs[2][:3])


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_read_ahead_is_not_the_steps_own_token(deterministic, monkeypatch):
    from tandem.kernels import attention_decode as decode
    from tandem.kernels import attention_invariant as invariant

    bounds, load_tile, form = [], decode.load_tile, invariant.invariant_form

    def noting(keys, values, table, columns, length, *more):
        bounds.append(int(length.handle.data.max()))
        return load_tile(keys, values, table, columns, length, *more)

    monkeypatch.setattr(invariant if deterministic else decode, "load_tile", noting)
    monkeypatch.setattr(invariant, "invariant_form", lambda *a: form(*a)._replace(ahead=True))
    backend = TritonAttention(torch.device(DEVICE), deterministic)
    if not deterministic:
        monkeypatch.setattr(backend, "decode_form", lambda *_: DecodeForm(1, 16, 2, ahead=True))
    sent = case((4, 2, 64, 16, None, None), [(1, 33)])
    assert_near(backend.attend(*sent), slow(*sent))
    early = [bound for bound in bounds if bound == 32]  # the line of position 32 stays out of L1 until it is written
    assert early and bounds[0] == 32


AHEAD = """
from tandem.kernels import attention_decode
queries, cache = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((1, 8, 64), (9, 16, 2, 64)))
table, length = torch.zeros(1, 8, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
attention_decode.decode_attention(
    queries, cache, cache, table, length, queries, attention_decode.Scratch(queries.device), 1.0, 1, num_warps=4,
    num_stages=1, ahead=True,
)
"""


AHEAD_INVARIANT = """
from tandem.kernels import attention_decode, attention_invariant
queries, cache = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((1, 8, 64), (9, 16, 2, 64)))
table, length = torch.zeros(1, 8, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
attention_invariant.invariant_decode_attention(
    queries, cache, cache, table, length, 100, queries, attention_decode.Scratch(queries.device), 1.0
)
"""


@pytest.mark.parametrize(("call", "requests"), [(AHEAD, 16), (AHEAD_INVARIANT, 8)])  # of 128 and 64 tokens a tile
def test_a_tile_is_asked_for_before_the_wait_and_the_steps_own_token_after(call, requests):
    before, after = ptx_of(call).split("griddepcontrol.wait")
    wide, past_l1 = r"ld\.global\.v4", r"ld\.global\.cg\.v4"
    assert len(re.findall(wide, before)) == requests and not re.findall(past_l1, before), "keys and values"
    unmerged = after.split("atom.")[0]
    assert len(re.findall(past_l1, unmerged)) == 2, "key and value of the token that the kernel before has written"
