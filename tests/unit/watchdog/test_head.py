"""The watchdog that speaks for a job: when it says that something is waited for."""

from mpispeed.watchdog.coordinator import Notices


def test_each_notice_comes_after_twice_the_time_of_the_one_before():
    notices = Notices()
    told = [seconds for seconds in (step * 0.5 for step in range(100)) if notices.is_due(seconds, 3.0)]
    assert told == [3.0, 6.0, 12.0, 24.0, 48.0]


def test_a_look_that_comes_late_counts_from_when_it_came():
    notices = Notices()
    assert [seconds for seconds in (1, 5, 8, 9.9, 10, 19, 21) if notices.is_due(seconds, 3.0)] == [5, 10, 21]


def test_another_wait_is_told_anew():
    notices = Notices()
    assert [seconds for seconds in (3, 6, 1, 3, 5, 6) if notices.is_due(seconds, 3.0)] == [3, 6, 3, 6]
