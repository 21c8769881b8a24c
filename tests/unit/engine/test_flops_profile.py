"""`flops_profiler` in an engine of one rank: when it counts, what it prints, and that off means nothing anywhere."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.events import Event
from mpispeed.config.load import load
from mpispeed.engine import flops_profile
from mpispeed.engine.flops_profile import FLOPS_SERIES, MFU_SERIES
from mpispeed.flops import FlopsProfiler
from tests.zoo.training import ADAM, config, start

TIMES = r"[0-9.]+ (?:s|ms|us)\b|[0-9.]+ [KMGT]?FLOPS\b|(?<=samples/second:)  +[0-9.]+"


class Two(nn.Module):
    """Two layers and what an ignored one would compute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.act, self.last = nn.Linear(10, 20, bias=False), nn.ReLU(), nn.Linear(20, 5)

    def forward(self, x):
        return self.last(self.act(self.first(x))).sum()


def section(**more):
    return {"flops_profiler": {"enabled": True, **more}}


def engine_of(model=None, batch=4, accumulation=1, **more):
    settings = config(0, batch, accumulation, **{**ADAM, **more})
    return start(settings, Two() if model is None else model)


def step(engine, micro_batches=1, size=4):
    dtype = next(engine.module.parameters()).dtype
    for _ in range(micro_batches):
        engine.backward(engine(torch.ones(size, 10, dtype=dtype)).sum())
        engine.step()


@pytest.fixture(autouse=True)
def own_log():
    """The log of an engine goes to the stderr of its test."""
    yield
    logger = logging.getLogger("mpispeed")
    for handler in [each for each in logger.handlers if getattr(each, "is_mpispeed", False)]:
        logger.removeHandler(handler)
    logger.propagate = True


def installed():
    """What counting puts anywhere."""
    return [
        *_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack(),
        *modules._global_forward_hooks, *modules._global_forward_pre_hooks,
    ]  # fmt: skip


def test_an_engine_in_fp16_counts_one_linear_layer(capsys):
    sections = {"fp16": {"enabled": True}, **section(step=1, profile_step=1, module_depth=-1, top_modules=3)}
    engine = engine_of(nn.Linear(10, 10), batch=1, **sections)
    for _ in range(3):
        step(engine, size=1)
    profiler = engine.flops_profiler
    assert (profiler.flops, profiler.macs, profiler.params) == (200, 100, 110)
    assert capsys.readouterr().out.count("Profile Summary at step 2:") == 1
    engine.destroy()


def test_a_key_of_old_scripts_is_told_to_have_no_effect():
    loaded = load(section(step=1))
    assert any("flops_profiler.step" in text and "no effect" in text for text in loaded.warnings)


@pytest.mark.parametrize("wanted", [1, 3])
def test_only_the_step_of_the_config_is_counted(wanted, capsys):
    engine = engine_of(**section(profile_step=wanted))
    for number in range(5):
        engine(torch.ones(4, 10)).backward()
        assert bool(installed()) == (number == wanted)
        engine.step()
        assert not installed()
        assert (f"step {wanted + 1}:" in capsys.readouterr().out) == (number == wanted)
    engine.destroy()


def test_off_means_nothing_anywhere(monkeypatch):
    monkeypatch.setattr(flops_profile, "StepProfile", lambda *_: pytest.fail("made a profile"))
    engine = engine_of()
    parts = engine.mpispeed.parts
    assert not any("flops" in str(part) for part in (*parts.features.after_steps, *engine.updates._parts))
    listeners = [listener for event in Event for listener in engine.bus._listeners.get(event, ())]
    assert not any("flops" in getattr(listener, "__module__", "") for listener in listeners)
    for _ in range(3):
        engine.backward(engine(torch.ones(4, 10)))
        assert not installed()
        engine.step()
    with pytest.raises(AttributeError, match="flops_profiler"):
        _ = engine.flops_profiler
    engine.destroy()


def test_evaluation_between_micro_batches_does_not_count():
    found = []
    for evaluates in (False, True):
        engine = engine_of(batch=8, accumulation=2, **section(detailed=False))
        for _ in range(2):
            for _ in range(2):
                step(engine)
                if evaluates:
                    with torch.no_grad():
                        engine.eval()(torch.ones(4, 10))
                    engine.train()
        engine.destroy()
        found.append((engine.flops_profiler.facts.totals, engine.flops_profiler.macs))
    assert found[0] == found[1] and found[0][1] == 4 * (10 * 20 + 20 * 5)


def test_a_step_that_fails_is_counted_when_it_is_made_again():
    engine = engine_of(**section(detailed=False))
    step(engine)
    engine(torch.ones(4, 10))
    with pytest.raises(UsageError, match="without any backward pass"):
        engine.step()
    assert not installed()
    step(engine)
    assert engine.flops_profiler.macs == 4 * (10 * 20 + 20 * 5)
    engine.destroy()


def test_a_step_without_a_pass_of_the_engine_has_no_report(capsys, caplog):
    engine = engine_of(**section())
    logging.getLogger("mpispeed").addHandler(caplog.handler)
    for _ in range(3):
        engine.backward(engine.module(torch.ones(4, 10)))
        engine.step()
    logging.getLogger("mpispeed").removeHandler(caplog.handler)
    assert caplog.text.count("counted no forward pass of engine(...) in step 2") == 1
    assert capsys.readouterr().out == "" and engine.flops_profiler.facts.totals is None
    engine.destroy()


def test_an_engine_that_ends_within_the_step_leaves_nothing(capsys):
    engine = engine_of(**section())
    step(engine)
    engine(torch.ones(4, 10))
    assert installed()
    engine.destroy()
    assert not installed() and capsys.readouterr().out == ""


def test_a_step_that_an_earlier_job_made_is_not_counted_again(tmp_path, capsys):
    engine = engine_of(**section())
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(tmp_path, "three")
    engine.destroy()
    assert "Profile Summary" in capsys.readouterr().out
    engine = engine_of(**section())
    engine.load_checkpoint(tmp_path, "three")
    for _ in range(3):
        step(engine)
    assert capsys.readouterr().out == "" and engine.flops_profiler.facts.totals is None
    engine.destroy()


def test_later_steps_are_points_of_series(tmp_path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    engine = engine_of(**section(detailed=False, peak_flops=1e9), **monitor)
    for _ in range(4):
        step(engine)
    engine.destroy()
    for series in (FLOPS_SERIES, MFU_SERIES):
        rows = (tmp_path / "run" / f"{series.replace('/', '_')}.csv").read_text().splitlines()[1:]
        assert [row.split(",")[0] for row in rows] == ["12", "16"]
        assert all(float(row.split(",")[1]) > 0 for row in rows)


def test_times_of_a_device_are_added_up():
    """Marks of a device have differences that only become numbers by `float`."""
    engine, clock = engine_of(batch=8, accumulation=2, **section(detailed=False)), [0]

    class Lap:
        def __init__(self, seconds):
            self.seconds = seconds

        def __float__(self):
            return float(self.seconds)

    class Mark:
        def __init__(self):
            clock[0] += 1
            self.at = clock[0]

        def __sub__(self, begin):
            return Lap(self.at - begin.at)

    parts = engine.mpispeed.parts
    parts.clock.now, parts.clock.is_of_host = Mark, False
    for _ in range(2):
        step(engine, 2)
    times = engine.flops_profiler.facts.times
    assert times.forward == 2 and times.backward >= 2 and times.step >= 1
    engine.destroy()


def test_a_peak_that_cannot_be_measured_does_not_end_the_run(monkeypatch, capsys, caplog):
    def fails(*_):
        msg = "out of memory\nand more"
        raise RuntimeError(msg)

    monkeypatch.setattr(flops_profile, "measure_peak", fails)
    engine = engine_of(**section(detailed=False, peak_flops="measure"))
    logging.getLogger("mpispeed").addHandler(caplog.handler)
    for _ in range(2):
        step(engine)
    logging.getLogger("mpispeed").removeHandler(caplog.handler)
    out = capsys.readouterr().out
    assert "Profile Summary" in out and "MFU" not in out
    assert caplog.text.count("could not be measured (out of memory), so") == 1
    engine.destroy()


def test_a_profiler_of_an_engine_knows_the_sizes_of_the_run():
    engine = engine_of()
    facts = FlopsProfiler(engine.module, engine).facts
    assert (facts.world_size, facts.data_size, facts.model_size, facts.micro_batch) == (1, 1, 1, 4)
    engine.destroy()


def test_a_report_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"flops_profiler: .* cannot be written to output_file"):
        engine_of(**section(output_file=str(tmp_path / "file" / "report")))


def test_a_file_that_is_lost_on_the_way_does_not_end_the_run(tmp_path, capsys, caplog):
    engine = engine_of(**section(output_file=str(tmp_path / "reports" / "one")))
    logging.getLogger("mpispeed").addHandler(caplog.handler)
    (tmp_path / "reports").rmdir()
    (tmp_path / "reports").write_text("")
    for _ in range(2):
        step(engine)
    logging.getLogger("mpispeed").removeHandler(caplog.handler)
    assert "cannot be written" in caplog.text and "Profile Summary" in capsys.readouterr().out
    engine.destroy()


GOLDEN = Path(__file__).with_name("flops_report.txt")


def test_the_report_with_all_settings(tmp_path):
    path = tmp_path / "reports" / "profile.txt"
    settings = section(
        recompute_fwd_factor=1.0, profile_step=2, module_depth=1, top_modules=2, detailed=True, output_file=str(path),
        peak_flops=2e9,
    )  # fmt: skip
    engine = engine_of(batch=8, accumulation=2, **settings)
    for _ in range(3):
        step(engine, 2)
    engine.destroy()
    assert masked(path.read_text()) == GOLDEN.read_text()


def masked(text):
    """With times, and what is largest by time, as stars."""
    for pattern in (r"fwd latency - .*", TIMES, r"[0-9.]+%(?= latency\b|\n)"):
        text = re.sub(pattern, "*", text)
    return text
