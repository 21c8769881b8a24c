"""Predicted bytes and traffic: the formulas of the papers, what engines measure, what a machine has left."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn

from mpispeed.base.cgroups import Limit
from mpispeed.base.errors import ConfigError
from mpispeed.config.load import validate
from mpispeed.engine.estimate.budget import gather_inputs, predict
from mpispeed.engine.estimate.feasibility import Setup, judge
from mpispeed.mesh import sim
from mpispeed.plan.plan import make_plan
from mpispeed.sharding.reducers import LEAST_ELEMENTS
from tests.helpers.covering import pairwise
from tests.unit.engine.simulated import engine_on
from tests.zoo.models import LENGTH, VOCABULARY, Block, batches
from tests.zoo.training import WARM, config, train_averaged

BATCH = 24
WIDTH, LAYERS = 1024, 16  # 16 Mi parameters in units of 1 Mi: no padding on up to 4096 ranks
PSI = WIDTH * WIDTH * LAYERS
BF16 = {"bf16": {"enabled": True}}


class Stack(nn.Module):
    """Modules run in the order in which they are registered; nothing is tied."""

    def __init__(self, width=48, depth=3, is_frozen=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)
        self.blocks[1].requires_grad_(not is_frozen)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def on_meta(make=Stack, **arguments):
    with torch.device("meta"):
        return make(**arguments)


def plain(depth=LAYERS):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def settings(stage, accumulation=1, **zero):
    more = {"stage3_param_persistence_threshold": 0, "overlap_comm": False, **zero}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **more},
        **BF16,
    }


def facts_of(stage, ranks, accumulation=1, node=None, top=(), **zero):
    config = validate({**settings(stage, accumulation, **zero), **dict(top)}).config
    return gather_inputs(make_plan(config, ranks, torch.float32, ranks_per_node=node), on_meta(plain))


def norm_bytes(ranks):
    """An all-reduce of 68 limbs and 4 counts."""
    return 2 * 72 * 8 * (ranks - 1) // ranks


def states_bytes(budget):
    return sum(budget.bytes_of(what) for what in ("parameters", "masters", "optimizer state", "gradients"))


# -- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4, 64, 1024])
def test_bytes_follow_the_paper(ranks):
    # ZeRO, section 3 and 5, with gradients that rest in fp32: 4 + 2 + 12 bytes for each parameter instead of 16.
    by_stage = [states_bytes(predict(facts_of(stage, ranks))) for stage in range(4)]
    cut = PSI // ranks
    assert by_stage == [18 * PSI, 6 * PSI + 12 * cut, 2 * PSI + 16 * cut, 18 * cut]


def test_gradients_in_16_bits_give_the_16_bytes_of_the_paper():
    source = {**settings(3), "data_types": {"grad_accum_dtype": "bf16"}}
    plan = make_plan(validate(source).config, 1024, torch.float32)
    assert states_bytes(predict(gather_inputs(plan, on_meta(plain)))) == 16 * PSI // 1024


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_traffic_follows_the_ring_formula(ranks, accumulation):
    # Units of 1 Mi elements are padded to a multiple of 256 * ranks.
    facts = [facts_of(stage, ranks, accumulation, stage3_max_reuse_distance=0) for stage in range(4)]
    share = 2 * sum(unit.layout.padded for unit in facts[0].table.units) * (ranks - 1) // ranks
    norm = norm_bytes(ranks)
    budgets = [predict(each) for each in facts]
    sent = [[b.sent_bytes(verb) for verb in ("all_reduce", "reduce_scatter", "all_gather")] for b in budgets]
    assert sent[0] == [2 * share + norm, 0, 0]
    assert sent[1] == [norm, share, share]
    assert sent[2] == [norm, accumulation * share, share]
    # forward and backward of every micro-batch: 3 PSI where plain data parallelism has 2 PSI
    assert sent[3] == [norm, accumulation * share, 2 * accumulation * share]


def test_parameters_that_stay_are_gathered_once_for_each_micro_batch():
    ranks, accumulation = 4, 3
    share = 2 * PSI * (ranks - 1) // ranks
    budget = predict(facts_of(3, ranks, accumulation, stage3_max_live_parameters=10**9))
    assert budget.sent_bytes("all_gather") == accumulation * share
    assert budget.bytes_of("gathered parameters") == 2 * PSI


def test_by_default_one_unit_and_the_next_are_whole_at_once():
    ranks, accumulation, unit = 4, 3, 2 * WIDTH * WIDTH
    budget = predict(facts_of(3, ranks, accumulation))
    assert budget.bytes_of("gathered parameters") == 2 * unit
    # beside them, while a unit is summed, its bucket and the sum of this rank's part in fp32; none of these is kept
    assert budget.bytes_of("gradient buckets") == unit + 2 * unit // ranks
    # forward and backward, but for the last two
    assert budget.sent_bytes("all_gather") == accumulation * (2 * LAYERS - 2) * unit * (ranks - 1) // ranks


def test_what_is_whole_at_once_keeps_to_the_limit():
    facts = facts_of(3, 4, stage3_max_live_parameters=4 * WIDTH * WIDTH, stage3_max_reuse_distance=0)
    assert predict(facts).bytes_of("gathered parameters") <= 2 * 4 * WIDTH * WIDTH


def test_cut_over_a_part_of_the_ranks():
    # MiCS: 16 PSI / p here 18; scatters inside of the group, one all-reduce of PSI / p over the N / p replicas.
    ranks, p, accumulation = 64, 16, 3
    base = facts_of(3, ranks, accumulation)
    budget = predict(facts_of(3, ranks, accumulation, mics_shard_size=p))
    assert states_bytes(budget) == 18 * PSI // p == 4 * states_bytes(predict(base))
    assert budget.sent_bytes("reduce_scatter") == accumulation * 2 * PSI * (p - 1) // p
    replicas = ranks // p
    # the sums over replicas are taken of accumulators, in fp32
    assert budget.sent_bytes("all_reduce") == 2 * (4 * PSI // p) * (replicas - 1) // replicas + norm_bytes(ranks)


def test_second_copies():
    # ZeRO++: ratio of model states (16/N + 2/h) / (16/N), here with 18; later gathers stay inside of the group.
    ranks, h, accumulation = 64, 8, 4
    facts = facts_of(3, ranks, accumulation, stage3_max_reuse_distance=0, zero_hpz_partition_size=h)
    budget = predict(facts)
    assert budget.bytes_of("second copies") == 2 * PSI // h
    assert states_bytes(budget) == 18 * PSI // ranks
    gathers = sorted(row.bytes for row in budget.sent if row.what == "parameters")
    outer, inner = 2 * PSI // h * (ranks // h - 1) // (ranks // h), 2 * PSI * (h - 1) // h
    assert gathers == [outer, 2 * accumulation * inner]  # between groups once for each update


def test_coded_messages():
    full = predict(facts_of(3, 16, node=4, zero_hpz_partition_size=4))
    quantized = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    near = predict(facts_of(3, 16, node=4, zero_hpz_partition_size=4, **quantized))
    coded = predict(facts_of(3, 16, node=4, zero_hpz_partition_size=4, zero_quantized_in_node=True, **quantized))
    weights = [min(row.bytes for row in b.sent if row.what == "parameters") for b in (full, coded)]  # between groups
    # 8 bits and one fp32 scale for each block of at least 256 elements, instead of 16 bits
    assert 0.5 < weights[1] / weights[0] <= 0.5 + 4 / 256 / 2
    sums = sorted(row.bytes for row in coded.sent if row.verb == "all_to_all")
    assert coded.sent_bytes("reduce_scatter") == 0
    first, second = PSI // 2 * 3 // 4, PSI // 4 // 2 * 3 // 4
    assert first <= sums[1] <= first * (1 + 8 / 256)
    assert second <= sums[0] <= second * (1 + 8 / 256)
    # Inside of nodes sums travel in the 16 bits of gradients; gathers between nodes are coded all the way.
    assert [row.bytes for row in near.sent if row.verb == "all_to_all"] == sums[:1]
    assert near.sent_bytes("reduce_scatter") == 2 * PSI * 3 // 4
    assert near.sent_bytes("all_gather") == coded.sent_bytes("all_gather")


def test_ranks_of_one_node_send_plain_values():
    quantized = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    for node in (16, None):
        for second in (1, 4):
            plain, found = (predict(facts_of(3, 16, node=node, zero_hpz_partition_size=second, **more))
                            for more in ({}, quantized))  # fmt: skip
            assert found.sent == plain.sent
    asked = predict(facts_of(3, 16, node=16, zero_quantized_in_node=True, **quantized))
    assert asked.sent_bytes("reduce_scatter") == 0
    assert asked.sent_bytes("all_gather") < 0.6 * plain.sent_bytes("all_gather")


@pytest.mark.parametrize(
    ("name", "params", "size"),
    [
        ("Adam", {"lr": 1e-3}, 8),
        ("SGD", {"lr": 1e-3}, 0),
        ("SGD", {"lr": 1e-3, "momentum": 0.9}, 4),
        ("Adagrad", {"lr": 1e-3}, 4),
        ("RMSprop", {"centered": True, "momentum": 0.5}, 12),
        (None, {}, 8),
    ],
)
def test_optimizer_states_are_those_of_the_rule(name, params, size):
    source = settings(1)
    source["optimizer"] = {"type": name, "params": params}
    if name is None:
        del source["optimizer"]
    plan = make_plan(validate(source).config, 4, torch.float32)
    assert predict(gather_inputs(plan, on_meta(plain))).bytes_of("optimizer state") == size * PSI // 4


def test_frozen_parameters_and_buffers_count():
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64, affine=False)))
    model.append(nn.Linear(64, 64, bias=False, device="meta").requires_grad_(False))
    plan = make_plan(validate(settings(1)).config, 1, torch.float32)
    budget = predict(gather_inputs(plan, model))
    assert budget.bytes_of("outside of units") == 2 * 64 * 64 + 2 * 2 * 64 + 8  # bf16, but for an int64 counter
    assert budget.bytes_of("parameters") == 2 * 64 * 64


# -- engines ---------------------------------------------------------------------------------------------------------


def measure(source, ranks, **model):
    """What an engine holds on rank 0, and what it sends in its third step, with the calls of each verb."""
    models, data = [Stack(**model) for _ in range(ranks)], batches(3, BATCH)

    def job(world):
        engine = engine_on(world, source, models[world.rank])
        train_averaged(engine, data[:2])
        engine.mesh.comm_trace.reset()
        train_averaged(engine, data[2:])
        sent, calls = Counter(), Counter()
        for (verb, _), entry in engine.mesh.comm_trace.entries().items():
            sent[verb] += entry.bytes
            calls[verb] += entry.count
        sent["all_reduce"] -= 2 * 8 * (ranks - 1) // ranks  # of `train_engine`: the mean loss
        calls["all_reduce"] -= 1
        params, parts = engine.parts.params, engine.parts.optimization
        held = {
            "parameters": params.shards.param_bytes,
            "masters": params.shards.master_bytes,
            "optimizer state": parts.states.state_bytes,
            "gradients": parts.grads.shards.rest_bytes,
            "second copies": params.shards.second_bytes,
            "errors of quantized sums": parts.exchange.memory().get("errors of quantized sums", 0),
            "pieces of updated parameters": params.shards.collector.arena.owned_bytes,
        }
        scratch = params.arena.owned_bytes
        engine.destroy()
        return held, scratch, sent, calls

    return sim.run(ranks, job)[0]


GROUPS = {
    "shard groups": {"mics_shard_size": 2},
    "second copies": {"zero_hpz_partition_size": 2},
    "second copies in shard groups": {"mics_shard_size": 4, "zero_hpz_partition_size": 2},
    "second copies of shard groups": {"mics_shard_size": 2, "zero_hpz_partition_size": 2},
    "whole sums": {"reduce_scatter": False},
    "coded weights": {"zero_quantized_weights": True, "zero_quantized_in_node": True},
    "weights plain in a node": {"zero_quantized_weights": True},
    "coded weights and copies": {
        "zero_quantized_weights": True,
        "zero_quantized_in_node": True,
        "zero_hpz_partition_size": 2,
    },
    "coded frozen weights": {"zero_quantized_nontrainable_weights": True, "zero_hpz_partition_size": 2},
}


@pytest.mark.parametrize(("accumulation", "dtype", "name"), pairwise([1, 3], ["fp32", "bf16"], list(GROUPS)))
def test_prediction_for_groups_of_ranks(accumulation, dtype, name):
    check_engine(4, 3, accumulation, dtype, is_overlapped=False, is_frozen="frozen" in name, **GROUPS[name])


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype", "is_gathered", "most"),
    pairwise([2, 3], [1, 2, 3], ["fp32", "bf16"], [True, False], [700, 10**6]),
)
def test_prediction_follows_how_updated_parameters_are_collected(ranks, stage, dtype, is_gathered, most):
    keys = {"allgather_partitions": is_gathered, "allgather_bucket_size": most}
    keys["stage3_param_persistence_threshold"] = 8000  # at stage 3 some units stay whole, others are cut
    held, sent = check_engine(ranks, stage, 1, dtype, is_overlapped=False, **keys)
    has_pieces = is_gathered and most == 700
    assert bool(held["pieces of updated parameters"]) == has_pieces
    assert bool(sent.get("broadcast")) == (not is_gathered)


def test_prediction_for_broadcasts_in_groups_of_ranks():
    check_engine(4, 3, 1, "bf16", is_overlapped=False, mics_shard_size=2, allgather_partitions=False)
    check_engine(4, 3, 1, "bf16", is_overlapped=False, zero_hpz_partition_size=2, allgather_bucket_size=300)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_prediction_for_coded_sums(stage, monkeypatch):
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", "2")
    keys = {"zero_quantized_gradients": True, "zeropp_loco_param": None if stage == 2 else {"err_beta": 0.5}}
    keys["zero_quantized_in_node"] = stage != 3
    held, _ = check_engine(4, stage, 3, "bf16", is_overlapped=False, node=2, **keys)
    assert bool(held["errors of quantized sums"]) == (stage != 2)


def test_errors_of_quantized_sums_count():
    # 8 bits for each element and each element of a node's part, and a scale of 32 bits for each 256 of them
    keys = {"zero_quantized_gradients": True, "top": {"checkpoint": {"async_save": True}}}
    near = predict(facts_of(3, 16, node=4, zeropp_loco_param={"err_beta": 0.5}, **keys))
    assert near.bytes_of("errors of quantized sums") == PSI // 4 * (256 + 4) // 256
    keys["zero_quantized_in_node"] = True
    budget = predict(facts_of(3, 16, node=4, zeropp_loco_param={"err_beta": 0.5}, **keys))
    without = predict(facts_of(3, 16, node=4, **keys))
    assert budget.bytes_of("errors of quantized sums") == (PSI + PSI // 4) * (256 + 4) // 256
    assert without.bytes_of("errors of quantized sums") == 0
    assert budget.bytes_of("checkpoint copy") - without.bytes_of("checkpoint copy") == 4 * (PSI + PSI // 4)


@pytest.mark.parametrize(
    ("ranks", "stage", "accumulation", "dtype", "is_overlapped"),
    pairwise([1, 2, 4], [0, 1, 2, 3], [1, 3], ["fp32", "bf16"], [False, True]),
)
def test_prediction_is_what_engines_measure(ranks, stage, accumulation, dtype, is_overlapped):
    check_engine(ranks, stage, accumulation, dtype, is_overlapped=is_overlapped)


@pytest.mark.parametrize(
    ("ranks", "stage", "accumulation"), [(1, 1, 3), (2, 0, 3), (2, 1, 4), (2, 3, 2), (3, 0, 1), (3, 1, 3), (3, 2, 2)]
)
def test_prediction_of_sums_by_slots_is_what_engines_measure(ranks, stage, accumulation):
    """One sum of a rank, several of a rank, and slots that go to their owners in turn."""
    check_engine(ranks, stage, accumulation, "bf16", is_overlapped=False, is_invariant=True)


def check_engine(
    ranks, stage, accumulation, dtype, *, is_overlapped, node=None, is_frozen=False, is_invariant=False, **zero
):
    assert LENGTH  # the data's; widths below make units of different sizes
    source = config(stage, BATCH, accumulation, dtype=dtype, **WARM)
    limits = {
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_reuse_distance": 15000,
        "stage3_prefetch_bucket_size": 8000,
    }
    source["zero_optimization"] |= {"overlap_comm": is_overlapped, **limits, **zero}
    if is_invariant:
        micro = BATCH // ranks // accumulation
        source |= {"reduction": "invariant", "train_micro_batch_size_per_gpu": micro}
        source["train_batch_size"] = micro * ranks * accumulation
    held, scratch, sent, calls = measure(source, ranks, is_frozen=is_frozen)
    plan = make_plan(validate(source).config, ranks, torch.float32, ranks_per_node=node)
    budget = predict(gather_inputs(plan, on_meta(is_frozen=is_frozen)))
    assert {what: budget.bytes_of(what) for what in held} == held
    verbs = "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"
    assert {verb: budget.sent_bytes(verb) for verb in verbs} == {verb: sent.get(verb, 0) for verb in verbs}
    counted = {verb: sum(row.messages for row in budget.sent if row.verb == verb) for verb in verbs}
    assert counted == {verb: calls[verb] if sent[verb] else 0 for verb in verbs}
    kinds = "gathered parameters", "gradient buckets", "sums of micro-batches"
    predicted = sum(map(budget.bytes_of, kinds))
    assert bool(budget.lag_bytes) <= is_overlapped
    if is_overlapped:  # how many sums are waiting depends on time; the prediction is the most there can be
        assert scratch <= predicted
    else:
        assert scratch == predicted
    return held, sent


# -- machines --------------------------------------------------------------------------------------------------------


def verdict_of(source, ranks, size, **setup):
    loaded = validate(source).config
    return judge(Setup(loaded, ranks, **setup), on_meta(plain), torch.float32, [Limit("a test", size)])


def test_go_at_the_very_byte():
    first = verdict_of(settings(2), 4, 1 << 60)
    assert first.is_go
    assert first.change is None
    assert verdict_of(settings(2), 4, first.need_bytes).is_go
    assert not verdict_of(settings(2), 4, first.need_bytes - 1).is_go


def test_sums_that_may_lag_are_told():
    # Sums of so many elements may be under way, whatever the number of units; the largest alone would do.
    facts = facts_of(2, 4, 2, overlap_comm=True)
    budget = predict(facts)
    prompt = predict(dataclasses.replace(facts, is_overlapped=False))
    assert budget.lag_bytes == budget.bytes_of("gradient buckets") - prompt.bytes_of("gradient buckets")
    assert 0 < budget.lag_bytes <= 2 * LEAST_ELEMENTS < 2 * PSI
    assert "only if gradient sums lag" in verdict_of(settings(2, 2, overlap_comm=True), 4, 1 << 60).reason
    assert "lag" not in verdict_of(settings(2, 2), 4, 1 << 60).reason


def test_the_tightest_limit_decides():
    limits = [Limit("loose", 1 << 60), Limit("tight", 1), Limit("loose", 1 << 50)]
    verdict = judge(Setup(validate(settings(0)).config, 2), on_meta(plain), torch.float32, limits)
    assert verdict.limit.source == "tight"
    assert "tight" in verdict.reason
    with pytest.raises(ConfigError, match="--memory"):
        judge(Setup(validate(settings(0)).config, 2), on_meta(plain), torch.float32, [])


def test_building_counts_once_for_every_rank_of_a_node():
    need = verdict_of(settings(3, stage3_max_reuse_distance=0), 8, 1 << 60)
    alone = verdict_of(settings(3, stage3_max_reuse_distance=0), 8, 1 << 60, nodes=8)
    assert need.need_bytes == 8 * alone.need_bytes
    assert need.need_bytes >= 8 * 4 * PSI  # fp32 as built, on every rank
    init_shard = verdict_of(settings(3, stage3_max_reuse_distance=0), 8, 1 << 60, is_init_sharded=True)
    assert init_shard.need_bytes < need.need_bytes
    assert "while the model is built" in need.reason


def test_a_higher_stage_is_found_before_more_nodes():
    whole, cut = verdict_of(settings(0), 8, 1 << 60).need_bytes, verdict_of(settings(1), 8, 1 << 60).need_bytes
    assert verdict_of(settings(0), 8, (whole + cut) // 2).change == '"zero_optimization": {"stage": 1}'


def test_more_nodes_are_found_when_nothing_else_helps():
    files = {"device": "nvme", "nvme_path": "disk"}
    lean = settings(3, stage3_max_reuse_distance=0, offload_optimizer=files)
    need = verdict_of(lean, 8, 1 << 60, is_init_sharded=True).need_bytes
    verdict = verdict_of(lean, 8, need - 1, is_init_sharded=True)
    assert verdict.change.startswith("2 nodes with 8 ranks each")


def test_files_are_found_before_more_nodes():
    lean = settings(3, stage3_max_reuse_distance=0)
    least = verdict_of(lean, 8, 1 << 60, is_init_sharded=True).need_bytes
    files = settings(3, stage3_max_reuse_distance=0, offload_optimizer={"device": "nvme", "nvme_path": "disk"})
    need = verdict_of(files, 8, 1 << 60, is_init_sharded=True).need_bytes
    assert need < least
    change = verdict_of(lean, 8, need).change
    assert '"offload_optimizer": {"device": "nvme", "nvme_path": a folder on a local disk}' in change


def test_a_limit_of_the_config_is_no_go_too():
    limited = {**settings(1), "host_memory_limit": "100MB"}
    verdict = verdict_of(limited, 4, 1 << 60)
    assert not verdict.is_go
    assert "host_memory_limit is 95.4 MiB" in verdict.reason
    need = sum(predict(gather_inputs(plan_for(limited), on_meta(plain))).memory_bytes().values())
    assert verdict_of({**limited, "host_memory_limit": need}, 4, 1 << 60).is_go
    less = verdict_of({**limited, "host_memory_limit": need - 1}, 4, 1 << 60)
    assert less.change == '"zero_optimization": {"stage": 2}'


def plan_for(source, ranks=4):
    return make_plan(validate(source).config, ranks, torch.float32)


def test_no_change_is_said_when_there_is_none():
    assert verdict_of(settings(0), 8, 1000).change is None


def test_extra_bytes_are_needed_by_every_rank():
    with_extra = verdict_of(settings(0), 4, 1 << 60, extra_bytes=10**9).need_bytes
    assert with_extra - verdict_of(settings(0), 4, 1 << 60).need_bytes == 4 * 10**9
