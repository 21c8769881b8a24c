"""A restart on the same ranks continues bit for bit."""

import pytest

from tests.helpers.covering import on_ranks
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

BATCH = 36


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], ["fp32", "bf16", "fp16"]))
def test_12_steps_equal_7_restart_5(stage, dtype, mpi_tmp_path):
    settings = config(stage, BATCH, 3, dtype=dtype, **WARM)
    data = batches(12, BATCH)

    whole = start(settings, TinyLM())
    expected = train_averaged(whole, data)

    first = start(settings, TinyLM())
    losses = train_averaged(first, data[:7])
    first.save_checkpoint(str(mpi_tmp_path), client_state={"note": "seven", "numbers": [1, 2.5]})
    first.destroy()

    second = start(settings, TinyLM(seed=99))
    path, client = second.load_checkpoint(str(mpi_tmp_path))
    assert path is not None
    assert client["note"] == "seven"
    assert list(client["numbers"]) == [1, 2.5]
    assert second.global_steps == 7
    assert second.global_samples == 7 * BATCH
    losses += train_averaged(second, data[7:])

    assert losses == expected
    ours, theirs = weights(second), weights(whole)
    same_bits(ours, theirs)
    assert second.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    second.destroy()
    whole.destroy()


@pytest.mark.mpi(min_size=1)
def test_stage_and_dtype_may_change_between_save_and_load(mpi_tmp_path):
    data = batches(8, BATCH)
    expected = start(config(1, BATCH, 1, **WARM), TinyLM())
    losses = train_averaged(expected, data)
    first = start(config(1, BATCH, 1, **WARM), TinyLM())
    train_averaged(first, data[:4])
    first.save_checkpoint(str(mpi_tmp_path), tag="four")
    for stage in (0, 2, 3):
        other = start(config(stage, BATCH, 1, **WARM), TinyLM(seed=5))
        other.load_checkpoint(str(mpi_tmp_path), tag="four")
        for ours, reference in zip(train_averaged(other, data[4:]), losses[4:], strict=True):
            assert ours == pytest.approx(reference, rel=1e-5)
        other.destroy()
    low = start(config(2, BATCH, 1, **WARM, bf16={"enabled": True}), TinyLM(seed=5))
    low.load_checkpoint(str(mpi_tmp_path))
    for ours, reference in zip(train_averaged(low, data[4:]), losses[4:], strict=True):
        assert ours == pytest.approx(reference, rel=3e-2)
    for engine in (expected, first, low):
        engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_module_only_leaves_counters_and_optimizer(mpi_tmp_path):
    first = start(config(1, BATCH, 1, **WARM), TinyLM())
    train_averaged(first, batches(3, BATCH))
    first.save_checkpoint(str(mpi_tmp_path))
    second = start(config(1, BATCH, 1, **WARM), TinyLM(seed=5))
    second.load_checkpoint(str(mpi_tmp_path), load_module_only=True)
    assert second.global_steps == 0
    ours, theirs = weights(second), weights(first)
    same_bits(ours, theirs)
    state = second.parts.optimization.states.of(second.parts.table.units[0])
    assert not any(tensor.any() for tensor in state.values())
    first.destroy()
    second.destroy()


@pytest.mark.mpi(min_size=1)
def test_no_checkpoint_is_a_warning(mpi_tmp_path):
    engine = start(config(0, BATCH, 1, **WARM), TinyLM())
    assert engine.load_checkpoint(str(mpi_tmp_path / "nothing")) == (None, None)
    engine.destroy()
