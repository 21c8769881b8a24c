"""Saves in the background: the same bytes as a save that is waited for, failures that nobody misses."""

import threading
import time

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.base.events import Event
from mpispeed.ckpt.format import disk, payload
from mpispeed.ckpt.read.load import open_checkpoint
from mpispeed.ckpt.write.snapshot import Snapshot
from tests.helpers.covering import on_ranks
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
BATCH = 36


def settings(stage=1, **checkpoint):
    return config(stage, BATCH, 1, **WARM, checkpoint={"async_save": True, **checkpoint})


@pytest.mark.parametrize(("stage", "writing"), on_ranks([0, 2, 3], ["direct", "aggregated"], ranks=(1, 3)))
def test_the_file_is_that_of_the_moment_of_the_call(stage, writing, mpi_tmp_path, monkeypatch, comm):
    data = batches(6, BATCH)
    engine = start(settings(stage, writing=writing, files=2), TinyLM())
    train_averaged(engine, data[:2])
    engine.save_checkpoint(str(mpi_tmp_path / "now"), tag="t", async_save=False)
    gate, real = threading.Event(), payload.write_run

    def held(*arguments):
        gate.wait(60)
        yield from real(*arguments)

    monkeypatch.setattr(payload, "write_run", held)
    client = {"list": [1, 2], "tensor": torch.ones(3)}
    engine.save_checkpoint(str(mpi_tmp_path / "later"), tag="t", client_state=client)
    client["list"].append(3)
    client["tensor"].zero_()
    losses = train_averaged(engine, data[2:])  # while nothing has been written
    comm.barrier()
    assert not (mpi_tmp_path / "later" / "t").exists()
    gate.set()
    engine.wait_checkpoint()
    names = ["model.h5", "data/d00000.h5", "data/d00001.h5"]
    for name in names:
        first, second = (mpi_tmp_path / which / "t" / name for which in ("now", "later"))
        assert first.read_bytes() == second.read_bytes(), name
    again = start(settings(stage), TinyLM(seed=9))
    _, state = again.load_checkpoint(str(mpi_tmp_path / "later"))
    assert state["list"] == [1, 2]
    assert state["tensor"].tolist() == [1, 1, 1]
    assert train_averaged(again, data[2:]) == losses
    for one in (again, engine):
        one.destroy()


def test_saves_follow_each_other_and_are_announced_once_complete(mpi_tmp_path):
    engine = start(settings(2), TinyLM())
    seen = []
    engine.bus.subscribe(Event.SAVE_END, seen.append)
    for step, batch in enumerate(batches(4, BATCH)):
        train_averaged(engine, batch[None])
        engine.save_checkpoint(str(mpi_tmp_path))
        assert len(seen) == step
    expected = weights(engine)
    engine.destroy()
    assert [event["tag"] for event in seen] == [f"global_step{n}" for n in range(1, 5)]
    assert all(0 < event["stall_seconds"] <= event["seconds"] for event in seen)
    with open_checkpoint(mpi_tmp_path) as last:
        assert last.tag == "global_step4"
        assert torch.equal(last.read_whole("embed.weight", "master"), expected["embed.weight"])


@pytest.mark.parametrize("place", ["save", "wait", "load", "destroy"])
def test_a_failure_is_raised_by_the_next_call_on_every_rank(place, mpi_tmp_path, monkeypatch, comm):
    engine = start(settings(), TinyLM())
    engine.save_checkpoint(str(mpi_tmp_path), tag="good")
    engine.wait_checkpoint()
    if comm.rank == comm.size - 1:

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(disk, "write_at", full)
    engine.save_checkpoint(str(mpi_tmp_path), tag="bad")
    train_averaged(engine, batches(2, BATCH))
    calls = {
        "save": lambda: engine.save_checkpoint(str(mpi_tmp_path), tag="next"),
        "wait": engine.wait_checkpoint,
        "load": lambda: engine.load_checkpoint(str(mpi_tmp_path)),
        "destroy": engine.destroy,
    }
    who = rf"rank {comm.size - 1} of .*" if comm.size > 1 else ""
    with pytest.raises(CheckpointError, match=rf"{who}No space left"):
        calls[place]()
    comm.barrier()
    assert sorted(path.name for path in mpi_tmp_path.iterdir()) == ["good", "latest", "zero_to_fp32.py"]
    monkeypatch.undo()
    if place != "destroy":
        engine.save_checkpoint(str(mpi_tmp_path), tag="next")
        engine.wait_checkpoint()
        assert engine.load_checkpoint(str(mpi_tmp_path))[0].endswith("next")
    engine.destroy()


def test_bad_client_state_is_refused_at_once(mpi_tmp_path):
    engine = start(settings(), TinyLM())
    with pytest.raises(TypeError, match="object"):
        engine.save_checkpoint(str(mpi_tmp_path), client_state={"x": object()})
    for key in ("module", "global_steps", "lr_scheduler"):
        with pytest.raises(ValueError, match=f"{key}.*rename"):
            engine.save_checkpoint(str(mpi_tmp_path), client_state={key: 1})
    assert list(mpi_tmp_path.iterdir()) == []
    engine.save_checkpoint(str(mpi_tmp_path))
    engine.destroy()
    assert open_checkpoint(mpi_tmp_path).tag == "global_step0"


def test_a_slow_disk_of_one_rank_is_waited_for(mpi_tmp_path, monkeypatch, comm):
    engine = start(settings(), TinyLM())
    limits = engine.mesh.world.comm.group.limits
    limits.timeout_seconds, before = 1.0, limits.timeout_seconds
    try:
        if comm.rank == comm.size - 1:
            real = payload.write_pieces

            def slow(*arguments):
                time.sleep(3)
                return real(*arguments)

            monkeypatch.setattr(payload, "write_pieces", slow)
        engine.save_checkpoint(str(mpi_tmp_path), tag="t")
        engine.wait_checkpoint()
    finally:
        limits.timeout_seconds = before
    assert open_checkpoint(mpi_tmp_path).tag == "t"
    engine.destroy()


def test_whoever_is_interrupted_while_waiting_may_wait_again(mpi_tmp_path, monkeypatch):
    engine = start(settings(), TinyLM())
    gate, real = threading.Event(), payload.write_pieces
    monkeypatch.setattr(payload, "write_pieces", lambda *arguments: gate.wait(60) and real(*arguments))
    engine.save_checkpoint(str(mpi_tmp_path), tag="t")
    join = threading.Thread.join

    def interrupted(thread, *arguments):
        if thread.name == "mpispeed-save":
            raise KeyboardInterrupt
        join(thread, *arguments)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    for call in (engine.wait_checkpoint, engine.destroy):
        with pytest.raises(KeyboardInterrupt):
            call()
    monkeypatch.setattr(threading.Thread, "join", join)
    gate.set()
    engine.wait_checkpoint()
    assert open_checkpoint(mpi_tmp_path).tag == "t"
    train_averaged(engine, batches(1, BATCH))  # it has not been taken apart
    engine.destroy()


def test_a_rank_without_memory_for_the_copy_fails_all(mpi_tmp_path, monkeypatch, comm):
    engine = start(settings(), TinyLM())
    if comm.rank == comm.size - 1:

        def full(*_):
            reason = "no memory for the copy"
            raise MemoryError(reason)

        monkeypatch.setattr(Snapshot, "take", full)
    with pytest.raises(CheckpointError, match=r"copying the state.*no memory for the copy"):
        engine.save_checkpoint(str(mpi_tmp_path))
    monkeypatch.undo()
    engine.save_checkpoint(str(mpi_tmp_path), client_state={"loss": (torch.ones(2, requires_grad=True) * 3).sum()})
    engine.destroy()
    assert open_checkpoint(mpi_tmp_path).state()["client"]["loss"] == 6


def test_memory_of_the_copy_is_used_again(mpi_tmp_path):
    engine = start(settings(3), TinyLM())
    places = set()
    for _ in range(3):
        train_averaged(engine, batches(1, BATCH))
        engine.save_checkpoint(str(mpi_tmp_path))
        places.add(engine.checkpoints._saver._snapshot._memory.data_ptr())
    assert len(places) == 1
    engine.destroy()
