"""The last safe step, by times that are given; a simulated job is never late and never much too early."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.walltime.last_safe_step import (
    FIRST_SAVE_SECONDS,
    MOST_STEPS,
    Margin,
    RunEnded,
    SaveClock,
    StepClock,
    choose_limit,
    judge,
)

NO_MARGIN = Margin(0.0, 1.0)


def steady(seconds, count=5):
    clock = StepClock()
    for step in range(1, count + 1):
        clock.note(step, seconds, has_pause=False)
    return clock


def test_the_environment_goes_before_the_configuration():
    assert choose_limit("1:00", "2:00") == 120
    assert choose_limit("1:00", "") == choose_limit(60, None) == 60
    assert choose_limit(None, None) is None
    with pytest.raises(ConfigError, match=r"MPISPEED_WALLTIME='soon'.*--walltime"):
        choose_limit(None, "soon")


def test_the_first_save_is_guessed_and_the_slowest_of_the_last_ones_counts():
    clock = SaveClock(20e9)
    assert clock.is_guess
    assert clock.expected_seconds == FIRST_SAVE_SECONDS + 100
    for seconds in (3, 9, 4):
        clock.note(seconds)
    assert (clock.is_guess, clock.expected_seconds) == (False, 9)
    for _ in range(9):
        clock.note(5)
    assert clock.expected_seconds == 5
    assert SaveClock(20e9, 12.0).expected_seconds == 12
    assert not SaveClock(20e9, 12.0).is_guess


def test_a_pause_is_expected_again_after_as_many_steps():
    clock = steady(1.0, 9)
    assert clock.steps_to_pause(9) == math.inf
    clock.note(10, 61.0, has_pause=True)  # an evaluation before step 10
    assert (clock.longest_seconds, clock.typical_seconds) == (1, 1)
    for step in range(11, 15):
        clock.note(step, 1.0, has_pause=False)
        assert clock.ahead_seconds(step) == 1
    clock.note(15, 31.0, has_pause=True)  # and before step 15: now every five steps
    assert [clock.steps_to_pause(step) for step in (15, 16, 18, 19, 25)] == [4, 3, 1, 0, 0]
    assert [clock.ahead_seconds(step) for step in (15, 18, 19, 25)] == [1, 1, 61, 61]


def test_a_save_elsewhere_does_not_count_as_fast():
    guessed, known = SaveClock(20e9), SaveClock(20e9, 90.0)
    for clock, first in ((guessed, FIRST_SAVE_SECONDS + 100), (known, 90)):
        clock.note(1, is_own=False)
        assert clock.expected_seconds == first
        clock.note(200, is_own=False)
        assert clock.expected_seconds == 200, "slower than anybody thought"
        clock.note(7)
        assert clock.expected_seconds == 7
    assert not guessed.is_guess


def test_a_long_evaluation_is_not_forgotten_after_short_pauses():
    clock = steady(1.0, 9)
    clock.note(10, 300.0, has_pause=True)
    for step in range(11, 200):
        clock.note(step, 3.0 if step % 10 == 0 else 1.0, has_pause=step % 10 == 0)
    assert clock.ahead_seconds(199) == 300


def test_an_evaluation_that_nobody_told_of_is_a_pause():
    clock = steady(1.0, 9)
    clock.note(10, 10.5, has_pause=False)
    assert (clock.longest_seconds, clock.ahead_seconds(18), clock.ahead_seconds(19)) == (1, 1, 10.5)


def test_steps_that_have_become_slower_are_steps():
    clock = steady(0.1, 50)
    for step in range(51, 60):
        clock.note(step, 20.0, has_pause=False)
    assert clock.longest_seconds == 20
    for step in range(60, 120):
        clock.note(step, 20.0, has_pause=False)
    assert clock.steps_to_pause(119) == 0
    assert clock.typical_seconds == 20


def test_the_second_pause_of_a_job_that_goes_on_is_expected():
    clock = StepClock()
    for step in range(10_041, 10_061):
        clock.note(step, 30.0 if step == 10_050 else 1.0, has_pause=step == 10_050)
    assert clock.ahead_seconds(10_060) == 30
    clock.note(10_100, 30.0, has_pause=True)  # now one knows
    assert (clock.steps_to_pause(10_100), clock.ahead_seconds(10_148), clock.ahead_seconds(10_149)) == (49, 1, 30)


def test_a_first_step_with_a_pause_is_a_step_all_the_same():
    clock = StepClock()
    clock.note(1, 5.0, has_pause=True)
    assert clock.longest_seconds == 5


def test_the_last_safe_step():
    saves = SaveClock(0, 10.0)
    margin = Margin(30.0, 1.5)
    assert not judge(math.inf, 5, steady(2.0), saves, margin).is_last
    assert not judge(47.1, 5, steady(2.0), saves, margin).is_last  # 30 + 15 + 2
    found = judge(46.9, 5, steady(2.0), saves, margin)
    assert (found.is_last, found.needed_seconds) == (True, 47)
    assert not judge(62.1, 5, steady(2.0), saves, margin, pending=1).is_last
    assert judge(61.9, 5, steady(2.0), saves, margin, pending=1).is_last


def test_ranks_agree_about_once_in_a_second_and_more_often_at_the_end():
    saves = SaveClock(0, 1.0)
    assert judge(math.inf, 5, steady(0.1), saves, NO_MARGIN).next_steps == 10
    assert judge(math.inf, 5, steady(1e-4), saves, NO_MARGIN).next_steps == MOST_STEPS
    assert judge(math.inf, 5, steady(5.0), saves, NO_MARGIN).next_steps == 1
    assert judge(math.inf, 5, StepClock(), saves, NO_MARGIN).next_steps == 1
    assert judge(1.5, 5, steady(0.1), saves, NO_MARGIN).next_steps == 2
    paused = steady(0.1, 3)
    paused.note(4, 9.0, has_pause=True)
    assert judge(math.inf, 4, paused, saves, NO_MARGIN).next_steps == 3  # a pause may come after step 7


def test_what_a_run_ends_with():
    ended = RunEnded(3, tag="t", step=7, reason="the job ends", loss=1.5)
    assert isinstance(ended, SystemExit)
    assert not isinstance(ended, Exception), "a script that catches errors does not swallow it"
    assert (ended.code, str(ended)) == (3, "the run ends at step 7 (the job ends) and is saved as t")


@settings(deadline=None, max_examples=60)
@given(
    times=st.lists(st.floats(0.5, 1.0), min_size=8, max_size=8),
    scale=st.floats(0.05, 20.0),
    rest=st.floats(0.0, 300.0),
    save=st.floats(0.1, 10.0),
    every=st.integers(2, 60),
    pause=st.floats(1.0, 30.0),
)
def test_a_job_is_saved_in_time_and_not_too_early(times, scale, rest, save, every, pause):
    """Steps scatter by a factor of two, and every so often a pause comes between two; the job ends after the first one.

    The first pause of a job cannot be foreseen.
    """
    longest = max(times) * scale

    def took(step):
        return longest + pause * scale if step % every == 0 else longest if step == 1 else times[step % 8] * scale

    steps, saves, now, step, check = StepClock(), SaveClock(0, save), 0.0, 0, 1
    limit = sum(map(took, range(1, every + 1))) + save + rest
    while True:
        step += 1
        now += took(step)
        steps.note(step, took(step), has_pause=step % every == 0)
        check -= 1
        if check <= 0:
            verdict = judge(limit - now, step, steps, saves, NO_MARGIN)
            if verdict.is_last:
                break
            check = verdict.next_steps
    assert now + save <= limit + 1e-6 * limit, "too late"
    could_pause = (step + 1) % every == 0
    assert limit - now - save < longest + could_pause * pause * scale + 1e-6 * limit, "too early"
