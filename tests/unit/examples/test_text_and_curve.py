"""The example's data and its loss curve."""

from __future__ import annotations

import sys
from pathlib import Path

import curve
import pytest
import torch
from text import Windows, standard_library


def test_the_text_is_the_same_each_time_and_the_held_out_part_is_apart() -> None:
    train, held_out = standard_library()
    again = standard_library()
    assert torch.equal(train, again[0])
    assert torch.equal(held_out, again[1])
    assert len(train) > 10 * len(held_out) > 100_000
    assert bytes(held_out[:200].tolist()) not in bytes(train.tolist())
    assert [len(part) for part in standard_library(cap_bytes=1000)] == [1000, 1000]


def test_windows_cover_the_text_and_targets_are_one_byte_later() -> None:
    windows = Windows(torch.arange(10, dtype=torch.uint8), block=3)
    assert len(windows) == 3
    pairs = [windows[i] for i in range(3)]
    assert [x.tolist() for x, _ in pairs] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(torch.equal(y, x + 1) for x, y in pairs)
    assert pairs[0][0].dtype == torch.int64


POINTS = [curve.Point(2, 48, 2, 3.0, 2.5), curve.Point(4, 96, 3, 2.0, 1.5)]


def test_points_survive_the_file_and_later_ones_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    assert curve.read(path) == []
    curve.write(path, POINTS)
    assert path.read_text().splitlines()[0] == "step,samples,ranks,train_loss,validation_loss"
    assert curve.read(path) == POINTS
    assert curve.read(path, last_step=3) == POINTS[:1]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the monitor extra")
    curve.draw(tmp_path / "loss.png", POINTS)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    curve.draw(tmp_path / "loss.png", POINTS)
    assert capsys.readouterr().out == f"no {tmp_path}/loss.png: matplotlib is not installed (pip install matplotlib)\n"
    assert not list(tmp_path.iterdir())
