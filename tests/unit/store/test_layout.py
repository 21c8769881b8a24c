"""Layouts and cuts are integers: every property is checked by enumeration."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import StoreError
from mpispeed.store.layout import BLOCK, ENTRY_ALIGNMENT, FlatLayout, Span

shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.integers(0, 2)), min_size=1, max_size=12).map(
    lambda items: [(f"p{i}", shape, group) for i, (shape, group) in enumerate(items)]
)


@given(tensors, st.integers(1, 9))
def test_entries_are_aligned_disjoint_and_inside(items, parts):
    layout = FlatLayout(items, parts)
    position = 0
    for entry in layout.entries:
        assert entry.offset % ENTRY_ALIGNMENT == 0
        assert entry.offset >= position
        position = entry.span.stop
    assert position <= layout.padded
    assert layout.padded % (parts * BLOCK) == 0


@given(tensors, st.integers(1, 9))
def test_cuts_and_overlaps_cover_every_element_once(items, parts):
    layout = FlatLayout(items, parts)
    seen = {entry.name: [0] * entry.numel for entry in layout.entries}
    for index in range(parts):
        for entry, common in layout.overlaps(layout.cut(index)):
            for element in range(common.start - entry.offset, common.stop - entry.offset):
                seen[entry.name][element] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


@given(tensors, st.integers(1, 5))
def test_holes_are_the_complement_of_entries(items, parts):
    layout = FlatLayout(items, parts)
    covered = sum(hole.numel for hole in layout.holes()) + layout.numel
    assert covered == layout.padded
    assert all(not entry.span.intersect(hole).numel for entry in layout.entries for hole in layout.holes())


@given(tensors)
def test_each_group_is_one_range(items):
    layout = FlatLayout(items, 1)
    spans = dict(layout.group_spans())
    for entry in layout.entries:
        assert spans[entry.group].intersect(entry.span).numel == entry.numel
    ordered = sorted(spans.values(), key=lambda span: span.start)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(ordered))


def test_intersection_of_apart_ranges_is_empty():
    assert Span(0, 3).intersect(Span(5, 9)).numel == 0
    assert Span(2, 8).intersect(Span(4, 20)) == Span(4, 8)


def test_mistakes_are_named():
    with pytest.raises(StoreError, match="at least 1 part"):
        FlatLayout([("a", (1,), 0)], 0)
    with pytest.raises(StoreError, match="same name"):
        FlatLayout([("a", (1,), 0), ("a", (2,), 0)], 1)
    with pytest.raises(StoreError, match="part 2"):
        FlatLayout([("a", (1,), 0)], 2).cut(2)
