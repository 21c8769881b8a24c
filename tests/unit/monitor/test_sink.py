"""Which events become which points, and which sinks a configuration gets."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from mpispeed import monitor
from mpispeed.base.errors import ConfigError, NativeMissing
from mpispeed.base.events import Bus, Event
from mpispeed.monitor import sinks
from mpispeed.monitor.csv_sink import CsvSink
from mpispeed.monitor.tensorboard_sink import TensorBoardSink


class Record:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []
        self.is_closed = False

    def write(self, series: str, value: float, x: int) -> None:
        self.points.append((series.rsplit("/", 1)[-1], value, x))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Broken(Record):
    """A sink on a full disk."""

    def write(self, series: str, value: float, x: int) -> None:
        raise OSError(28, "full")


def end_step(bus: Bus, step: int, **changed: Any) -> None:
    payload = {
        "global_step": step,
        "samples": 24 * step,
        "loss": 2.5,
        "lr": 0.1,
        "norm": 1.0,
        "loss_scale": 1.0,
        "skipped": False,
        "seconds": 0.5,
    }
    bus.announce(Event.STEP_KNOWN, **(payload | changed))


def test_loss_stands_before_the_step_and_lr_after_it() -> None:
    bus, sink = Bus(), Record()
    monitor.attach(bus, [sink])
    end_step(bus, 1)
    end_step(bus, 2, loss=2.0, lr=0.2)
    assert sink.points == [("train_loss", 2.5, 0), ("lr", 0.1, 24), ("train_loss", 2.0, 24), ("lr", 0.2, 48)]


def test_the_first_step_after_a_load_and_a_changed_batch() -> None:
    bus, sink = Bus(), Record()
    monitor.attach(bus, [sink])
    end_step(bus, 11)
    end_step(bus, 12, samples=24 * 11 + 48)
    assert [x for name, _, x in sink.points if name == "train_loss"] == [240, 264]


@pytest.mark.parametrize(
    ("scales", "written"), [([1.0, 1.0], []), ([None, None], []), ([4.0, 2.0, 1.0], [4.0, 2.0, 1.0])]
)
def test_loss_scale_is_a_series_only_where_losses_are_scaled(scales: list, written: list[float]) -> None:
    bus, sink = Bus(), Record()
    monitor.attach(bus, [sink])
    for step, scale in enumerate(scales, 1):
        end_step(bus, step, loss_scale=scale)
    assert [value for name, value, _ in sink.points if name == "loss_scale"] == written


def test_evaluations_and_the_end() -> None:
    bus, sink = Bus(), Record()
    monitor.attach(bus, [sink])
    bus.announce(Event.EVAL_END, global_step=3, samples=72, loss=1.5)
    bus.announce(Event.CLOSE)
    assert sink.points == [("eval_loss", 1.5, 72)]
    assert sink.is_closed


def test_a_broken_sink_is_dropped_and_the_others_go_on() -> None:
    bus, sink = Bus(), Record()
    monitor.attach(bus, [Broken(), sink])
    end_step(bus, 1)
    end_step(bus, 2)
    assert len(sink.points) == 4


def test_non_finite_losses_are_written() -> None:
    bus, sink = Bus(), Record()
    monitor.attach(bus, [sink])
    end_step(bus, 1, loss=math.inf)
    assert sink.points[0] == ("train_loss", math.inf, 0)


def test_enabled_sections_become_sinks_on_rank_0_only(tmp_path: Path) -> None:
    sections = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "b"},
    }
    assert monitor.build(sections, rank=1) == []
    assert list(tmp_path.iterdir()) == []
    made = monitor.build(sections, rank=0)
    assert [type(sink) for sink in made] == [CsvSink, TensorBoardSink]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    for sink in made:
        sink.close()
    assert monitor.build({"csv_monitor": {"enabled": False}, "wandb": {"enabled": False}, "comet": {}}, rank=0) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_sink_ends_every_rank(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord'.*Did you mean .tensorboard."):
        monitor.build({"tensorbord": {"enabled": True}}, rank)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_a_missing_package_is_named_on_every_rank(
    rank: int, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(NativeMissing, match=rf"{package} is not installed.*{name}\.enabled to false"):
        monitor.build({name: {"enabled": True}}, rank)


def test_a_folder_of_the_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library makes a folder `wandb` where a script runs, and Python takes such a folder for a package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(NativeMissing, match="package wandb is not installed"):
        monitor.build({"wandb": {"enabled": True}}, 0)


def test_times_of_passes_in_milliseconds() -> None:
    bus, sink = Bus(), Record()
    monitor.attach(bus, [sink])
    bus.announce(Event.TIMES, global_step=2, samples=48, series={"forward": 0.25, "backward_inner": 0.5})
    assert sink.points == [("elapsed_time_ms_forward", 250.0, 48), ("elapsed_time_ms_backward_inner", 500.0, 48)]
