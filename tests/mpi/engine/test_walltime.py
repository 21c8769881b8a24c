"""Runs that end in time: one rank's signal ends all, files, the last safe step, what is left for the next job."""

import json
import logging
import math
import os
import signal
import threading
from itertools import count

import pytest

import mpispeed
from mpispeed.base.errors import CheckpointError, ConfigError
from mpispeed.ckpt.format import payload
from tests.helpers.pipes import Case, Layout, feed
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
BATCH = 12
DATA = batches(12, BATCH)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("MPISPEED_WALLTIME", "MPISPEED_RUN_DIR"):
            monkeypatch.delenv(name)
    # Ranks agree after each step, not once in a second.
    monkeypatch.setattr("mpispeed.walltime.last_safe_step.CHECK_SECONDS", 0.0)
    monkeypatch.setattr("mpispeed.walltime.requests.LOOK_SECONDS", 0.0)


def make(folder, *, checkpoint=None, zero_stage=1, **walltime):
    # USR1 is what the runner of these tests asks for stacks with.
    section = {"save_dir": str(folder), "signals": ["USR2"], "margin_seconds": 0, **walltime}
    settings = config(zero_stage, BATCH, 1, **WARM, walltime=section, checkpoint=checkpoint or {})
    return mpispeed.initialize(model=TinyLM(), config=settings)[0]


def state_of(comm, folder):
    comm.barrier()
    return json.loads((folder / "state.json").read_text())


def ends(engine, data):
    """Train until the run ends; returns what it ended with, and the losses."""
    losses = []
    with pytest.raises(mpispeed.RunEnded) as caught:
        for batch in data:
            losses.append(train_averaged(engine, [batch])[0])
    return caught.value, losses


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_signal_on_one_rank_ends_all_and_the_next_run_goes_on(zero_stage, mpi_tmp_path, comm):
    straight = make(mpi_tmp_path / "straight", zero_stage=zero_stage)
    expected = train_averaged(straight, DATA)
    straight.destroy()
    assert state_of(comm, mpi_tmp_path / "straight")["state"] == "finished"

    before = signal.getsignal(signal.SIGUSR2)
    engine = make(mpi_tmp_path / "cut", zero_stage=zero_stage)
    assert engine.resumed_from is None
    losses = train_averaged(engine, DATA[:2])
    assert state_of(comm, mpi_tmp_path / "cut")["state"] == "running"
    engine.client_state["epoch"] = 7
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    ended, more = ends(engine, DATA[2:])
    assert (ended.code, ended.reason) == (0, f"SIGUSR2 on rank {comm.size - 1}")
    assert ended.step == engine.global_steps
    assert ended.tag == f"walltime_step{ended.step}"
    engine.destroy()
    assert signal.getsignal(signal.SIGUSR2) == before
    state = state_of(comm, mpi_tmp_path / "cut")
    assert (state["state"], state["step"], state["tag"], state["reason"]) == (
        "interrupted", ended.step, ended.tag, ended.reason,
    )  # fmt: skip

    again = make(mpi_tmp_path / "cut", zero_stage=zero_stage)
    assert again.resumed_from == str(mpi_tmp_path / "cut" / ended.tag)
    assert again.client_state["epoch"] == 7
    assert again.global_steps == ended.step == 1 + len(losses + more)
    # Not measured: the loss of the step that ended the run, which the exception has.
    losses += [*more, expected[ended.step - 1], *train_averaged(again, DATA[ended.step :])]
    assert losses == expected
    again.destroy()


def test_a_method_that_a_script_has_put_on_the_engine_saves(mpi_tmp_path, comm):
    """It has DeepSpeed's arguments only."""
    engine, told = make(mpi_tmp_path), []
    real = engine.save_checkpoint

    def save(save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False):  # noqa: B006
        told.append(tag)
        return real(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    engine.save_checkpoint = save
    train_averaged(engine, DATA[:2])
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    ended, _ = ends(engine, DATA[2:])
    assert told == [ended.tag]
    engine.destroy()
    again = make(mpi_tmp_path)
    assert (again.global_steps, again.resumed_from) == (ended.step, str(mpi_tmp_path / ended.tag))
    again.destroy()


def test_the_last_safe_step(mpi_tmp_path, comm, caplog):
    """Without time nothing but a first step is done; the time for the next save is what this one took."""
    engine = make(mpi_tmp_path, limit=1)
    ended, losses = ends(engine, DATA)
    assert (ended.reason, ended.step, losses) == ("the job ends", 1, [])
    engine.destroy()
    took = state_of(comm, mpi_tmp_path)["save_seconds"]
    assert 0 < took < 30
    with caplog.at_level(logging.INFO, logger="mpispeed.engine.preemption"):
        again = make(mpi_tmp_path, limit="1-00:00:00")
    if comm.rank == 0:
        assert f"a save is expected to take {took * 1000:.3g} ms" in caplog.text or took > 1
        assert "by the limit that was given" in caplog.text
    train_averaged(again, DATA[1:6])
    again.destroy()
    assert state_of(comm, mpi_tmp_path)["state"] == "finished"


def test_an_error_is_no_finished_run(mpi_tmp_path, comm):
    engine = make(mpi_tmp_path)
    message = "this run is broken"
    with pytest.raises(ValueError, match=message):
        try:
            train_averaged(engine, DATA[:1])
            raise ValueError(message)
        finally:
            engine.destroy()
    state = state_of(comm, mpi_tmp_path)
    assert (state["state"], state["reason"]) == ("failed", f"ValueError: {message}")


def test_files_ask_for_a_save_and_for_the_end(mpi_tmp_path, comm):
    engine = make(mpi_tmp_path, keep_last=1, ends_program=False)
    for name, step in (("SAVE", 1), ("SAVE", 2), ("STOP", 3)):
        comm.barrier()
        if comm.rank == 0:
            (mpi_tmp_path / name).touch()
        assert not engine.must_stop
        train_averaged(engine, DATA[step : step + 1])
        comm.barrier()
        assert not (mpi_tmp_path / "SAVE").exists()
        assert [path.name for path in mpi_tmp_path.glob("walltime_*")] == [f"walltime_step{step}"]
        comm.barrier()
    assert engine.must_stop
    train_averaged(engine, DATA[4:5])  # whoever does not look goes on
    engine.destroy()
    state = state_of(comm, mpi_tmp_path)
    assert (state["state"], state["step"]) == ("stopped", 3)
    assert "remove" in state["reason"]
    assert "STOP" in state["reason"]
    with pytest.raises(mpispeed.RunEnded) as caught:  # nothing begins while it is there
        make(mpi_tmp_path)
    assert caught.value.step == 3
    comm.barrier()


def test_a_save_that_is_asked_for_and_fails_does_not_end_training(mpi_tmp_path, comm, caplog):
    engine = make(mpi_tmp_path)
    if comm.rank == 0:
        (mpi_tmp_path / "SAVE").touch()
        (mpi_tmp_path / "walltime_step1").touch()  # no folder can have this name now
    train_averaged(engine, DATA[:2])
    if comm.rank == 0:
        assert "asked for a checkpoint, which failed" in caplog.text
        (mpi_tmp_path / "walltime_step3").touch()
        os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(CheckpointError):
        train_averaged(engine, DATA[2:3])
    engine.destroy()
    state = state_of(comm, mpi_tmp_path)
    assert state["state"] == "failed"
    assert "the save failed" in state["reason"]


def test_a_save_in_the_background_is_complete_before_the_end(mpi_tmp_path, comm, monkeypatch):
    engine = make(mpi_tmp_path, checkpoint={"async_save": True})
    real, gate = payload.write_run, threading.Event()

    def slow(*arguments):
        gate.wait(60)
        yield from real(*arguments)

    monkeypatch.setattr(payload, "write_run", slow)
    train_averaged(engine, DATA[:1])
    engine.save_checkpoint(str(mpi_tmp_path), tag="mine")
    assert engine.is_saving
    threading.Timer(0.3, gate.set).start()  # while the run ends
    os.kill(os.getpid(), signal.SIGUSR2)
    ended, _ = ends(engine, DATA[1:])
    assert not engine.is_saving
    comm.barrier()
    assert (mpi_tmp_path / "mine" / "manifest.json").exists()
    assert (mpi_tmp_path / "latest").read_text().startswith(ended.tag)
    engine.destroy()


def test_long_evaluations_can_be_left(mpi_tmp_path, comm):
    engine = make(mpi_tmp_path)
    train_averaged(engine, DATA[:2])
    times = engine.run_end._steps
    assert times.steps_to_pause(2) == math.inf
    engine.eval()
    engine(DATA[0][:2])
    engine.train()
    train_averaged(engine, DATA[2:3])
    assert times.steps_to_pause(3) == 2, "before step 3, so perhaps again before step 6"
    engine.eval()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(mpispeed.RunEnded) as caught:
        for done in count():
            engine(DATA[done][:2])
            engine.heed_requests()
    assert (done, caught.value.step) == (0, 3)
    whole = weights(engine)
    engine.destroy()
    again = make(mpi_tmp_path)
    assert all((weights(again)[name] == value).all() for name, value in whole.items())
    os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(mpispeed.RunEnded):
        again.heed_requests()
    again.destroy()
    state = state_of(comm, mpi_tmp_path)
    assert state["state"] == "stopped"
    assert "made no step" in state["reason"]


@pytest.mark.ranks(2, 4)
def test_a_pipeline_ends_after_a_batch_and_before_an_evaluation(mpi_tmp_path, comm):
    case = Case(Layout(2, 1, comm.size // 2))
    section = {"save_dir": str(mpi_tmp_path), "signals": ["USR2"]}
    engine = case.engine(walltime=section)
    for step in range(2):
        engine.train_batch(feed(engine, step))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(mpispeed.RunEnded) as caught:
        engine.eval_batch(feed(engine, 2))
    assert caught.value.step == 2
    engine.destroy()
    again = case.engine(walltime=section)
    assert again.global_steps == 2
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(mpispeed.RunEnded) as caught:
        for step in range(2, 100):
            again.train_batch(feed(again, step))
    assert caught.value.step > 2
    assert caught.value.loss > 0
    again.destroy()


@pytest.mark.ranks(2)
def test_a_job_does_not_begin_while_another_one_writes_the_run(mpi_tmp_path, comm, monkeypatch):
    if comm.rank == 0:
        (mpi_tmp_path / "state.json").write_text('{"state": "running", "job": "12"}')
        fake = mpi_tmp_path / "scontrol"
        fake.write_text("#!/bin/sh\necho JobId=12 JobState=RUNNING\n")
        fake.chmod(0o755)
    comm.barrier()
    monkeypatch.setenv("PATH", f"{mpi_tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(ConfigError, match="job 12 is writing this run"):
        make(mpi_tmp_path)
    assert signal.getsignal(signal.SIGUSR2) == before
    assert state_of(comm, mpi_tmp_path)["job"] == "12"


def test_a_limit_that_is_no_time_ends_all_ranks(mpi_tmp_path, comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("MPISPEED_WALLTIME", "soon")
    with pytest.raises(ConfigError, match="MPISPEED_WALLTIME='soon'"):
        make(mpi_tmp_path)
