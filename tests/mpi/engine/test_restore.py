"""What a load takes, leaves and refuses; weights alone as a file that replaces nothing by half."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from mpispeed.base import rng
from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.read.reader import Checkpoint
from mpispeed.engine.state import load
from tests.helpers.covering import on_ranks
from tests.zoo import same_bits
from tests.zoo.models import WIDTH, Net, TinyLM, batches, samples
from tests.zoo.training import ADAM, config, start, train, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
UNTESTED = {"zero_allow_untested_optimizer": True}


def data_of(length):
    return TensorDataset(torch.ones(length, WIDTH), torch.ones(length, 2))


def test_data_of_another_length_is_refused_before_anything_is_taken(mpi_tmp_path):
    first = start(config(1, **ADAM), training_data=data_of(48))
    train(first, samples(2))
    next(iter(first.training_dataloader))
    first.save_checkpoint(str(mpi_tmp_path))
    second = start(config(1, **ADAM), Net(seed=9), training_data=data_of(60))
    before = weights(second)
    with pytest.raises(CheckpointError, match="load_data_state=False"):
        second.load_checkpoint(str(mpi_tmp_path))
    same_bits(weights(second), before)
    assert second.global_steps == 0
    second.load_checkpoint(str(mpi_tmp_path), load_data_state=False)
    same_bits(weights(second), weights(first))
    assert (second.global_steps, second.training_dataloader.position) == (2, 0)
    first.destroy()
    second.destroy()


@pytest.mark.parametrize(("stage", "name"), on_ranks([0, 1, 3], ["Adam", "RMSprop", "Adagrad"], ranks=(1, 3)))
def test_a_warm_engine_forgets_what_it_does_not_load(name, stage, mpi_tmp_path):
    section = {"optimizer": {"type": name, "params": {"lr": 1e-2}}, **UNTESTED}
    engine = start(config(stage, **section))
    engine.save_checkpoint(str(mpi_tmp_path))
    data = samples(3)
    train(engine, data)
    engine.load_checkpoint(str(mpi_tmp_path), load_optimizer_states=False)
    train(engine, data[:2])
    fresh = start(config(stage, **section))
    train(fresh, data[:2])
    same_bits(weights(engine), weights(fresh.module))
    # this file has no state of an update: nothing of the updates since then may stay
    engine.load_checkpoint(str(mpi_tmp_path))
    train(engine, data[:2])
    same_bits(weights(engine), weights(fresh.module))
    engine.destroy()
    fresh.destroy()


def test_tied_frozen_weights_can_be_left_out(mpi_tmp_path):
    model, data = TinyLM(), batches(1, 12)
    model.embed.weight.requires_grad_(False)  # and the head's with it
    engine = start(config(1, **ADAM), model)
    train(engine, data)
    engine.save_checkpoint(str(mpi_tmp_path), exclude_frozen_parameters=True)
    after = weights(engine)
    train(engine, data)
    engine.load_checkpoint(str(mpi_tmp_path), load_module_strict=False)
    same_bits(weights(engine), after)
    engine.destroy()


def test_weights_follow_no_link_and_leave_no_piece(comm, mpi_tmp_path):
    victim = mpi_tmp_path / "victim"
    if comm.rank == 0:
        victim.write_text("mine")
        (mpi_tmp_path / ".model.bin.tmp").symlink_to(victim)
        (mpi_tmp_path / "taken").mkdir()
    comm.barrier()
    engine = start(config(0, **ADAM))
    engine.save_16bit_model(str(mpi_tmp_path), "model.bin")
    with pytest.raises(CheckpointError, match="cannot write taken"):
        engine.save_16bit_model(str(mpi_tmp_path), "taken")
    with pytest.raises(CheckpointError, match="put the folder into save_dir"):
        engine.save_16bit_model(str(mpi_tmp_path), "sub/model.bin")
    assert victim.read_text() == "mine"
    names = sorted(path.name for path in mpi_tmp_path.iterdir())
    assert names == [".model.bin.tmp", "model.bin", "taken", "victim"]
    assert torch.load(mpi_tmp_path / "model.bin").keys() == engine.module.state_dict().keys()
    engine.destroy()


@pytest.mark.parametrize(
    ("where", "error"), on_ranks(["index", "elements"], [OSError, EOFError, ValueError], ranks=(1, 3))
)
def test_what_one_rank_cannot_read_is_an_error_of_all(where, error, comm, mpi_tmp_path, monkeypatch):
    engine = start(config(0, **ADAM))
    engine.save_checkpoint(str(mpi_tmp_path))

    reason = "bad sector"

    def fail(*_, **__):
        raise error(reason)

    if where == "index" and comm.rank == 0:  # which reads it for all
        monkeypatch.setattr(load, "find", fail)
    if where == "elements" and comm.rank == comm.size - 1:
        monkeypatch.setattr(load.Source, "read_bytes", fail)
    with pytest.raises(CheckpointError, match=f"{error.__name__}: bad sector"):
        engine.load_checkpoint(str(mpi_tmp_path))
    engine.destroy()


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


def test_every_rank_gets_its_own_generators_back(comm, mpi_tmp_path, monkeypatch):
    engine = start(config(3, **ADAM))
    rng.seed_all(7, comm.rank)
    train(engine, samples(1))
    engine.save_checkpoint(str(mpi_tmp_path))
    expected = draws()
    assert len({str(theirs) for theirs in comm.gather_objects(expected)}) == comm.size
    engine.load_checkpoint(str(mpi_tmp_path))
    assert draws() == expected
    # at another number of ranks they begin anew, from the seed, the step and the rank
    monkeypatch.setattr(Checkpoint, "rng_ranks", comm.size + 1)
    engine.load_checkpoint(str(mpi_tmp_path))
    found = draws()
    rng.seed_all(engine.config.seed, 1, comm.rank)
    assert found == draws()
    before = rng.capture()
    engine.load_checkpoint(str(mpi_tmp_path), load_module_only=True)
    assert rng.capture() == before
    engine.destroy()
