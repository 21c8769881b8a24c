"""DeepSpeed's classes of monitors: settings as attributes, and points that arrive."""

import pytest

from mpispeed.config.monitor import Comet, CsvMonitor, MonitorConfig, Tensorboard, Wandb
from mpispeed.monitor.comet import CometMonitor
from mpispeed.monitor.csv_monitor import csvMonitor
from mpispeed.monitor.monitor import MonitorMaster
from mpispeed.monitor.tensorboard import TensorBoardMonitor
from mpispeed.monitor.wandb import WandbMonitor

POINTS = [("Train/Samples/lr", 0.5, 8), ("Train/Samples/lr", 0.25, 16)]


def test_settings_are_attributes():
    made = WandbMonitor(Wandb(enabled=False, group="g", team="t", project="p"))
    assert (made.enabled, made.group, made.team, made.project) == (False, "g", "t", "p")
    assert WandbMonitor(Wandb()).project == "deepspeed"
    assert CometMonitor(Comet(experiment_name="e")).experiment_name == "e"
    assert TensorBoardMonitor(Tensorboard(output_path="o", job_name="j")).output_path == "o"


def test_all_that_are_enabled_write(tmp_path):
    config = MonitorConfig(
        Tensorboard(), CsvMonitor(enabled=True, output_path=str(tmp_path), job_name="run"), Wandb(), Comet()
    )
    master = MonitorMaster(config)
    master.write_events(POINTS)
    one = csvMonitor(CsvMonitor(enabled=True, output_path=str(tmp_path), job_name="one"))
    one.write_events(POINTS)
    rows = "step,lr\n8,0.5\n16,0.25\n"
    assert [(tmp_path / name / "Train_Samples_lr.csv").read_text() for name in ("run", "one")] == [rows, rows]
    assert master.enabled and not master.wandb_monitor.enabled
    for made in (one, master.csv_monitor):  # DeepSpeed's classes have no end
        made._monitors._sinks[0].close()


def test_a_service_gets_the_key_itself(monkeypatch):
    given = []
    monkeypatch.setattr("mpispeed.monitor.sinks.RemoteSinks", lambda sections: given.append(sections))
    CometMonitor(Comet(enabled=True, api_key="k7"))
    assert given[0]["comet"]["api_key"] == "k7"


@pytest.mark.parametrize("name", ["wandb", "comet", "tensorboard", "csv_monitor", "monitor"])
def test_nothing_else_is_in_their_modules(name):
    module = __import__(f"mpispeed.monitor.{name}", fromlist=["x"])
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = module.Other
