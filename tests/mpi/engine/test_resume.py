"""A restart on the same ranks continues bit for bit."""

import pytest
import torch

from tests.helpers.training import batches, config, make_engine, train_engine, weights

BATCH = 36


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_20_steps_equal_10_restart_10(stage, dtype, mpi_tmp_path):
    section = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    settings = config(stage, BATCH, 3, **section)
    data = batches(20, BATCH)

    whole = make_engine(settings)
    expected = train_engine(whole, data)

    first = make_engine(settings)
    losses = train_engine(first, data[:10])
    first.save_checkpoint(str(mpi_tmp_path), client_state={"note": "ten", "numbers": [1, 2.5]})
    first.destroy()

    second = make_engine(settings, seed=99)
    path, client = second.load_checkpoint(str(mpi_tmp_path))
    assert path is not None
    assert client["note"] == "ten"
    assert list(client["numbers"]) == [1, 2.5]
    assert second.global_steps == 10
    assert second.global_samples == 10 * BATCH
    losses += train_engine(second, data[10:])

    assert losses == expected
    ours, theirs = weights(second), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert second.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    second.destroy()
    whole.destroy()


@pytest.mark.mpi(min_size=1)
def test_stage_and_dtype_may_change_between_save_and_load(mpi_tmp_path):
    data = batches(8, BATCH)
    expected = make_engine(config(1, BATCH, 1))
    losses = train_engine(expected, data)
    first = make_engine(config(1, BATCH, 1))
    train_engine(first, data[:4])
    first.save_checkpoint(str(mpi_tmp_path), tag="four")
    for stage in (0, 2, 3):
        other = make_engine(config(stage, BATCH, 1), seed=5)
        other.load_checkpoint(str(mpi_tmp_path), tag="four")
        for ours, reference in zip(train_engine(other, data[4:]), losses[4:], strict=True):
            assert ours == pytest.approx(reference, rel=1e-5)
        other.destroy()
    low = make_engine(config(2, BATCH, 1, bf16={"enabled": True}), seed=5)
    low.load_checkpoint(str(mpi_tmp_path))
    for ours, reference in zip(train_engine(low, data[4:]), losses[4:], strict=True):
        assert ours == pytest.approx(reference, rel=3e-2)
    for engine in (expected, first, low):
        engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_module_only_leaves_counters_and_optimizer(mpi_tmp_path):
    first = make_engine(config(1, BATCH, 1))
    train_engine(first, batches(3, BATCH))
    first.save_checkpoint(str(mpi_tmp_path))
    second = make_engine(config(1, BATCH, 1), seed=5)
    second.load_checkpoint(str(mpi_tmp_path), load_module_only=True)
    assert second.global_steps == 0
    ours, theirs = weights(second), weights(first)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    state = second.parts.optimization.states.of(second.parts.table.units[0])
    assert not any(tensor.any() for tensor in state.values())
    first.destroy()
    second.destroy()


@pytest.mark.mpi(min_size=1)
def test_no_checkpoint_is_a_warning(mpi_tmp_path):
    engine = make_engine(config(0, BATCH, 1))
    assert engine.load_checkpoint(str(mpi_tmp_path / "nothing")) == (None, None)
    engine.destroy()
