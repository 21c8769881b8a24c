"""States that leave memory for a while: memory goes down, nothing is read meanwhile, the bits come back."""

import gc
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import mpispeed
from mpispeed.base.errors import ConfigError, StoreError, UsageError
from mpispeed.native import block_io
from mpispeed.zero import GatheredParameters, OffloadStateTypeEnum, safe_get_full_fp32_param
from tests.helpers.covering import in_turn
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

pytestmark = pytest.mark.ranks(1, 3)

KINDS = list(OffloadStateTypeEnum)


@pytest.fixture
def disk():
    """A folder that all ranks name alike."""
    from mpi4py import MPI

    made = tempfile.mkdtemp(prefix="mpispeed-test-", dir="/var/tmp") if MPI.COMM_WORLD.rank == 0 else None
    folder = Path(MPI.COMM_WORLD.bcast(made))
    yield folder
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        shutil.rmtree(folder)


def settings_of(stage, accumulation=1, sections=None, **more):
    return config(stage, 12 * accumulation, accumulation, reduction="ordered", zero=sections, **(WARM | more))


def swap_files(disk, engine):
    engine.mesh.world.comm.barrier()
    found = list(disk.rglob("*.swap"))
    engine.mesh.world.comm.barrier()
    return found


def held_bytes(engine):
    """Bytes in memory by kind."""
    parts = engine.parts
    params, optimization = parts.params, parts.optimization
    return {
        "lp_params": params.shards.param_bytes,
        "hp_params": params.shards.master_bytes,
        "lp_grads": optimization.grads.shards.rest_bytes,
        "optim_states": optimization.states.state_bytes,
    }


def run(settings, between=lambda engine: None, steps=4, model=TinyLM):
    """Losses and weights of a few steps; `between` is called in their middle."""
    engine = mpispeed.initialize(model=model(), config=settings)[0]
    data = batches(steps, engine.train_batch_size())
    losses = train_averaged(engine, data[: steps // 2])
    between(engine)
    losses += train_averaged(engine, data[steps // 2 :])
    found = weights(engine)
    engine.destroy()
    return losses, found


CASES = [(stage, dtype, None) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]
CASES += [(stage, "bf16", [kind]) for stage in (1, 3) for kind in KINDS]
CASES += [(3, "fp32", ["optim_states", "hp_params"])]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "dtype", "include"), in_turn(CASES, ranks=(1, 2, 3, 4, 3)))
def test_training_goes_on_with_the_same_bits(stage, dtype, include, disk):
    settings = settings_of(stage, 2, dtype=dtype)

    def between(engine):
        before = held_bytes(engine)
        engine.offload_states(include, device="nvme", nvme_path=disk)
        away = set(KINDS if include is None else include)
        after = held_bytes(engine)
        assert after == {kind: 0 if kind in away else size for kind, size in before.items()}
        engine.reload_states()
        assert held_bytes(engine) == before
        assert not swap_files(disk, engine)

    same_bits(run(settings, between), run(settings))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("threshold", [200, 10**6])
def test_parameters_that_stay_whole_come_back_too(threshold, disk):
    settings = settings_of(3, sections={"stage3_param_persistence_threshold": threshold}, bf16={"enabled": True})

    def between(engine):
        engine.offload_states(device="nvme", nvme_path=disk)
        engine.reload_states()

    same_bits(run(settings, between), run(settings))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_in_the_middle_of_an_accumulation_survive(stage, disk):
    def train(with_trip):
        engine = start(settings_of(stage, 3), TinyLM())
        rank, size = engine.mesh.rank, engine.mesh.size
        micro = 12 // size
        for batch in batches(3, 36):
            for k in range(3):
                engine.backward(engine(batch[(k * size + rank) * micro :][:micro]))
                if with_trip:
                    engine.offload_states(device="nvme", nvme_path=disk)
                    engine.reload_states()
                engine.step()
        found = weights(engine)
        engine.destroy()
        return [], found

    same_bits(train(True), train(False))


@pytest.mark.mpi(min_size=1)
def test_memory_of_the_process_goes_down(disk):
    def resident():
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    settings = settings_of(3)
    settings["train_batch_size"] = 12
    del settings["gradient_accumulation_steps"]
    engine = start(settings, torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12))))
    engine.backward(engine(torch.ones(12 // engine.mesh.size, 1024)).square().mean())
    engine.step()
    states = sum(held_bytes(engine).values())
    before = resident()
    engine.offload_states(device="nvme", nvme_path=disk)
    freed = before - resident()
    # Scratch is freed beside it; the allocator may keep a little.
    assert freed > 0.9 * states > 0
    engine.reload_states()
    engine.backward(engine(torch.ones(12 // engine.mesh.size, 1024)).square().mean())
    engine.step()
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 3])
def test_whatever_needs_them_says_what_to_do(stage, disk):
    engine = start(settings_of(stage, bf16={"enabled": True}), TinyLM())
    batch = batches(1, 12)[0][: 12 // engine.mesh.size]
    loss = engine(batch)
    engine.backward(loss)
    engine.offload_states(device="nvme", nvme_path=disk)
    param = next(engine.module.parameters())
    folder = str(disk / "checkpoint")
    calls = {
        "forward": lambda: engine(batch),
        "the module": lambda: engine.module(batch),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
        "save": lambda: engine.save_checkpoint(folder),
        "load": lambda: engine.load_checkpoint(folder),
        "module_state_dict": engine.module_state_dict,
        "state_dict": engine.module.state_dict if stage == 0 else engine.module_state_dict,
        "load_module_state_dict": lambda: engine.load_module_state_dict(TinyLM().state_dict()),
        "save_16bit_model": lambda: engine.save_16bit_model(folder),
        "access": lambda: safe_get_full_fp32_param(param),
        "gather": lambda: GatheredParameters(param).__enter__(),
        "change": lambda: GatheredParameters(param, modifier_rank=0).__enter__(),
        "read": lambda: param.sum() if stage == 0 else engine(batch),
    }
    if stage == 3:  # without "stage3_gather_16bit_weights_on_model_save" it answers False
        del calls["save_16bit_model"]
    for name, call in calls.items():
        with pytest.raises(UsageError, match=r"engine\.reload_states\(\) first"):
            call()
            pytest.fail(name)
    engine.reload_states()
    engine.step()
    assert safe_get_full_fp32_param(param) is not None
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_model_can_be_used_while_the_optimizer_is_away(stage, disk):
    engine = start(settings_of(stage, bf16={"enabled": True}), TinyLM())
    batch = batches(1, 12)[0][: 12 // engine.mesh.size]
    expected = engine(batch).detach()
    engine.offload_states(["optim_states", "hp_params", "lp_grads"], device="nvme", nvme_path=disk)
    assert torch.equal(engine(batch).detach(), expected)
    with GatheredParameters(engine.module.parameters()):
        assert all(param.isfinite().all() for param in engine.module.parameters())
    with pytest.raises(UsageError, match="lp_grads"):
        engine.backward(engine(batch))
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 2])
def test_state_of_an_optimizer_object_goes_too(stage, disk):
    def train(with_trip):
        model = TinyLM()
        settings = settings_of(stage, zero_allow_untested_optimizer=True)
        del settings["optimizer"], settings["scheduler"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        engine = mpispeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        losses = train_averaged(engine, batches(2, 12))
        if with_trip:
            engine.offload_states(device="nvme", nvme_path=disk)
            tensors = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
            assert tensors
            assert not any(t.numel() for t in tensors)
            engine.reload_states()
        losses += train_averaged(engine, batches(4, 12)[2:])
        found = weights(engine)
        engine.destroy()
        return losses, found

    same_bits(train(True), train(False))


@pytest.mark.mpi(min_size=1)
def test_what_rests_in_swap_files_stays_there(disk):
    section = {"device": "nvme", "nvme_path": str(disk)}
    settings = settings_of(3, sections={"offload_optimizer": section}, bf16={"enabled": True})

    def between(engine):
        files = set(swap_files(disk, engine))
        engine.offload_states(device="nvme")  # below the path of the config
        assert set(swap_files(disk, engine)) > files
        engine.reload_states()
        assert set(swap_files(disk, engine)) == files

    same_bits(run(settings, between), run(settings))


@pytest.mark.mpi(min_size=1)
def test_kinds_can_go_one_after_the_other(disk):
    def between(engine):
        engine.offload_states(["optim_states"], device="nvme", nvme_path=disk)
        engine.offload_states(["optim_states", "lp_params"], device="nvme", nvme_path=disk)
        assert engine.parts.params.away == {"optim_states", "lp_params"}
        engine.reload_states()
        engine.reload_states()

    settings = settings_of(3, bf16={"enabled": True})
    same_bits(run(settings, between), run(settings))


@pytest.mark.mpi(min_size=1)
def test_cpu_moves_nothing_and_says_so_once(disk, caplog):
    engine = start(settings_of(3), TinyLM())
    before = held_bytes(engine)
    with caplog.at_level(logging.WARNING):
        engine.offload_states()
        engine.offload_states(["lp_params"], "cpu")
    assert held_bytes(engine) == before
    said = [record for record in caplog.records if "moves nothing" in record.getMessage()]
    assert len(said) <= 1  # none if another engine of this process has said it
    train_averaged(engine, batches(1, 12))
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 3])
def test_destroy_gives_the_weights_back(stage, disk):
    engine = start(settings_of(stage, bf16={"enabled": True}), TinyLM())
    train_averaged(engine, batches(2, 12))
    expected = weights(engine)
    engine.offload_states(device="nvme", nvme_path=disk)
    engine.destroy()
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.detach(), expected[name]), name
    assert not swap_files(disk, engine)


@pytest.mark.mpi(min_size=1)
def test_mistakes_are_named(disk):
    engine = start(settings_of(3), TinyLM())
    with pytest.raises(UsageError, match=r"optim_state'; there are optim_states.*Did you mean"):
        engine.offload_states(["optim_state"], device="nvme", nvme_path=disk)
    with pytest.raises(UsageError, match="device is 'disk'"):
        engine.offload_states(device="disk")
    with pytest.raises(ConfigError, match="nvme_path"):
        engine.offload_states(device="nvme")
    if engine.mesh.rank == 0:
        (disk / "file").write_text("")
    engine.mesh.world.comm.barrier()
    with pytest.raises(ConfigError, match="file"):
        engine.offload_states(device="nvme", nvme_path=disk / "file" / "folder")
    train_averaged(engine, batches(1, 12))
    engine.destroy()
    with pytest.raises(UsageError, match="destroy"):
        engine.offload_states(device="nvme", nvme_path=disk)


@pytest.mark.mpi(min_size=1)
def test_an_error_that_nobody_foresaw_on_one_rank_is_raised_on_all_and_nothing_is_lost(disk):
    def between(engine):
        last = engine.mesh.rank == engine.mesh.size - 1

        def fail(*args):
            raise LookupError("planted")

        engine.offload_states(["optim_states"], device="nvme", nvme_path=disk)  # the folder is known to be good
        with pytest.MonkeyPatch.context() as patch:
            if last:
                patch.setattr(block_io.BlockIO, "write", fail)
            with pytest.raises(StoreError, match="LookupError: planted"):
                engine.offload_states(device="nvme", nvme_path=disk)
        assert engine.parts.params.away == {"optim_states"}
        engine.offload_states(device="nvme", nvme_path=disk)
        with pytest.MonkeyPatch.context() as patch:
            if last:
                patch.setattr(block_io.BlockIO, "read", fail)
            with pytest.raises(StoreError, match="LookupError: planted"):
                engine.reload_states()
        engine.reload_states()

    settings = settings_of(3, bf16={"enabled": True})
    same_bits(run(settings, between), run(settings))


@pytest.mark.mpi(min_size=1)
def test_a_disk_that_fails_on_one_rank_fails_on_all_and_nothing_is_lost(disk):
    def between(engine):
        last = engine.mesh.rank == engine.mesh.size - 1
        engine.offload_states(["optim_states"], device="nvme", nvme_path=disk)  # the folder is known to be good
        if last:
            block_io.inject("write", nth=2, errno=28)
        with pytest.raises(StoreError, match="No space left"):
            engine.offload_states(device="nvme", nvme_path=disk)
        assert engine.parts.params.away == {"optim_states"}
        if last:
            block_io.inject("read", nth=2, errno=5)
        with pytest.raises(StoreError, match=r"Input/output error.*reload_states\(\) again"):
            engine.reload_states()
        with pytest.raises(UsageError, match="optim_states"):
            engine.step()
        engine.reload_states()

    settings = settings_of(3, bf16={"enabled": True})
    try:
        found = run(settings, between)
    finally:
        block_io.inject("write", nth=0)
        block_io.inject("read", nth=0)
    same_bits(found, run(settings))
