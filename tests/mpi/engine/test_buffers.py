"""Running statistics and other buffers: equal on all ranks after a step, kept by a restart; SyncBatchNorm."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from tests.zoo import same_bits
from tests.zoo.models import Buffered
from tests.zoo.training import config, own_part, start, train, train_plain

STEPS, BATCH, WIDTH = 4, 24, 6


def data(steps=STEPS):
    return torch.randn(steps, BATCH, WIDTH, generator=torch.Generator().manual_seed(2)) * 3 + 1


def make(stage=0, norm=nn.BatchNorm1d, **more):
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    return start(config(stage, BATCH, optimizer=adamw, reduction="ordered", **more), Buffered(norm))


def evaluate(engine, batch):
    engine.eval()
    with torch.no_grad():
        loss = engine(batch)
    engine.train()
    return loss


def everywhere(world, value):
    return world.comm.gather_objects(value)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_evaluate_alike_and_a_restart_does_too(stage, world, mpi_tmp_path):
    batches, engine = data(), make(stage)
    train(engine, batches[:2])
    values = everywhere(world, evaluate(engine, batches[3]))
    assert all(torch.equal(value, values[0]) for value in values)
    engine.save_checkpoint(str(mpi_tmp_path))
    expected = evaluate(engine, batches[3]), *train(engine, batches[2:]), evaluate(engine, batches[0])
    state = {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name != "cache"}
    engine.destroy()
    engine = make(stage)
    engine.load_checkpoint(str(mpi_tmp_path))
    again = evaluate(engine, batches[3]), *train(engine, batches[2:]), evaluate(engine, batches[0])
    same_bits(again, expected)
    for name, buffer in state.items():
        assert torch.equal(engine.module.get_buffer(name), buffer), name
        assert all(torch.equal(other, buffer) for other in everywhere(world, buffer)), name
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_floats_are_means_integers_those_of_the_first_rank_and_caches_each_ranks_own(world):
    engine = make()
    batch = data(1)[0]
    plain = Buffered()
    plain.load_state_dict(engine.module.state_dict())
    plain(*own_part(engine, batch))
    train(engine, [batch])
    means = [
        torch.stack(everywhere(world, getattr(plain.norm, name))).mean(0) for name in ("running_mean", "running_var")
    ]
    torch.testing.assert_close([engine.module.norm.running_mean, engine.module.norm.running_var], means)
    torch.testing.assert_close(engine.module.ema, torch.stack(everywhere(world, plain.ema)).mean(0))
    assert engine.module.seen == BATCH // world.size
    assert engine.module.norm.num_batches_tracked == 1
    assert torch.equal(engine.module.table, torch.arange(5.0))
    assert engine.module.cache[0] == own_part(engine, batch)[0][0, 0]
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_what_begins_to_change_later_or_unseen_is_made_equal_too(world, mpi_tmp_path):
    engine, batches = make(), data()
    train(engine, batches[:1])
    engine.module.table.add_(world.rank)  # torch counts it
    train(engine, batches[1:2])
    assert engine.module.table[0] == (world.size - 1) / 2
    other = engine.module.ema.data
    other.add_(1 + world.rank)  # nobody counts it
    engine.save_checkpoint(str(mpi_tmp_path))
    assert all(torch.equal(found, engine.module.ema) for found in everywhere(world, engine.module.ema))
    engine.destroy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sync_batch_norm_is_that_of_the_whole_batch(stage, world):
    batches, plain = data(), Buffered()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    expected = train_plain(plain, batches, optimizer).losses
    engine = make(stage, nn.SyncBatchNorm)
    losses = torch.tensor(everywhere(world, train(engine, batches))).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-6, atol=1e-6)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(engine.module.norm, name), getattr(plain.norm, name), rtol=1e-6, atol=1e-6)
    plain.eval()
    torch.testing.assert_close(evaluate(engine, batches[0]), plain(batches[0]).detach(), rtol=1e-5, atol=1e-6)
    assert type(engine.module.norm) is not nn.SyncBatchNorm
    engine.destroy()
    assert type(engine.module.norm) is nn.SyncBatchNorm


@pytest.mark.mpi(min_size=2)
def test_a_class_derived_from_sync_batch_norm_is_refused():
    class Own(nn.SyncBatchNorm):
        pass

    with pytest.raises(ConfigError, match=r"norm is a Own, a class derived from SyncBatchNorm"):
        make(norm=Own)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("later", ["longer", "gone"])
def test_a_buffer_that_gets_another_shape_on_one_rank_is_left_alone(later):
    engine = make()
    rank, size = engine.mesh.rank, engine.mesh.size
    for step in range(4):
        module = engine.module
        if step < 2:
            module.table += 1 + rank
        elif rank == size - 1:
            module.table = torch.full((7,), float(step)) if later == "longer" else None
        train(engine, data(1))
        if step == 1:
            shared = module.table.clone()
    engine.destroy()
    if rank == size - 1:
        assert module.table is None if later == "gone" else module.table.tolist() == [3.0] * 7
    else:
        assert torch.equal(module.table, shared)
