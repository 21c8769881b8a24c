"""The order of use by example: what a reader would expect of a forward and a backward pass."""

from mpispeed.sharding.use_order import Order

SIZES = [100, 10, 20, 30]
FORWARD = [(0, False), (1, False), (2, False), (3, False)]
BACKWARD = [(3, True), (2, True), (1, True), (0, True)]


def recorded():
    order = Order(SIZES)
    order.begin(True)
    for unit, is_backward in FORWARD + BACKWARD:
        order.note(unit, is_backward=is_backward)
    order.begin(True)
    return order


def test_nothing_is_known_of_the_first_pass():
    order = Order(SIZES)
    order.begin(True)
    order.note(1, is_backward=False)
    assert not order.is_known
    assert list(order.upcoming(5)) == []
    assert order.distance(1) is None
    assert not order.is_unfinished(1)


def test_forward_and_backward_are_one_pass():
    order = recorded()
    assert list(order.upcoming(100)) == [0, 1, 2, 3, 3, 2, 1, 0]
    for unit, is_backward in FORWARD:
        order.note(unit, is_backward=is_backward)
    # The last unit is used next, the first one after everything else.
    assert order.distance(3) == 0
    assert order.distance(2) == 30
    assert order.distance(1) == 50
    assert order.distance(0) == 60


def test_what_has_to_fit_until_the_next_use_counts_each_unit_once():
    order = recorded()
    for unit, is_backward in FORWARD[:-1]:
        order.note(unit, is_backward=is_backward)
    for unit, whole in ((3, 30), (2, 20 + 30), (1, 10 + 30 + 20), (0, 100 + 30 + 20 + 10)):
        assert order.is_within(unit, whole)
        assert not order.is_within(unit, whole - 1)
    for unit, is_backward in (FORWARD[-1], *BACKWARD):
        order.note(unit, is_backward=is_backward)
    assert not order.is_within(0, 10**9)  # nobody expects it again


def test_a_skipped_unit_is_one_deviation_and_the_rest_is_known():
    order = recorded()
    order.note(0, is_backward=False)
    order.note(2, is_backward=False)
    assert order.deviations == 1
    assert list(order.upcoming(2)) == [3, 3]
    assert order.distance(1) == 30 + 30 + 20


def test_direction_tells_uses_apart():
    order = recorded()
    order.note(0, is_backward=True)  # as when only a part of the model runs
    assert order.deviations == 1
    assert order.is_known
    assert list(order.upcoming(2)) == []
    assert order.distance(3) is None


def test_a_unit_that_the_known_pass_left_out_does_not_count_as_one_used_again():
    order = Order(SIZES)
    order.begin(True, frozenset({1}))
    for unit in (0, 0, 2):
        order.note(unit, is_backward=False)
    order.begin(True)
    for unit, is_unfinished in ((0, True), (1, False)):
        order.note(unit, is_backward=False)
        assert order.is_unfinished(unit) == is_unfinished


def test_a_pass_without_uses_is_forgotten():
    order = recorded()
    order.begin(True)
    order.begin(True)
    assert list(order.upcoming(2)) == [0, 1]
