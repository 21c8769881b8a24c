"""The section "checkpoint" of the config, and what a load gives back."""

import pytest
import torch

import mpispeed
from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import tags
from mpispeed.ckpt.read.load import open_checkpoint
from mpispeed.zero import ZeRORuntimeException
from tests.zoo import same_bits
from tests.zoo.models import Buffered, TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
BATCH = 36


def test_old_checkpoints_go_as_asked(mpi_tmp_path):
    engine = start(config(1, BATCH, 1, **WARM, checkpoint={"keep_last": 2, "keep_every": 3}), TinyLM())
    for batch in batches(7, BATCH):
        train_averaged(engine, batch[None])
        engine.save_checkpoint(str(mpi_tmp_path))
    assert [entry.tag for entry in tags.list_tags(mpi_tmp_path)] == [f"global_step{n}" for n in (3, 6, 7)]
    # one that `latest` does not name is not the newest that counts, and the one it names stays
    for batch in batches(3, BATCH):
        train_averaged(engine, batch[None])
        engine.save_checkpoint(str(mpi_tmp_path), save_latest=False)
    found = [entry.tag for entry in tags.list_tags(mpi_tmp_path)]
    assert found == [f"global_step{n}" for n in (3, 6, 7, 9, 10)]
    assert engine.load_checkpoint(str(mpi_tmp_path))[0].endswith("global_step7")
    engine.destroy()


@pytest.mark.parametrize("mode", ["off", "touched", "full"])
def test_how_much_is_verified(mode, mpi_tmp_path):
    engine = start(config(2, BATCH, 1, **WARM, checkpoint={"load_verify": mode}), TinyLM())
    engine.save_checkpoint(str(mpi_tmp_path), tag="t")
    engine.load_checkpoint(str(mpi_tmp_path))
    with open_checkpoint(mpi_tmp_path) as checkpoint:
        places = {slot: checkpoint.stored("blocks.1.up.weight", slot).offset for slot in ("master", "exp_avg")}
    for slot, is_read in (("exp_avg", False), ("master", True)):
        engine.mesh.world.comm.barrier()
        if engine.mesh.rank == 0:
            with (mpi_tmp_path / "t" / "model.h5").open("r+b") as file:
                file.seek(places[slot])
                byte = file.read(1)[0]
                file.seek(places[slot])
                file.write(bytes([byte ^ 1]))
        engine.mesh.world.comm.barrier()
        finds = mode == "full" or (mode == "touched" and is_read)
        if finds:
            with pytest.raises(CheckpointError, match=r"blocks\.1\.up\.weight/"):
                engine.load_checkpoint(str(mpi_tmp_path), load_optimizer_states=False)
        else:
            engine.load_checkpoint(str(mpi_tmp_path), load_optimizer_states=False)
    engine.destroy()


def test_what_is_not_taken_is_given_back(mpi_tmp_path):
    engine = start(config(1, BATCH, 1, **WARM), TinyLM())
    train_averaged(engine, batches(3, BATCH))
    expected = engine.lr_scheduler.state_dict()
    engine.save_checkpoint(str(mpi_tmp_path), client_state={"mine": 1})
    _, state = engine.load_checkpoint(str(mpi_tmp_path), load_lr_scheduler_states=False)
    assert state == {"mine": 1, "lr_scheduler": expected}
    _, state = engine.load_checkpoint(str(mpi_tmp_path), load_module_only=True)
    assert state["mine"] == 1
    assert state["lr_scheduler"] == expected
    assert state["engine"]["global_steps"] == 3
    assert engine.load_checkpoint(str(mpi_tmp_path))[1] == {"mine": 1}
    engine.destroy()


def groups_of(model, turn):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1, "lr": 1e-3}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]
    return groups[::-1] if turn else groups


def grouped(turn, lr_factor=1.0):
    model = TinyLM()
    groups = groups_of(model, turn)
    for group in groups:
        group["lr"] *= lr_factor
        group["weight_decay"] *= lr_factor
    settings = config(1, BATCH, 1, **WARM)
    del settings["scheduler"]
    return mpispeed.initialize(model=model, config=settings, model_parameters=groups)[0]


@pytest.mark.parametrize("turn", [False, True])
def test_groups_are_found_by_their_parameters(turn, mpi_tmp_path):
    first = grouped(False)
    data = batches(4, BATCH)
    train_averaged(first, data[:2])
    first.save_checkpoint(str(mpi_tmp_path))
    second = grouped(turn, lr_factor=7.0)
    second.load_checkpoint(str(mpi_tmp_path))
    rates = [(group["lr"], group["weight_decay"]) for group in second.optimizer.param_groups]
    assert rates == ([(2e-3, 0.0), (1e-3, 0.1)] if turn else [(1e-3, 0.1), (2e-3, 0.0)])
    assert train_averaged(second, data[2:]) == pytest.approx(train_averaged(first, data[2:]), rel=1e-6)
    for engine in (first, second):
        engine.destroy()


@pytest.mark.deepspeed_row("a17")
def test_other_groups_than_the_stored_ones_are_the_error_that_scripts_catch(mpi_tmp_path):
    first = grouped(False)
    first.save_checkpoint(str(mpi_tmp_path))
    second = start(config(1, BATCH, 1, **WARM), TinyLM())
    with pytest.raises(ZeRORuntimeException, match=r"has 2 parameter groups and the optimizer 1; group .* alike"):
        second.load_checkpoint(str(mpi_tmp_path))
    for engine in (first, second):
        engine.destroy()


def test_masters_from_16_bit_weights_when_asked(mpi_tmp_path):
    first = start(config(2, BATCH, 1, **WARM, bf16={"enabled": True}), TinyLM())
    train_averaged(first, batches(3, BATCH))
    first.save_checkpoint(str(mpi_tmp_path))
    exact = {}
    with open_checkpoint(mpi_tmp_path) as checkpoint:
        exact = {name: checkpoint.read_whole(name, "master") for name in checkpoint.names()}
    for wants_fp32 in (True, False):
        settings = config(2, BATCH, 1, **WARM, bf16={"enabled": True})
        settings["zero_optimization"]["load_from_fp32_weights"] = wants_fp32
        second = start(settings, TinyLM(seed=4))
        second.load_checkpoint(str(mpi_tmp_path))
        second.save_checkpoint(str(mpi_tmp_path / str(wants_fp32)))
        with open_checkpoint(mpi_tmp_path / str(wants_fp32)) as checkpoint:
            for name, value in exact.items():
                expected = value if wants_fp32 else value.bfloat16().float()
                assert torch.equal(checkpoint.read_whole(name, "master"), expected), name
        second.destroy()
    first.destroy()


def test_newly_trained_and_newly_frozen_parameters(mpi_tmp_path, caplog):
    first_model = TinyLM()
    first_model.norm.weight.requires_grad_(False)
    first = mpispeed.initialize(model=first_model, config=config(3, BATCH, 1, **WARM))[0]
    data = batches(4, BATCH)
    train_averaged(first, data[:2])
    first.save_checkpoint(str(mpi_tmp_path))
    model = TinyLM(seed=11)
    model.norm.bias.requires_grad_(False)
    second = mpispeed.initialize(model=model, config=config(3, BATCH, 1, **WARM))[0]
    second.load_checkpoint(str(mpi_tmp_path))
    ours, theirs = weights(second), weights(first)
    same_bits(ours, theirs)
    train_averaged(second, data[2:])
    assert not torch.equal(weights(second)["norm.weight"], theirs["norm.weight"])
    assert torch.equal(weights(second)["norm.bias"], theirs["norm.bias"])
    for engine in (first, second):
        engine.destroy()


def test_buffers_that_no_state_dict_has_are_left_out(mpi_tmp_path):
    engine = start(config(1, BATCH, **WARM), Buffered())
    engine.save_checkpoint(str(mpi_tmp_path))
    with open_checkpoint(mpi_tmp_path) as checkpoint:
        kept = {name for name in engine.module.state_dict() if name not in dict(engine.module.named_parameters())}
        assert set(checkpoint.buffers()) == kept == {name for name, _ in engine.module.named_buffers()} - {"cache"}
    engine.module.table.zero_()
    engine.module.cache.fill_(3.0)
    engine.load_checkpoint(str(mpi_tmp_path))
    assert engine.module.table.tolist() == [0, 1, 2, 3, 4]
    assert engine.module.cache.tolist() == [3]
    engine.destroy()
