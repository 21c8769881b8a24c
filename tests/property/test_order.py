"""The order of use: whatever repeats is predicted exactly, and whatever deviates is survived."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.sharding.use_order import Order

SIZES = [3, 5, 1, 8, 13, 2]
uses = st.tuples(st.integers(0, len(SIZES) - 1), st.booleans())
sequences = st.lists(uses, min_size=1, max_size=40)


def without_repeats(sequence):
    return [use for i, use in enumerate(sequence) if i == 0 or use != sequence[i - 1]]


def go(order, sequence, kind="train"):
    order.begin(kind)
    for unit, is_backward in sequence:
        order.note(unit, is_backward=is_backward)


def predicted(order):
    return list(order.upcoming(10**6))


@given(sequences)
def test_what_was_used_once_is_predicted_the_next_time(sequence):
    order, distinct = Order(SIZES), without_repeats(sequence)
    go(order, sequence)
    assert not order.is_known
    order.begin("train")
    left = list(distinct)
    assert predicted(order) == [unit for unit, _ in left]
    for i, (unit, is_backward) in enumerate(sequence):
        order.note(unit, is_backward=is_backward)
        if i == 0 or sequence[i - 1] != sequence[i]:
            left.pop(0)
        assert predicted(order) == [index for index, _ in left]
        assert list(order.upcoming(2)) == [index for index, _ in left[:2]]
        is_repeated = sequence[i + 1 : i + 2] == [sequence[i]]
        assert order.is_unfinished(unit) == is_repeated
        assert not any(order.is_unfinished(other) for other in range(len(SIZES)) if other != unit)
    assert order.deviations == 0


def naive_distance(left, unit):
    total = 0
    for other, _ in left:
        if other == unit:
            return total
        total += SIZES[other]
    return None


@given(sequences)
def test_distances_are_those_of_a_plain_count(sequence):
    order, distinct = Order(SIZES), without_repeats(sequence)
    go(order, distinct)
    order.begin("train")
    for done in range(len(distinct) + 1):
        for unit in range(len(SIZES)):
            assert order.distance(unit) == naive_distance(distinct[done:], unit)
        if done < len(distinct):
            order.note(distinct[done][0], is_backward=distinct[done][1])


@given(st.lists(sequences, min_size=2, max_size=5))
def test_deviations_are_survived_and_what_came_last_is_predicted(passes):
    order = Order(SIZES)
    for sequence in passes:
        go(order, sequence)
        # Whatever is predicted after a deviation is the rest of what came last, from some place on.
        for unit in range(len(SIZES)):
            distance = order.distance(unit)
            assert (distance is None) == (unit not in predicted(order))
    order.begin("train")
    assert predicted(order) == [unit for unit, _ in without_repeats(passes[-1])]


@given(sequences, sequences)
def test_after_a_deviation_predictions_go_on_where_the_use_was_known(first, second):
    order, known = Order(SIZES), without_repeats(first)
    go(order, first)
    order.begin("train")
    place = 0
    for i, use in enumerate(second):
        order.note(use[0], is_backward=use[1])
        if i and second[i - 1] == use:
            continue
        if place is not None:
            place = known.index(use, place) + 1 if use in known[place:] else None
        assert order.is_known == (place is not None)
        assert predicted(order) == ([] if place is None else [unit for unit, _ in known[place:]])
    assert (order.deviations == 0) == (without_repeats(second) == known[: len(without_repeats(second))])


@given(sequences, sequences)
@settings(max_examples=30)
def test_kinds_of_passes_do_not_mix(train, evaluate):
    order = Order(SIZES)
    go(order, train, "train")
    go(order, evaluate, "eval")
    go(order, evaluate, "eval")
    order.begin("train")
    assert predicted(order) == [unit for unit, _ in without_repeats(train)]
    order.begin("eval")
    assert predicted(order) == [unit for unit, _ in without_repeats(evaluate)]
    order.forget()
    order.begin("train")
    assert not order.is_known
