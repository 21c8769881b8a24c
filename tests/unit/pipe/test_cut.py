"""Cuts of layers into parts: known results, what always holds, and the best of all cuts by trying them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import StageError
from mpispeed.pipe import partition_balanced, partition_bottleneck, partition_uniform
from mpispeed.pipe.cut import cut_by_method

WEIGHTS = st.lists(st.one_of(st.integers(0, 20), st.floats(0, 1e6, allow_nan=False)), min_size=1, max_size=9)


def parts_of(weights, borders):
    """Weight of each part."""
    return [sum(weights[first:stop]) for first, stop in itertools.pairwise(borders)]


def assert_valid(borders, count, parts):
    assert len(borders) == parts + 1
    assert borders[0] == 0
    assert borders[-1] == count
    assert borders == sorted(borders)
    assert all(type(border) is int for border in borders)


def all_cuts(count, parts):
    """Every cut without empty parts."""
    for inner in itertools.combinations(range(1, count), parts - 1):
        yield [0, *inner, count]


@pytest.mark.parametrize(
    ("count", "parts", "borders"),
    [
        (10, 3, [0, 4, 7, 10]),
        (9, 2, [0, 5, 9]),
        (2, 4, [0, 1, 2, 2, 2]),
        (11, 4, [0, 3, 6, 9, 11]),
        (4, 4, [0, 1, 2, 3, 4]),
        (0, 2, [0, 0, 0]),
        (7, 1, [0, 7]),
    ],
)
def test_uniform(count, parts, borders):
    assert partition_uniform(count, parts) == borders


@pytest.mark.parametrize(
    ("weights", "parts", "borders"),
    [
        ([1] * 8, 4, [0, 2, 4, 6, 8]),
        ([1] * 10, 3, [0, 4, 7, 10]),
        ([0, 1, 2, 3, 3, 3], 4, [0, 3, 4, 5, 6]),
        ([0, 1.1, 1.9, 3, 3, 3], 4, [0, 3, 4, 5, 6]),
        ([0, 1.1, 30, 3], 3, [0, 2, 3, 4]),
        ([10, 1, 1, 1, 1, 10], 2, [0, 3, 6]),
        (range(1, 10), 3, [0, 5, 7, 9]),
    ],
)
def test_balanced(weights, parts, borders):
    assert partition_balanced(weights, parts) == borders


@pytest.mark.parametrize(
    ("weights", "parts", "spread"),
    [([1, 2, 1], 4, 2), ([1] * 4, 4, 0), ([1] * 5, 4, 1), ([1, 1, 1, 1, 0, 1], 4, 1)],
)
def test_balanced_reaches_the_expected_spread(weights, parts, spread):
    found = parts_of(weights, partition_balanced(weights, parts))
    assert max(found) - min(found) == spread


def plain_balanced(weights, parts):
    """The rule in words of one loop over cells: the reference for the vectorised one."""
    n, inf = len(weights), float("inf")
    sums = [0.0, *itertools.accumulate(map(float, weights))]
    cells = {(0, 0): (0.0, inf, 0.0, 0)}
    for i in range(1, n + 1):
        for j in range(1, parts + 1):
            best = (inf, inf, inf, 0)
            for k in range(i):
                most, least, _, _ = cells.get((k, j - 1), (inf, inf, inf, 0))
                last = sums[i] - sums[k]
                most, least = max(most, last), min(least, last)
                if best[2] >= most - least:
                    best = (most, least, most - least, k)
            cells[i, j] = best
    borders = [n]
    for j in range(parts, 0, -1):
        borders.append(cells[borders[-1], j][3])
    return borders[::-1]


@given(WEIGHTS, st.integers(1, 6))
def test_balanced_is_the_documented_rule(weights, parts):
    borders = partition_balanced(weights, parts)
    assert_valid(borders, len(weights), parts)
    expected = plain_balanced(weights, parts) if len(weights) > parts else partition_uniform(len(weights), parts)
    assert borders == expected


@given(WEIGHTS, st.integers(1, 5))
def test_bottleneck_is_the_best_of_all_cuts(weights, parts):
    borders = partition_bottleneck(weights, parts)
    assert_valid(borders, len(weights), parts)
    if len(weights) > parts:
        best = min(max(parts_of(weights, cut)) for cut in all_cuts(len(weights), parts))
        assert max(parts_of(weights, borders)) == pytest.approx(best, rel=1e-9)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_bottleneck_then_looks_at_loads(weights, parts, data):
    loads = [
        data.draw(st.lists(st.integers(0, 20), min_size=len(weights), max_size=len(weights))) for _ in range(parts)
    ]
    slack = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    borders = partition_bottleneck(weights, parts, loads=loads, slack=slack)
    assert_valid(borders, len(weights), parts)
    if len(weights) <= parts:
        return

    def load(cut):
        return max(sum(row[first:stop]) for row, (first, stop) in zip(loads, itertools.pairwise(cut), strict=True))

    cuts = list(all_cuts(len(weights), parts))
    limit = min(max(parts_of(weights, cut)) for cut in cuts) * (1 + slack) * (1 + 1e-9)
    allowed = [cut for cut in cuts if max(parts_of(weights, cut)) <= limit]
    assert max(parts_of(weights, borders)) <= limit
    assert load(borders) == min(map(load, allowed))


def test_spread_and_bottleneck_are_different_aims():
    weights = [1, 2, 3, 4, 1, 9, 2]
    assert partition_balanced(weights, 3) == [0, 3, 5, 7]  # 6, 5, 11
    assert partition_bottleneck(weights, 3) == [0, 4, 6, 7]  # 10, 10, 2
    assert partition_bottleneck([1] * 8, 4) == [0, 2, 4, 6, 8]


@given(st.integers(0, 200), st.integers(1, 40))
def test_uniform_parts_differ_by_one_at_most(count, parts):
    borders = partition_uniform(count, parts)
    assert_valid(borders, count, parts)
    sizes = [stop - first for first, stop in itertools.pairwise(borders)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


NAMES = ["Embedding", "TransformerLayer", "relu", "transformerlayer", "Norm"]


@pytest.mark.parametrize(
    ("method", "borders"),
    [
        ("uniform", [0, 3, 5]),
        ("Uniform", [0, 3, 5]),
        ("parameters", [0, 1, 5]),
        ("PARAMETERS", [0, 1, 5]),
        ("best", [0, 1, 5]),
        ("type:transformer", [0, 3, 5]),
        ("TYPE:^TRANSFORMER", [0, 3, 5]),
    ],
)
def test_methods(method, borders):
    assert cut_by_method(method, NAMES, lambda: [50, 10, 10, 10, 10], 2) == borders


def test_parameters_are_counted_only_where_they_are_needed():
    counted = []
    cut_by_method("uniform", NAMES, lambda: counted.append(1), 2)
    cut_by_method("type:norm", NAMES, lambda: counted.append(1), 2)
    assert counted == []


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("type:nothing", "matches no layer; the layers are of the types Embedding, Norm, "),
        ("type:(", "is no regular expression"),
        ("fastest", "'fastest' is unknown; choose"),
    ],
)
def test_methods_that_are_refused(method, text):
    with pytest.raises(StageError, match=text) as raised:
        cut_by_method(method, NAMES, lambda: [1] * 5, 2)
    assert isinstance(raised.value, RuntimeError)


@pytest.mark.parametrize("cut", [partition_balanced, partition_bottleneck])
def test_weights_that_are_refused(cut):
    for weights in ([1, -1, 2], [1, float("nan"), 2], [float("inf"), 1, 1]):
        with pytest.raises(StageError, match="finite and not negative"):
            cut(weights, 2)
    with pytest.raises(StageError, match="at least one part"):
        cut([1, 2], 0)
