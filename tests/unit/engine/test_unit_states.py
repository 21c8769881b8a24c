"""States of units as they are dealt from a plan: one row for each kind of unit."""

import pytest
import torch
from torch import nn

from mpispeed.base.distinct import mark_distinct
from mpispeed.config.load import validate
from mpispeed.plan.placements import STATES_BY_STAGE
from mpispeed.plan.plan import make_plan
from mpispeed.plan.units import deal_units, distinct_sizes
from mpispeed.store.placement import REPLICATED, Placement, Tier

WIDTH, RANKS, DISTINCT = 32, 8, 2
FILES = {"device": "nvme", "nvme_path": "/somewhere"}


def model():
    """Two plain layers, one of which neighbours have their own, a frozen one, and a small vector."""
    blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    mark_distinct(blocks[2].parameters(), DISTINCT)
    blocks[3].requires_grad_(False)
    return nn.ModuleDict({"blocks": blocks, "scale": nn.LayerNorm(4, bias=False)})


def dealt(stage, *, own_masters=False, bf16=False, **zero):
    found = model()
    zero = {"stage3_param_persistence_threshold": 8, **zero, "stage": stage}
    source = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": bf16}, "zero_optimization": zero}
    plan = make_plan(validate(source).config, RANKS, torch.float32).with_distinct(distinct_sizes(found))
    trained = {id(param): 0 for param in found.parameters() if param.requires_grad}
    table = deal_units(plan, found, trained, own_masters=own_masters)
    return {unit.layout.entries[0].name.split(".")[1]: unit.states for unit in table.all_units}, plan.topology()


@pytest.mark.parametrize("stage", range(4))
def test_rows_by_stage(stage):
    rows, topology = dealt(stage)
    wanted = STATES_BY_STAGE[stage]
    for name in ("0", "1"):
        states = rows[name]
        assert (states.param, states.grad, states.master) == (wanted.param, wanted.grad, wanted.master)
        assert (states.partial, states.each_sum, states.last_sum) == (("data",), ("data",), ())
    alike = rows["2"].partial
    assert topology.group_size(alike) == RANKS // DISTINCT
    for kind in ("param", "grad", "master"):
        is_whole = getattr(wanted, kind).is_replicated
        assert getattr(rows["2"], kind) == (REPLICATED if is_whole else Placement(alike))
    assert rows["2"].each_sum == alike
    assert ("3" in rows) == (stage == 3)
    assert rows["weight"].param == REPLICATED  # persistent
    assert rows["weight"].master == wanted.master


def test_gradients_over_a_part_of_the_ranks_are_summed_in_two_hops():
    rows, topology = dealt(3, mics_shard_size=4)
    states = rows["0"]
    assert states.each_sum == states.master.axes
    assert topology.group_size(states.each_sum) == 4
    assert topology.group_size(states.last_sum) == RANKS // 4
    assert rows["2"].each_sum == rows["2"].partial  # of neighbours that differ, all with copies share the states
    assert rows["2"].last_sum == ()


def test_second_copies_are_of_sharded_parameters_in_common():
    rows, _ = dealt(3, zero_hpz_partition_size=4)
    assert {name for name, states in rows.items() if states.second is not None} == {"0", "1", "3"}


def test_tiers_by_unit():
    rows, _ = dealt(3, offload_optimizer={"device": "cpu", "ratio": 0.4})
    assert {name: states.master.tier for name, states in rows.items() if name != "3"} == {
        "0": Tier.HOST, "1": Tier.DEVICE, "2": Tier.DEVICE, "weight": Tier.DEVICE,
    }  # fmt: skip
    shard = 2048 // RANKS  # whole blocks for every rank
    rows, _ = dealt(3, offload_param={**FILES, "max_in_cpu": shard}, zero_quantized_nontrainable_weights=True)
    assert {name: states.param.tier for name, states in rows.items()} == {
        "0": Tier.HOST, "1": Tier.NVME, "2": Tier.NVME, "3": Tier.HOST, "weight": Tier.DEVICE,
    }  # fmt: skip
    assert rows["3"].is_coded
    assert not rows["0"].is_coded


def test_masters_are_the_parameters_where_nothing_is_between():
    assert dealt(2)[0]["0"].master_is_param
    assert not dealt(2, own_masters=True)[0]["0"].master_is_param
    states = dealt(2, bf16=True)[0]["0"]
    assert not states.master_is_param
    assert (states.compute, states.full, states.accumulate, states.wire) == (
        torch.bfloat16, torch.float32, torch.float32, torch.bfloat16,
    )  # fmt: skip
