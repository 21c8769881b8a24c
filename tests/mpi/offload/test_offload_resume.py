"""Checkpoints and access by name with states in swap files: the bits of no offload, and failures on every rank."""

import errno
import logging

import pytest
import torch

import mpispeed
from mpispeed import zero as mz
from mpispeed.base.errors import CheckpointError, ConfigError, StoreError
from mpispeed.base.events import Event
from mpispeed.ckpt.format.errors import SaveFailed
from mpispeed.native import block_io
from mpispeed.store.stored_tensor import SwappedTensor
from tests.helpers.covering import in_turn
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]

BATCH = 12
COMBOS = [("none", "nvme"), ("cpu", "nvme"), ("nvme", "none"), ("nvme", "cpu"), ("nvme", "nvme")]
ALL = ("nvme", "nvme")
NONE = ("none", "none")
FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}


def make(disk, combo, dtype="bf16", *, stage=3, model=None, seed=7, settings=None, client=None, **section):
    """An engine whose parameters and optimizer states rest as `combo` says, in windows shorter than a unit."""
    param, optimizer = combo
    files = {"nvme_path": str(disk)}
    section["sub_group_size"] = 4096
    if param != "none":
        section["offload_param"] = {"device": param, "max_in_cpu": 0, **files}
    if optimizer != "none":
        section["offload_optimizer"] = {"device": optimizer, "pipeline_read": True, "pipeline_write": True, **files}
    flags = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": FP16}}[dtype]
    settings = config(stage, BATCH, 1, reduction="ordered", **flags, **(WARM | (settings or {})), zero=section)
    if client is not None:
        del settings["optimizer"]
    return mpispeed.initialize(model=model or TinyLM(width=48, seed=seed), config=settings, optimizer=client)[0]


@pytest.fixture
def disk(mpi_tmp_path):
    """A folder for swap files, beside the checkpoints."""
    folder = mpi_tmp_path / "disk"
    folder.mkdir(exist_ok=True)
    return folder


def is_last(engine):
    return engine.global_rank == engine.world_size - 1


# -- save and load -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("combo", "dtype"), in_turn([(ALL, "fp32"), *((combo, "bf16") for combo in COMBOS)], ranks=(1, 2, 3, 4, 3, 2))
)
def test_steps_after_a_load_are_those_after_the_save(combo, dtype, disk, mpi_tmp_path):
    data = batches(4, BATCH)
    first = make(disk, combo, dtype)
    assert (first.parts.params.tiers.file_bytes > 0) == ("nvme" in combo)
    train_averaged(first, data[:2])
    first.save_checkpoint(str(mpi_tmp_path))
    expected, reference = train_averaged(first, data[2:]), weights(first)
    first.destroy()
    second = make(disk, combo, dtype, seed=99)
    second.load_checkpoint(str(mpi_tmp_path))
    assert train_averaged(second, data[2:]) == expected
    same_bits(weights(second), reference)
    second.destroy()


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "bf16"), (3, "fp16"), (3, "fp32")])
def test_the_file_is_that_of_no_offload_and_loads_either_way(stage, dtype, disk, mpi_tmp_path):
    data = batches(4, BATCH)
    combos = (NONE, ALL if stage == 3 else ("none", "nvme"))
    files, losses = [], []
    for combo in combos:
        engine = make(disk, combo, dtype, stage=stage)
        train_averaged(engine, data[:2])
        engine.save_checkpoint(str(mpi_tmp_path / combo[1]), tag="two")
        files.append((mpi_tmp_path / combo[1] / "two" / "model.h5").read_bytes())
        losses.append(train_averaged(engine, data[2:]))
        engine.destroy()
    assert files[0] == files[1]
    for combo, source in (combos, combos[::-1]):
        engine = make(disk, combo, dtype, stage=stage, seed=99)
        engine.load_checkpoint(str(mpi_tmp_path / source[1]))
        losses.append(train_averaged(engine, data[2:]))
        engine.destroy()
    assert losses == [losses[0]] * 4


def test_frozen_swapped_parameters_are_saved_and_loaded(disk, mpi_tmp_path):
    engines = []
    for seed in (7, 99):
        model = TinyLM(width=48, seed=seed)
        model.blocks[0].requires_grad_(False)
        engines.append(make(disk, ("nvme", "none"), model=model))
    first, second = engines
    assert any(first.parts.params.shards.stored_shard(unit).is_swapped for unit in first.parts.table.frozen)
    train_averaged(first, batches(2, BATCH))
    first.save_checkpoint(str(mpi_tmp_path))
    second.load_checkpoint(str(mpi_tmp_path))
    same_bits(weights(first), weights(second))
    first.destroy()
    second.destroy()


def test_what_a_checkpoint_lacks_keeps_its_values(disk, mpi_tmp_path):
    first = make(disk, ALL)
    train_averaged(first, batches(2, BATCH))
    first.save_checkpoint(str(mpi_tmp_path))
    expected = weights(first)
    first.destroy()
    model = TinyLM(width=48, seed=99)
    model.blocks[1].extra = torch.nn.Parameter(torch.full((33,), 0.5))
    second = make(disk, ALL, model=model)
    second.load_checkpoint(str(mpi_tmp_path), load_module_strict=False)
    found = weights(second)
    assert torch.equal(found.pop("blocks.1.extra"), torch.full((33,), 0.5, dtype=torch.bfloat16))
    same_bits(found, expected)
    second.destroy()


def test_saving_takes_no_whole_swapped_tensor_into_memory(disk, mpi_tmp_path, monkeypatch):
    engine = make(disk, ALL)
    train_averaged(engine, batches(2, BATCH))
    longest, lend = [0], SwappedTensor.lend

    def watched(stored, start, stop, **more):
        longest[0] = max(longest[0], stop - start)
        return lend(stored, start, stop, **more)

    def refused(stored):
        pytest.fail(f"all {stored.numel} elements are read at once")

    before = engine.parts.params.tiers.buffer_bytes
    with monkeypatch.context() as patch:
        patch.setattr(SwappedTensor, "lend", watched)
        patch.setattr(SwappedTensor, "get", refused)
        engine.save_checkpoint(str(mpi_tmp_path))
    tiers = engine.parts.params.tiers
    assert 0 < longest[0] <= tiers.plan.window_elements
    assert before <= tiers.buffer_bytes <= tiers.most_buffer_bytes
    engine.destroy()


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.fixture
def injected():
    """Whatever was injected and did not come to pass is taken back."""
    yield block_io.inject
    for op in ("read", "write"):
        block_io.inject(op, nth=0)


@pytest.mark.parametrize("nth", [1, 4])
def test_a_read_error_on_one_rank_fails_the_save_on_all(nth, disk, mpi_tmp_path, injected):
    data = batches(3, BATCH)
    engine = make(disk, ALL)
    train_averaged(engine, data[:1])
    engine.save_checkpoint(str(mpi_tmp_path))
    names = sorted(path.name for path in mpi_tmp_path.iterdir())
    expected = weights(engine)
    train_averaged(engine, data[1:2])
    engine.mesh.world.comm.barrier()
    if is_last(engine):
        injected("read", nth=nth, errno=errno.EIO)
    with pytest.raises(SaveFailed, match=r"could not be read.*Input/output error") as caught:
        engine.save_checkpoint(str(mpi_tmp_path))
    assert len(set(engine.mesh.world.comm.gather_objects(str(caught.value)))) == 1
    assert f"rank {engine.world_size - 1}" in str(caught.value) or engine.world_size == 1
    assert sorted(path.name for path in mpi_tmp_path.iterdir()) == names
    train_averaged(engine, data[2:])  # the error was of one reading only: everything is still there
    engine.load_checkpoint(str(mpi_tmp_path))
    assert engine.global_steps == 1
    same_bits(weights(engine), expected)
    engine.save_checkpoint(str(mpi_tmp_path), tag="again")
    engine.destroy()


@pytest.mark.parametrize("nth", [1, 2, 9])
def test_a_write_error_on_one_rank_fails_the_load_on_all(nth, disk, mpi_tmp_path, injected):
    engine = make(disk, ALL)
    train_averaged(engine, batches(2, BATCH))
    engine.save_checkpoint(str(mpi_tmp_path))
    expected = weights(engine)
    if is_last(engine):
        injected("write", nth=nth, errno=errno.ENOSPC)
    with pytest.raises((CheckpointError, StoreError), match=r"could not be written.*No space left") as caught:
        engine.load_checkpoint(str(mpi_tmp_path))
    assert len(set(engine.mesh.world.comm.gather_objects(str(caught.value)))) == 1
    engine.load_checkpoint(str(mpi_tmp_path))
    same_bits(weights(engine), expected)
    engine.destroy()


def change(engine):
    params = list(engine.module.parameters())
    with mz.GatheredParameters(params, modifier_rank=0), torch.no_grad():
        params[0].mul_(2)


CALLS = {
    "safe_get_full_fp32_param": ("read", lambda _, param, __: mz.safe_get_full_fp32_param(param)),
    "safe_get_full_optimizer_state": ("read", lambda _, p, __: mz.safe_get_full_optimizer_state(p, "exp_avg")),
    "module_state_dict": ("read", lambda engine, _, __: engine.module_state_dict()),
    "load_module_state_dict": ("write", lambda engine, _, state: engine.load_module_state_dict(state)),
    "GatheredParameters": ("write", lambda engine, _, __: change(engine)),
}
"""Name -> (what goes wrong, a call that all ranks make together)."""


@pytest.mark.parametrize("name", list(CALLS))
def test_an_error_on_one_rank_is_raised_by_access_on_all(name, disk, injected):
    engine = make(disk, ALL)
    train_averaged(engine, batches(1, BATCH))
    state = engine.module_state_dict()
    param = engine.module.blocks[0].up.weight
    op, call = CALLS[name]
    if is_last(engine):
        injected(op, nth=1, errno=errno.EIO)
    with pytest.raises((CheckpointError, StoreError), match="could not be") as caught:
        call(engine, param, state)
    assert len(set(engine.mesh.world.comm.gather_objects(str(caught.value)))) == 1
    call(engine, param, state)
    engine.destroy()


# -- access --------------------------------------------------------------------------------------------------------


def edit(engine):
    """Every way in which values are read and written by name; returns what was read."""
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = mz.safe_get_full_fp32_param(param)
        found[f"{name}/local"] = mz.safe_get_local_fp32_param(param)
        found[f"{name}/exp_avg"] = mz.safe_get_full_optimizer_state(param, "exp_avg")
        found[f"{name}/local/exp_avg_sq"] = mz.safe_get_local_optimizer_state(param, "exp_avg_sq")
    blocks = engine.module.blocks
    target = blocks[0].up.weight
    mz.safe_set_full_fp32_param(target, found["blocks.0.up.weight"] * 1.5)
    mz.safe_set_full_optimizer_state(target, found["blocks.0.up.weight/exp_avg"] * 0.5, "exp_avg")
    mz.safe_set_local_fp32_param(blocks[1].down.bias, found["blocks.1.down.bias/local"] + 1)
    mz.safe_set_local_optimizer_state(
        blocks[1].down.bias, found["blocks.1.down.bias/local/exp_avg_sq"] * 2, "exp_avg_sq"
    )
    with mz.GatheredParameters([blocks[1].up.weight, engine.module.scale], modifier_rank=0), torch.no_grad():
        if engine.global_rank == 0:
            blocks[1].up.weight.add_(0.25)
            engine.module.scale.fill_(1.5)
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_access_by_name_is_that_of_no_offload(dtype, disk):
    data, results = batches(4, BATCH), []
    for combo in (NONE, ALL):
        engine = make(disk, combo, dtype)
        train_averaged(engine, data[:2])
        read = edit(engine)
        rank, size = engine.global_rank, engine.world_size
        part = data[2][rank * BATCH // size : (rank + 1) * BATCH // size]
        engine.backward(engine(part))
        target = engine.module.blocks[0].down.weight
        grad = mz.safe_get_full_grad(target)
        mz.safe_set_full_grad(target, grad * 0.5)
        read["local grad"] = mz.safe_get_local_grad(engine.module.blocks[1].up.weight)
        mz.safe_set_local_grad(engine.module.blocks[1].up.weight, read["local grad"] * 2)
        engine.step()
        losses = train_averaged(engine, data[3:])
        results.append((losses, read | {"grad": grad}, weights(engine)))
        engine.destroy()
    (losses, read, after), (ours, our_read, our_after) = results
    assert ours == losses
    same_bits(our_read, read)
    same_bits(our_after, after)


def test_state_dicts_are_those_of_no_offload(disk, mpi_tmp_path):
    data, losses = batches(3, BATCH), []
    donor = make(disk, ALL, seed=5)
    state = donor.module_state_dict()
    donor.destroy()
    for combo in (NONE, ALL):
        folder = mpi_tmp_path / combo[0]
        engine = make(disk, combo, gather_16bit_weights_on_model_save=True)
        train_averaged(engine, data[:1])
        engine.load_module_state_dict(state)
        if engine.global_rank == 0:
            same_bits(engine.module_state_dict(), state)
        else:
            assert engine.module_state_dict() == {}
        losses.append(train_averaged(engine, data[1:]))
        assert engine.save_16bit_model(str(folder))
        engine.load_module_state_dict(
            dict(TinyLM(width=48, seed=3).state_dict()),
            custom_load_fn=lambda src, dst: dst.load_state_dict(src),
        )
        losses[-1] += train_averaged(engine, data[1:])
        engine.mesh.world.comm.barrier()
        engine.destroy()
    assert losses[0] == losses[1]
    written = [torch.load(mpi_tmp_path / name / "pytorch_model.bin") for name in ("none", "nvme")]
    same_bits(*written)


# -- overflow ------------------------------------------------------------------------------------------------------


def swap_bytes(engine, disk):
    """Content of this rank's swap files but those of gradients."""
    own = [path for path in sorted(disk.rglob("*.swap")) if path.parent.name.endswith(f".rank{engine.global_rank}")]
    return {path.name: path.read_bytes() for path in own if path.name != "grad.swap"}


def test_a_skipped_step_writes_no_state(disk):
    data, results = batches(5, BATCH), []
    for combo in (NONE, ALL):
        engine = make(disk, combo, "fp16")
        losses = train_averaged(engine, data[:2])
        before = swap_bytes(engine, disk)
        assert (len(before) > 0) == (combo == ALL)
        rank, size = engine.global_rank, engine.world_size
        loss = engine(data[2][rank * BATCH // size : (rank + 1) * BATCH // size])
        engine.backward(loss * float("inf") if is_last(engine) else loss)
        engine.step()
        assert engine.skipped_steps == 1
        assert swap_bytes(engine, disk) == before
        losses += train_averaged(engine, data[3:])
        assert engine.skipped_steps == 1
        assert combo == NONE or swap_bytes(engine, disk) != before
        results.append((losses, weights(engine)))
        engine.destroy()
    assert results[0][0] == results[1][0]
    same_bits(results[0][1], results[1][1])


# -- what is told ----------------------------------------------------------------------------------------------------


@pytest.fixture
def records(caplog):
    """What this rank logs."""
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    yield lambda word: [r.getMessage() for r in caplog.records if r.getMessage().startswith(word)]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("combo", [NONE, ("cpu", "cpu"), *COMBOS], ids="-".join)
def test_settings_and_reports_tell_where_states_are(combo, disk, records):
    told = {"memory_breakdown": True, "comms_logger": {"enabled": True}}
    engine = make(disk, combo, settings=told)
    assert engine.zero_cpu_offload() == (combo[1] == "cpu")
    assert engine.zero_use_cpu_optimizer() == (combo[1] != "none")
    assert engine.zero_partial_offload() == 1.0
    assert (engine.zero_offload_param() is None) == (combo[0] == "none")
    moved = []
    engine.bus.subscribe(Event.SWAP, moved.append)
    train_averaged(engine, batches(3, BATCH))
    swapped = {
        "params": engine.parts.params.shards.swapped_bytes,
        "states": engine.parts.optimization.states.swapped_bytes,
    }
    assert (swapped["params"] > 0) == ("nvme" in combo)
    assert (swapped["states"] > 0) == (combo[1] == "nvme")
    engine.destroy()
    is_told = engine.global_rank == 0
    is_swapping = "nvme" in combo
    assert len(records("memory |")) == 4 * is_told
    assert len(records("swap files |")) == 4 * is_told * is_swapping
    assert [row["global_step"] for row in moved] == [1, 2, 3] * is_told * is_swapping
    assert len([line for line in records("") if "over swap files" in line]) == 2 * is_told * is_swapping
    for row in moved:
        assert row["bytes_read"] >= swapped["states"]
        assert row["bytes_written"] >= swapped["states"] + (swapped["params"] if combo[0] == "nvme" else 0)
        assert row["requests_read"] > 0
        assert row["requests_written"] > 0


def test_an_optimizer_that_may_do_anything_in_its_step_is_refused(disk):
    class Mine(torch.optim.AdamW):
        pass

    for combo, cls in ((("nvme", "none"), Mine), (("none", "nvme"), torch.optim.AdamW)):
        model = TinyLM(width=48)
        optimizer = cls(model.parameters(), lr=1e-3)
        if cls is not Mine:
            optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(ConfigError, match=rf"{cls.__name__} keeps its state.*is nvme.*device cpu"):
            make(disk, combo, model=model, client=optimizer, settings={"zero_allow_untested_optimizer": True})
        assert not list(disk.iterdir())
