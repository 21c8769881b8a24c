"""Schedules in time: lengths, bubbles beside their closed forms, drawings."""

import sys
from fractions import Fraction

import pytest

from mpispeed.base.errors import ConfigError, ScheduleError, UsageError
from mpispeed.pipe import draw
from mpispeed.pipe.schedule import TrainSchedule, build
from mpispeed.pipe.timeline import expected_bubble, times
from tests.helpers.schedules import written


def all_of(name, micro_batches, stages, chunks=1):
    return [build(name, micro_batches, stages, stage, chunks) for stage in range(stages)]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "wanted"), [(4, 8, (33, 28.5, 27)), (8, 16, (69, 58.5, 55))], ids=str
)
def test_lengths(stages, micro_batches, wanted):
    names = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1))
    found = [times(all_of(name, micro_batches, stages, chunks)) for name, chunks in names]
    assert tuple(one.makespan for one in found) == wanted
    ideal = 3 * micro_batches
    for (name, chunks), one in zip(names, found, strict=True):
        assert set(one.bubbles) == {one.makespan - ideal} == {expected_bubble(name, micro_batches, stages, chunks)}
        assert one.bubble_fraction == (one.makespan - ideal) / one.makespan


def test_times_are_exact():
    found = times(all_of("1f1b", 3, 2), 0.1, 0.2, 0.3)
    assert found.unit == Fraction(1, 10)
    assert found.makespan == Fraction(6, 10) * 4
    thirds = times(all_of("interleaved", 4, 2, 3), 1, Fraction(1, 2), 0.5)
    assert set(thirds.bubbles) == {Fraction(2, 3)}


def test_a_split_pass_takes_what_a_whole_one_takes():
    for name in ("1f1b", "zb-h1"):
        (spans,) = times(all_of(name, 2, 1), 3, 5, 7).stages
        assert sum(span.end - span.start for span in spans) == 2 * 15
        assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]


def test_uneven_waiting():
    # Stage 1 waits for the first forward pass, stage 0 for the last backward pass.
    found = times(all_of("gpipe", 2, 2), 2, 1, 0)
    assert [(span.start, span.end) for span in found.stages[1]] == [(2, 4), (4, 6), (6, 7), (7, 8)]
    assert [(span.start, span.end) for span in found.stages[0]] == [(0, 2), (2, 4), (7, 8), (8, 9)]


def test_no_closed_form():
    assert expected_bubble("interleaved", 6, 4, 2) is None
    assert expected_bubble("zb-h1", 3, 4) is None
    assert expected_bubble("zb-h1", 8, 4, 1, 1, 2, 2) is None
    assert expected_bubble("ZB-H1", 1, 1) == 0
    with pytest.raises(ConfigError, match="unknown pipeline schedule '2f2b'"):
        expected_bubble("2f2b", 1, 1)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "long", None])
def test_bad_times(bad):
    with pytest.raises(ConfigError, match="the time of a pass is"):
        times(all_of("1f1b", 1, 1), bad)


def test_no_time_at_all():
    with pytest.raises(ConfigError, match="all passes take no time"):
        times(all_of("1f1b", 1, 1), 0, 0, 0)


def test_a_deadlock_has_no_end():
    with pytest.raises(ScheduleError, match="wait for ever: 0, 1"):
        times(written(1, "L0 F0 RG0 SA0 B0", "RA0 L0 F0 B0 SG0"))


def test_passes_without_micro_batch_are_counted():
    (spans,) = times(written(2, "L0 F0 B0 L0 F0 B0")).stages
    assert [span.micro_batch for span in spans] == [0, 0, 1, 1]


# -- drawings ----------------------------------------------------------------------------------------------------------


def test_text():
    assert draw.text(times(all_of("1f1b", 3, 2))).splitlines() == [
        "stage 0 |F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "stage 1 |.  F0 B0--- F1 B1--- F2 B2--- .  .",
    ]
    assert draw.text(times(all_of("zb-h1", 2, 2))).splitlines() == [
        "stage 0 |F0 F1 .  I0 W0 I1 W1",
        "stage 1 |.  F0 I0 F1 I1 W0 W1",
    ]


def test_text_of_chunks():
    assert draw.text(times(all_of("interleaved", 2, 2, 2), 1, 1, 0)).splitlines() == [
        "stage 0 |F0a F1a F0b F1b .   B0b .   B1b B0a B1a",
        "stage 1 |.   F0a F1a F0b B0b F1b B1b B0a B1a .",
    ]


def test_text_goes_on_below():
    timeline = times(all_of("1f1b", 3, 2))
    found = draw.text(timeline, width=9 + 3 * 5 + 2)
    assert found.splitlines() == [
        "stage 0 |F0 F1 .  .  B0-",
        "stage 1 |.  F0 B0--- F1",
        "",
        "stage 0 |-- F2 B1--- .",
        "stage 1 |B1--- F2 B2---",
        "",
        "stage 0 |B2---",
        "stage 1 |.  .",
    ]
    assert len(draw.text(timeline, width=1).splitlines()) == 3 * timeline.columns - 1


def test_passes_that_take_no_time_are_not_drawn():
    assert draw.text(times(all_of("zb-h1", 1, 1), 1, 1, 0)) == "stage 0 |F0 I0"


def test_text_without_a_common_unit():
    with pytest.raises(UsageError, match="choose times of passes with a larger common unit"):
        draw.text(times(all_of("1f1b", 4, 2), 1.00001))


def test_picture(tmp_path):
    file = tmp_path / "drawing.png"
    draw.write_png(file, times(all_of("interleaved", 4, 2, 2)), "no $formula")
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000
    draw.write_png(file, times(all_of("zb-h1", 4, 2)))
    assert file.read_bytes() != data


def test_picture_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"needs matplotlib .* pip install mpispeed\[monitor\]"):
        draw.write_png(tmp_path / "drawing.png", times([TrainSchedule(1, 1, 0)]))
