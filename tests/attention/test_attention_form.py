"""The form in which a decode step's attention is launched: numbers that were measured on one H200 (docs/log.md)."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kernels import attention_invariant, attention_prefill
from tandem.kernels.attention_form import decode_form, graph_bound
from tandem.kernels.launch import Target


def form(num_spans, max_length=2048, is_uneven=False, head_dim=128, item_bytes=2, group=4, capability=(9, 0)):
    return decode_form(num_spans, max_length, 8, group, head_dim, item_bytes, Target(capability, 132), is_uneven)


def test_splits_follow_batch_and_length():
    splits = {asked: form(*asked).num_splits for asked in ((256, 4096), (64, 4352), (8, 512), (1, 100_000), (1, 20))}
    assert list(splits.values()) == [1, 1, 8, 64, 1]
    assert [form(n, is_uneven=True).num_splits for n in (256, 128, 64, 32, 8, 1)] == [1, 1, 2, 4, 8, 32]


def test_the_first_tile_is_read_ahead_where_that_was_faster():
    assert [n for n in (1, 4, 5, 8, 15, 16, 32, 33, 256) if form(n, 9000).ahead] == [1, 4, 16, 32]
    one_tile = [(n, length) for n in (1, 2, 4, 16) for length in (512, 2048) if form(n, length).num_stages == 1]
    assert one_tile == [(1, 512), (1, 2048), (2, 512), (4, 512)]


def test_chunks_are_read_ahead_where_few_programs_of_four_warps_are(monkeypatch):
    for module in (attention_invariant, attention_prefill):
        monkeypatch.setattr(module, "interpreted", lambda: False)
    cache = torch.empty((2, 16, 8, 128), dtype=torch.bfloat16, device="meta")
    found = {
        (n, length): attention_invariant.invariant_form(n, length, cache, 2)[3:]
        for n in (1, 4, 5, 16, 32)
        for length in (512, 2048)
    }
    ahead = {asked: form for asked, form in found.items() if form[2]}
    assert ahead == {(1, 512): (4, 1, True), (1, 2048): (4, 2, True), (4, 512): (4, 1, True), (4, 2048): (4, 2, True),
                     (16, 512): (4, 1, True)}  # fmt: skip
    assert found[32, 512] == (1, 3, False) and found[5, 512] == (4, 3, False)


def test_sixteen_to_thirty_two_even_spans_have_many_thin_programs():
    for num_spans, splits in ((16, 8), (20, 4), (32, 4)):
        assert form(num_spans) == (splits, 32, 1, 3, True, False)
        assert form(num_spans, is_uneven=True)[1:3] == (64, 2)
        assert form(num_spans, head_dim=64)[1:3] == (128, 2) and form(num_spans, item_bytes=4).num_warps == 2
        for other in ({"group": 17}, {"capability": (8, 0)}, {"capability": (10, 0)}):
            assert form(num_spans, **other)[1:3] == (64, 2), "not measured, or too many query heads for one warp"


def test_programs_that_are_alike_have_one_warp_where_that_fills_their_last_wave():
    spans = (64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert [n for n in spans if form(n).num_warps == 1] == [96, 192]
    assert not [n for n in spans if form(n, is_uneven=True).num_warps == 1 or form(n, head_dim=64).num_warps == 1]


def test_the_longest_spans_go_first_where_spans_are_whole_or_split_further_than_usual():
    assert [n for n in (8, 17, 32, 64, 66, 67, 256) if form(n, is_uneven=True).by_length] == [17, 32, 64, 66, 67, 256]
    assert [n for n in (8, 17, 32, 64, 66, 67, 256) if form(n).by_length] == [64, 66, 67, 256]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 600), st.integers(1, 1 << 20), st.booleans(), st.sampled_from([64, 96, 128, 256]))
def test_any_step_has_a_form(num_spans, max_length, is_uneven, head_dim):
    found = form(num_spans, max_length, is_uneven, head_dim)
    assert 1 <= found.num_splits <= 64 and found.tile in (32, 64, 128) and found.num_warps in (1, 2, 4)
    assert graph_bound(max_length) >= max(max_length, 256) and graph_bound(max_length).bit_count() == 1
    bound = form(num_spans, graph_bound(max_length), is_uneven, head_dim)
    assert bound.num_splits >= found.num_splits, "what was reserved for the bound is enough"
