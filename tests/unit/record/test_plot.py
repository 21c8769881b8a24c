"""Curves: what is left of long ones, and fields of characters."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.record.plot import MARKS, SHARED, Curve, Panel, text_plot, thinned, write_png

VALUES = st.lists(st.floats(width=64) | st.sampled_from([0.0, 1.7e308, -1.7e308, 5e-324, float("nan")]), max_size=300)


@settings(deadline=None, max_examples=60)
@given(values=VALUES, most=st.integers(2, 40))
def test_thinned_curves_keep_their_extremes_and_their_order(values, most):
    y = np.array(values, np.float64)
    x, kept = thinned(np.arange(len(y), dtype=np.uint64), y, most)
    finite = y[np.isfinite(y)]
    assert len(kept) <= max(most, 2)
    assert np.array_equal(kept, y[x])
    assert (np.diff(x.astype(np.int64)) > 0).all()
    if len(finite):
        assert (kept.min(), kept.max()) == (finite.min(), finite.max())


@settings(deadline=None, max_examples=60)
@given(curves=st.lists(VALUES, min_size=1, max_size=3), width=st.integers(4, 90), height=st.integers(2, 20))
def test_the_highest_value_is_on_top_and_the_lowest_at_the_bottom(curves, width, height):
    drawn = [Curve(f"c{number}", np.arange(len(own)), np.array(own, float)) for number, own in enumerate(curves)]
    lines = text_plot(Panel("title", drawn), width, height)
    finite = [own[np.isfinite(own)] for own in (curve.y for curve in drawn)]
    assert lines[0] == "title"
    if not any(map(len, finite)):
        assert lines[1:] == ["  (no points that are finite)"]
        return
    field = [line.split("|", 1)[1] for line in lines[1 : height + 1]]
    assert all(len(line) <= width and set(line) <= {*MARKS[:3], SHARED, " "} for line in field)
    low, high = min(own.min() for own in finite if len(own)), max(own.max() for own in finite if len(own))
    if low / 2 < high / 2:  # halves of the smallest number of all are equal
        assert field[0].strip() and field[-1].strip()
    else:
        assert sum(bool(line.strip()) for line in field) == 1


def test_one_curve_is_one_line_from_its_first_point_to_its_last():
    lines = text_plot(Panel("t", [Curve("a", np.array([0, 10]), np.array([0.0, 1.0]))]), 11, 11)
    assert [line.split("|")[1].index("*") for line in lines[1:12]] == list(range(10, -1, -1))


def test_a_picture_of_any_numbers(tmp_path):
    odd = np.array([1.7e308, -1.7e308, np.nan, 5e-324, np.inf, 0.0])
    empty = Curve("", np.empty(0), np.empty(0))
    panels = [Panel("$x", [Curve("$\\frac$\x1b\n", np.arange(6), odd), empty]), Panel("", [empty])]
    write_png(tmp_path / "x.png", panels, "\x00$")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
