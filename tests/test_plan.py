"""Plans and changes as columns: whoever looks at one sees what a list would hold."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.plan import Changes, Span, Spans, StepPlan, grown, others_of
from tandem.request import Change

CHUNKS = [Span("c", 7, 0, 5, (9, 8), False), Span("d", 8, 4, 1, (), True)]


def columns(num_columns: int, num_others: int) -> tuple[Spans, list[Span]]:
    """The same spans as columns and as a list."""
    rows = [2 * i for i in range(num_columns)]
    blocks = {row: (40 + row, 41 + row) for row in rows[::3]}
    spans = Spans(11, [f"r{row}" for row in rows], rows, [row + 5 for row in rows], blocks, CHUNKS[:num_others])
    plain = [Span(f"r{row}", row, row + 16, 1, blocks.get(row, ()), True) for row in rows]
    return spans, plain + CHUNKS[:num_others]


@given(st.integers(0, 6), st.integers(0, 2), st.slices(8))
@settings(deadline=None, max_examples=60)
def test_spans_are_the_list_they_stand_for(num_columns: int, num_others: int, part: slice) -> None:
    spans, plain = columns(num_columns, num_others)
    assert list(spans) == plain and len(spans) == len(plain)
    assert [spans[i] for i in range(-len(plain), len(plain))] == plain + plain
    assert spans[part] == plain[part]
    assert sorted(grown(spans)) == sorted(grown(plain)) == sorted((s.row, s.blocks) for s in plain if s.blocks)
    with pytest.raises(IndexError):
        spans[len(plain)]
    assert StepPlan(11, spans, num_decodes=num_columns).num_tokens == sum(span.length for span in plain)


def test_a_plan_of_columns_can_be_pickled() -> None:
    plan = StepPlan(11, columns(4, 2)[0], num_decodes=4)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_changes_are_the_list_they_stand_for() -> None:
    ends = [Change("c", (3, 4), "stop"), Change("d", (), "abort")]
    changes = Changes(["a", "b"], [5, 6], ends)
    plain = [Change("a", (5,)), Change("b", (6,)), *ends]
    assert list(changes) == plain and len(changes) == 4 and changes[-1] == ends[1]
    assert others_of(changes) == ends and others_of(plain) == plain
