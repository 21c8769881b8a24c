"""Predictions for states outside the device: rows of every tier, traffic between them, files, limits of memory."""

import dataclasses
import resource
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.config.load import validate
from mpispeed.engine.estimate.budget import gather_inputs, predict
from mpispeed.engine.estimate.host_budget import check_host_budget, predict_host, read_limits
from mpispeed.mesh import sim
from mpispeed.plan.offload_plan import leading_units
from mpispeed.plan.plan import make_plan
from mpispeed.sharding.sharded_init import ShardedInit
from mpispeed.store.placement import Tier
from tests.helpers.covering import pairwise
from tests.unit.engine.simulated import engine_on
from tests.unit.engine.test_budget import Stack
from tests.zoo.models import batches
from tests.zoo.training import WARM, config, train_averaged

WIDTH, LAYERS = 1024, 16  # 16 Mi parameters in units of 1 Mi: no padding on up to 4096 ranks
UNIT = WIDTH * WIDTH
PSI = UNIT * LAYERS
DEVICE, HOST, NVME = Tier
PAGE = 4096
KINDS = ("parameters", "masters", "optimizer state", "gradients")
FILES = {"device": "nvme", "nvme_path": "disk"}


def plain():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def on_meta(make=plain):
    with torch.device("meta"):
        return make()


MODEL = on_meta()


def plan_of(stage, ranks, accumulation=1, *, top=(), **zero):
    """Bytes are easiest told with gradients in 16 bits: 2 each for parameters and gradients, 12 for the rest."""
    more = {"stage3_param_persistence_threshold": 0, "overlap_comm": False, "stage3_max_reuse_distance": 0, **zero}
    source = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {"stage": stage, **more},
        **dict(top),
    }
    return make_plan(validate(source).config, ranks, torch.float32)


def budget_of(stage, ranks, accumulation=1, **more):
    return predict(gather_inputs(plan_of(stage, ranks, accumulation, **more), MODEL))


def at_rest(budget):
    """(kind, tier) -> bytes, without buffers and what is on its way."""
    return {(row.what, row.tier): row.bytes for row in budget.held if row.what in KINDS}


def traffic(budget):
    return {(row.what, row.source, row.target): row.bytes for row in budget.moved}


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_optimizer_states_in_host_memory(ranks):
    # ZeRO-Offload, section 3: the device keeps 2 PSI; 14 PSI / N are on the host, gradients where they rest cut.
    cut = PSI // ranks
    rows = [at_rest(budget_of(stage, ranks, offload_optimizer={"device": "cpu"})) for stage in (1, 2, 3)]
    host = {("masters", HOST): 4 * cut, ("optimizer state", HOST): 8 * cut}
    assert rows[0] == {("parameters", DEVICE): 2 * PSI, ("gradients", DEVICE): 2 * PSI, **host}
    assert rows[1] == {("parameters", DEVICE): 2 * PSI, ("gradients", HOST): 2 * cut, **host}
    assert rows[2] == {("parameters", DEVICE): 2 * cut, ("gradients", HOST): 2 * cut, **host}


def test_everything_in_files():
    ranks = 4
    budget = budget_of(3, ranks, offload_param={**FILES, "max_in_cpu": 0}, offload_optimizer=FILES)
    cut = PSI // ranks
    # ZeRO-Infinity: 12 PSI / N masters and states, gradients (2 here) and 2 PSI / N parameters on disk
    assert at_rest(budget) == {
        ("parameters", NVME): 2 * cut, ("masters", NVME): 4 * cut, ("optimizer state", NVME): 8 * cut,
        ("gradients", NVME): 2 * cut,
    }  # fmt: skip
    assert budget.file_bytes == 16 * cut  # whole pages already
    assert budget.tier_bytes(NVME) == 16 * cut


def test_files_consist_of_pages():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(30, 30, bias=False))
    plan = plan_of(2, 2, offload_optimizer=FILES)
    budget = predict(gather_inputs(plan, model))
    parts = (256, 512)  # of units of 512 and 1024 elements
    assert at_rest(budget)["masters", NVME] == 4 * sum(parts)
    sizes = [part * width for part in parts for width in (4, 4, 4, 2)]
    assert budget.file_bytes == sum(-(-size // PAGE) * PAGE for size in sizes)


def test_the_first_parameters_stay_in_memory():
    ranks, part = 4, UNIT // 4
    for elements, kept in ((0, 0), (part - 1, 0), (part, 1), (5 * part + 7, 5), (10**9, LAYERS)):
        rows = at_rest(budget_of(3, ranks, offload_param={**FILES, "max_in_cpu": elements}))
        assert rows.get(("parameters", HOST), 0) == 2 * kept * part
        assert rows.get(("parameters", NVME), 0) == 2 * (LAYERS - kept) * part


def test_units_below_the_threshold_stay_on_the_device():
    rows = at_rest(budget_of(3, 4, offload_param={**FILES, "max_in_cpu": 0}, stage3_param_persistence_threshold=UNIT))
    assert rows["parameters", DEVICE] == 2 * PSI
    assert ("parameters", NVME) not in rows


def test_parameters_in_files_are_fetched_by_a_single_rank_too():
    budget = budget_of(3, 1, offload_param={**FILES, "max_in_cpu": 3 * UNIT})
    rows = at_rest(budget)
    assert rows["parameters", NVME] == 2 * (LAYERS - 3) * UNIT
    assert 0 < budget.bytes_of("gathered parameters") < 2 * PSI
    assert budget.sent_bytes() == 0
    assert traffic(budget)["parameters", NVME, HOST] == 2 * 2 * (LAYERS - 3) * UNIT  # forward and backward


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.3, 4), (0.5, 8), (1.0, 16)])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_part_of_the_states_is_outside(device, ratio, count):
    ranks, tier = 4, HOST if device == "cpu" else NVME
    rows = at_rest(budget_of(3, ranks, offload_optimizer={**FILES, "device": device, "ratio": ratio}))
    part = UNIT // ranks
    for what, size in (("masters", 4), ("optimizer state", 8), ("gradients", 2)):
        assert rows.get((what, tier), 0) == size * count * part
        assert rows.get((what, DEVICE), 0) == size * (LAYERS - count) * part


def test_masters_that_are_the_parameters_stay_with_them():
    plan = plan_of(3, 4, top={"bf16": {"enabled": False}, "data_types": {}}.items(), offload_optimizer=FILES)
    rows = at_rest(predict(gather_inputs(plan, MODEL)))
    assert rows == {
        ("parameters", DEVICE): PSI, ("optimizer state", NVME): 2 * PSI, ("gradients", NVME): PSI,
    }  # fmt: skip


def test_codes_of_frozen_parameters_stay_in_memory():
    model = on_meta()
    model[5].requires_grad_(False)
    zero = {"offload_param": {**FILES, "max_in_cpu": 0}, "zero_quantized_nontrainable_weights": True}
    rows = at_rest(predict(gather_inputs(plan_of(3, 4, **zero), model)))
    part = UNIT // 4
    assert rows["parameters", NVME] == 2 * (LAYERS - 1) * part
    assert part < rows["parameters", HOST] < 1.1 * part


@settings(max_examples=25, deadline=None)
@given(
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.sampled_from([1, 2, 3, 8]),
    param=st.sampled_from(["none", "cpu", "nvme"]),
    optimizer=st.sampled_from(["none", "cpu", "nvme"]),
    ratio=st.floats(0, 1),
    kept=st.integers(0, 2 * PSI),
)
def test_tiers_share_what_the_device_would_hold(stage, ranks, param, optimizer, ratio, kept):
    zero = {"offload_optimizer": {**FILES, "device": optimizer, "ratio": ratio if stage == 3 else 1.0}}
    if stage == 3:
        zero["offload_param"] = {**FILES, "device": param, "max_in_cpu": kept}
    here, there = budget_of(stage, ranks), budget_of(stage, ranks, **zero)
    total = {}
    for (what, _), size in at_rest(there).items():
        total[what] = total.get(what, 0) + size
    assert total == {what: size for (what, _), size in at_rest(here).items()}
    assert there.file_bytes >= there.tier_bytes(NVME)
    assert (there.file_bytes > 0) == (there.tier_bytes(NVME) > 0)
    assert there.sent == here.sent


# -- buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sub_group", [10**9, UNIT // 4, UNIT // 16])
@pytest.mark.parametrize("count", [1, 4, 10])
@pytest.mark.parametrize("pipelines", [0, 1, 2])
def test_update_buffers_keep_to_their_bytes(sub_group, count, pipelines):
    optimizer = {
        **FILES, "buffer_count": count, "pipeline_read": pipelines > 0, "pipeline_write": pipelines > 1,
    }  # fmt: skip
    budget = budget_of(2, 4, offload_optimizer=optimizer, sub_group_size=sub_group)
    most = count * min(sub_group, UNIT // 4) * 4
    size = budget.bytes_of("update buffers")
    assert size % (4 * (1 + pipelines)) == 0  # masters, gradients and two states for each window in flight
    least = 4 * (1 + pipelines) * 2048 * 4
    whole = 4 * (1 + pipelines) * UNIT // 4 * 4
    assert min(whole, max(least, most - least)) <= size <= max(least, most)


def test_parameter_buffers_are_no_longer_than_needed():
    budget = budget_of(3, 4, offload_param={**FILES, "max_in_cpu": 0, "buffer_count": 3})
    assert budget.bytes_of("parameter buffers") == 3 * 2 * UNIT // 4
    nothing = budget_of(3, 4, offload_param=FILES)  # all of it is in host memory
    assert nothing.bytes_of("parameter buffers") == 0


def test_a_buffer_that_is_too_short_is_refused_by_name():
    part = UNIT // 4
    zero = {"offload_param": {**FILES, "max_in_cpu": 0, "buffer_size": part - 1}}
    with pytest.raises(
        ConfigError, match=rf"buffer_size {part - 1} is less than the {part} .* unit '0'; .* least {part}"
    ):
        budget_of(3, 4, **zero)
    zero["offload_param"]["buffer_size"] = part
    budget_of(3, 4, **zero)


def test_leading_units_end_at_the_first_that_does_not_fit():
    sizes = [(3, 5), (4, 10), (7, 1)]
    assert leading_units(sizes, 4) == frozenset()
    assert leading_units(sizes, 14) == {3}
    assert leading_units(sizes, 15) == {3, 4}
    assert leading_units(sizes, 1e9) == {3, 4, 7}


# -- traffic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
def test_host_traffic_of_the_paper(ranks):
    # ZeRO-Offload: 2 PSI of gradients go down, 2 PSI of parameters come up, shared by the ranks.
    moved = traffic(budget_of(2, ranks, offload_optimizer={"device": "cpu"}))
    assert moved == {
        ("gradients", DEVICE, HOST): 2 * PSI // ranks, ("updated parameters", HOST, DEVICE): 2 * PSI // ranks,
    }  # fmt: skip


def test_nothing_moves_on_the_device():
    assert budget_of(3, 4, 3).moved == ()


def test_whole_gradients_go_down_once():
    for stage, times in ((1, 1), (2, 5)):
        moved = traffic(budget_of(stage, 4, 5, offload_optimizer={"device": "cpu"}))
        assert moved["gradients", DEVICE, HOST] == times * 2 * PSI // 4


def test_files_are_read_and_written_in_every_update():
    steps, cut = 3, PSI // 4
    budget = budget_of(2, 4, steps, offload_optimizer=FILES)
    assert traffic(budget) == {
        ("gradients", DEVICE, HOST): steps * 2 * cut,
        ("gradients", HOST, NVME): steps * 2 * cut,
        ("gradients", NVME, HOST): steps * 2 * cut,  # to be added to, and for the update
        ("masters", NVME, HOST): 4 * cut,
        ("masters", HOST, NVME): 4 * cut,
        ("optimizer state", NVME, HOST): 8 * cut,
        ("optimizer state", HOST, NVME): 8 * cut,
        ("updated parameters", HOST, DEVICE): 2 * cut,
    }
    assert budget.moved_bytes(HOST, NVME) == (2 * steps + 12) * cut


def test_parameters_in_files_are_read_for_every_gather():
    steps, cut = 3, PSI // 4
    moved = traffic(budget_of(3, 4, steps, offload_param={**FILES, "max_in_cpu": 0}))
    # the states are on the device: updated parameters pass through host memory
    assert moved == {
        ("parameters", NVME, HOST): 2 * steps * 2 * cut, ("parameters", HOST, DEVICE): 2 * steps * 2 * cut,
        ("updated parameters", DEVICE, HOST): 2 * cut, ("updated parameters", HOST, NVME): 2 * cut,
    }  # fmt: skip


def test_masters_in_files_that_are_the_parameters_are_read_and_written():
    top = {"bf16": {"enabled": False}, "data_types": {}}.items()
    plan = plan_of(3, 4, top=top, offload_param={**FILES, "max_in_cpu": 0}, offload_optimizer=FILES)
    moved = traffic(predict(gather_inputs(plan, MODEL)))
    assert moved["updated parameters", NVME, HOST] == moved["updated parameters", HOST, NVME] == PSI
    assert ("masters", NVME, HOST) not in moved


def test_second_copies_spare_the_host():
    zero = {"offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 2}
    moved = traffic(budget_of(3, 4, 3, **zero))
    assert moved["parameters", HOST, DEVICE] == 2 * PSI // 4  # once for each update


# -- building ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_not_held_while_the_model_is_built():
    plan = plan_of(3, 16, offload_optimizer=FILES, offload_param={**FILES, "max_in_cpu": 0})
    init_shard = predict(gather_inputs(plan, MODEL, is_init_sharded=True))
    there = predict(gather_inputs(plan_of(3, 16), MODEL, is_init_sharded=True))
    # as made: 4 bytes for each element of this rank's part, and one unit whole
    assert 4 * PSI // 16 <= init_shard.build_bytes < 4 * PSI // 16 + 10 * UNIT
    assert there.build_bytes > init_shard.build_bytes


# -- engines -----------------------------------------------------------------------------------------------------------

OUTSIDE = {
    "optimizer on the host": {"offload_optimizer": {"device": "cpu"}},
    "optimizer in files": {"offload_optimizer": FILES},
    "half of the optimizer in files": {"offload_optimizer": {**FILES, "ratio": 0.5}},
    "parameters in files": {"offload_param": {**FILES, "max_in_cpu": 0}},
    "some parameters in files": {"offload_param": {**FILES, "max_in_cpu": 3000}},
    "all in files": {
        "offload_param": {**FILES, "max_in_cpu": 0},
        "offload_optimizer": {**FILES, "pipeline_read": True},
    },
    "optimizer in files, written behind": {"offload_optimizer": {**FILES, "pipeline_write": True}},
    "all in files, written behind": {
        "offload_param": {**FILES, "max_in_cpu": 0},
        "offload_optimizer": {**FILES, "pipeline_read": True, "pipeline_write": True},
    },
}
CASES = [(name, stage) for name in OUTSIDE for stage in (1, 2, 3) if stage == 3 or name.startswith("optimizer")]


def measure(world, source, model, data):
    """What an engine holds, and the bytes that it reads and writes in its third step."""
    engine = engine_on(world, source, model)
    params, parts = engine.parts.params, engine.parts.optimization
    tiers = params.tiers
    train_averaged(engine, data[:2])
    tiers.settle()
    before = tiers.io.counters if tiers.io is not None else None
    train_averaged(engine, data[2:])
    tiers.settle()
    after = tiers.io.counters if tiers.io is not None else None
    memory = {
        "parameters": params.shards.param_bytes,
        "masters": params.shards.master_bytes,
        "optimizer state": parts.states.state_bytes,
        "gradients": parts.grads.shards.rest_bytes,
    }
    swapped = params.shards.swapped_bytes + parts.states.swapped_bytes + parts.grads.shards.swapped_bytes
    found = {
        "memory": {what: size for what, size in memory.items() if size},
        "swapped": swapped,
        "files": tiers.file_bytes,
        "most": tiers.most_buffer_bytes if tiers.is_swapping else 0,
        "cells": dict(tiers.plan.tensors),
        "scratch": params.arena.owned_bytes,
        "read": (after.bytes_read - before.bytes_read, after.requests_read - before.requests_read) if after else (0, 0),
        "written": (after.bytes_written - before.bytes_written, after.requests_written - before.requests_written)
        if after
        else (0, 0),
    }
    engine.destroy()
    return found


@pytest.mark.parametrize(("of", "dtype", "case"), pairwise([(1, 1), (2, 3)], ["fp32", "bf16"], CASES))
def test_prediction_is_what_engines_measure(of, dtype, case, tmp_path):
    (ranks, accumulation), (name, stage) = of, case
    source = config(stage, 12, accumulation, dtype=dtype, **WARM)
    sections = {key: {**section, "nvme_path": str(tmp_path)} for key, section in OUTSIDE[name].items()}
    source["zero_optimization"].update(
        overlap_comm=False, stage3_param_persistence_threshold=1000, stage3_max_reuse_distance=15000, **sections
    )
    models, data = [Stack() for _ in range(ranks)], batches(3, 12)
    found = sim.run(ranks, lambda world: measure(world, source, models[world.rank], data))[0]
    facts = gather_inputs(make_plan(validate(source).config, ranks, torch.float32), on_meta(Stack))
    budget = predict(facts)
    predicted = {what: size for what, size in budget.memory_bytes().items() if what in KINDS}
    assert predicted == found["memory"]
    assert budget.tier_bytes(NVME) == found["swapped"]
    assert budget.file_bytes == found["files"]
    assert facts.swap.tensors == found["cells"]
    buffers = budget.bytes_of("parameter buffers") + budget.bytes_of("update buffers")
    assert buffers <= found["most"] <= buffers + 64 * PAGE  # each is of whole pages
    assert budget.bytes_of("gathered parameters") + budget.bytes_of("gradient buckets") == found["scratch"]
    for way, (size, requests) in (((NVME, HOST), found["read"]), ((HOST, NVME), found["written"])):
        assert budget.moved_bytes(*way) <= size <= budget.moved_bytes(*way) + requests * PAGE
        assert bool(size) == bool(budget.moved_bytes(*way))


# -- limits ------------------------------------------------------------------------------------------------------------


def test_memory_of_the_host_is_all_that_is_not_in_files():
    plan = plan_of(2, 4, offload_optimizer=FILES)
    budget, rows = predict(gather_inputs(plan, MODEL)), predict_host(plan, MODEL)
    assert rows == budget.memory_bytes()
    assert sum(rows.values()) == budget.tier_bytes(DEVICE) + budget.tier_bytes(HOST)
    assert "masters" not in rows
    assert rows["parameters"] == 2 * PSI


def test_sums_that_may_lag_and_many_micro_steps_are_not_needed():
    plan = plan_of(2, 4, 2, overlap_comm=False)
    many = dataclasses.replace(plan_of(2, 4, 1000, overlap_comm=True))
    assert predict_host(plan, MODEL) == predict_host(many, MODEL)


def test_groups_and_slots_of_code_count():
    plan = plan_of(1, 2)
    model = on_meta()
    half = {id(param): 0 for param in list(model.parameters())[: LAYERS // 2]}
    rows = predict_host(plan, model, group_of=half, slots=("sum",))
    assert rows["masters"] == rows["optimizer state"] == 4 * PSI // 2 // 2
    assert rows["parameters"] + rows["outside of units"] == 2 * PSI


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_that_are_born_cut_are_predicted_alike(ranks):
    def make():
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    plan, models = plan_of(3, ranks, offload_optimizer=FILES), [make() for _ in range(ranks)]

    def job(world):
        sharded_init = ShardedInit(world.comm, None)
        for layer in models[world.rank]:
            sharded_init.cut(layer)
        limits = read_limits(models[world.rank])
        return predict_host(plan, models[world.rank]), limits.mapped > 0

    assert sim.run(ranks, job) == [(predict_host(plan, on_meta(make)), True)] * ranks


ROWS = {"parameters": 6 << 30, "masters": 4 << 30, "gradients": 3 << 30, "b": 2 << 20, "c": 1 << 20, "nothing": 0}


def test_a_limit_of_the_config_decides_at_the_very_byte():
    need = sum(ROWS.values())
    for mapped, rlimit in ((0, None), (1 << 50, 1)):  # the process is not asked then
        assert check_host_budget(ROWS, need, mapped=mapped, rlimit=rlimit) == ""
    sentence = check_host_budget(ROWS, need - 1, mapped=0, rlimit=None)
    assert sentence == (
        "each rank needs 13 GiB of host memory for the model (parameters 6 GiB, masters 4 GiB, gradients 3 GiB, "
        "b 2 MiB, other 1 MiB), and host_memory_limit is 13 GiB; set zero_optimization.offload_optimizer or "
        "offload_param to device nvme, start more ranks, or raise the limit"
    )


def test_without_one_the_address_space_decides():
    need = sum(ROWS.values())
    assert check_host_budget(ROWS, None, mapped=1 << 60, rlimit=None) == ""
    assert check_host_budget(ROWS, None, mapped=5, rlimit=need + 5) == ""
    sentence = check_host_budget(ROWS, None, mapped=2 << 30, rlimit=need)
    assert "RLIMIT_AS of 13 GiB (ulimit -v) leaves 11 GiB beside the 2 GiB that the process has mapped" in sentence
    assert "leaves 0 B" in check_host_budget(ROWS, None, mapped=9, rlimit=4)


def test_limits_of_this_process():
    model = nn.Linear(4096, 4096, bias=False)
    limits, beside = read_limits(), read_limits(model)
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    assert limits.rlimit == (None if soft == resource.RLIM_INFINITY else soft)
    assert limits.mapped > 4 * 4096 * 4096
    assert abs(limits.mapped - beside.mapped - 4 * 4096 * 4096) < 1 << 22


def test_a_limit_of_the_shell_is_found():
    code = "from mpispeed.engine.estimate.host_budget import read_limits as r; print(r().rlimit, r().mapped)"
    size = 16 << 30
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)),
    )  # fmt: skip
    rlimit, mapped = map(int, done.stdout.split())
    assert rlimit == size
    assert 0 < mapped < size


def test_the_copy_of_an_asynchronous_save_is_counted():
    for stage, ranks in ((1, 1), (2, 4), (3, 4)):
        top = {"checkpoint": {"async_save": True}}
        budgets = [predict(gather_inputs(plan_of(stage, ranks, top=more), MODEL)) for more in ({}, top)]
        assert budgets[0].bytes_of("checkpoint copy") == 0
        assert budgets[1].bytes_of("checkpoint copy") == 12 * PSI // ranks
        assert budgets[1].memory_bytes()["checkpoint copy"] == 12 * PSI // ranks
    swapped = plan_of(2, 4, top={"checkpoint": {"async_save": True}}, offload_optimizer=FILES)
    assert predict(gather_inputs(swapped, MODEL)).bytes_of("checkpoint copy") == 0
