"""How many sums are under way."""

from mpispeed.sharding.reducers import LEAST_ELEMENTS, Backlog, limit_of


def test_the_oldest_are_settled_to_make_room():
    settled = []
    backlog = Backlog(10)
    for name, elements in (("a", 4), ("b", 4), ("c", 4), ("d", 10), ("e", 20)):
        backlog.add(elements, lambda name=name: settled.append(name))
        if name == "c":
            assert settled == ["a"]
    assert settled == ["a", "b", "c", "d"]
    backlog.clear()
    assert settled == ["a", "b", "c", "d", "e"]


def test_two_of_the_usual_size_may_be_under_way_and_a_larger_one_alone():
    usual = 2 * LEAST_ELEMENTS
    assert limit_of([3, usual, usual, 20 * usual]) == 2 * usual
    assert limit_of([usual]) == 2 * usual
    assert limit_of([3, 4]) == limit_of([]) == LEAST_ELEMENTS
