"""The table of placements, what it refuses, and engines that train under it on simulated ranks."""

import logging
from itertools import combinations

import pytest
import torch
from torch import nn

from mpispeed.base import log as logs
from mpispeed.base.errors import ConfigError, TopologyError, UsageError
from mpispeed.config.load import validate
from mpispeed.mesh import sim
from mpispeed.plan.placements import far, ranks_per_node
from mpispeed.plan.plan import make_plan
from tests.unit.engine.simulated import engine_on
from tests.zoo import same_bits
from tests.zoo.models import Net, Words, samples
from tests.zoo.training import ADAM, config, train


def plan_of(ranks, node=None, **zero):
    settings = validate({"train_batch_size": 24, "zero_optimization": zero}, "test").config
    return make_plan(settings, ranks, torch.float32, ranks_per_node=node)


def cuts(plan):
    states = plan.states
    return [p.axes if p is not None else None for p in (states.param, states.grad, states.master, states.second)]


def test_table():
    nested = ("data.inner", "data.outer")
    assert cuts(plan_of(8, stage=3, mics_shard_size=4)) == [("data.inner",)] * 3 + [None]
    assert cuts(plan_of(8, stage=3, zero_hpz_partition_size=4)) == [nested] * 3 + [("data.inner",)]
    assert cuts(plan_of(8, stage=3)) == [("data",)] * 3 + [None]
    tree = plan_of(8, 2, stage=3, mics_shard_size=4, mics_hierarchical_params_gather=True)
    assert cuts(tree) == [("data.local", "data.across")] * 3 + [None]
    both = plan_of(8, stage=3, mics_shard_size=4, zero_hpz_partition_size=2)
    assert cuts(both) == [("data.second", "data.across")] * 3 + [("data.second",)]
    for second in (1, 4):  # the shards themselves are over these ranks
        same = plan_of(8, stage=3, mics_shard_size=4, zero_hpz_partition_size=second)
        assert same.placing == plan_of(8, stage=3, mics_shard_size=4).placing
    for stage, whole in ((1, 2), (2, 1), (3, 0)):
        plan = plan_of(8, 4, stage=stage, zero_quantized_gradients=True)
        assert cuts(plan) == [()] * whole + [nested] * (3 - whole) + [None]
        assert plan.placing.hops == nested
        assert plan.topology().group_size("data.inner") == 4
    assert plan_of(8, 8, stage=3, zero_quantized_gradients=True).placing.hops is None
    assert plan_of(8, 8, stage=3, zero_quantized_gradients=True, zero_hpz_partition_size=8).placing.hops is None
    asked = plan_of(8, 8, stage=3, zero_quantized_gradients=True, zero_quantized_in_node=True)
    assert asked.placing.sum_hops == nested
    assert asked.topology().group_size("data.outer") == 1
    both = plan_of(8, 8, stage=3, zero_quantized_gradients=True, zero_hpz_partition_size=2)
    assert both.topology().group_size(both.placing.hops[0]) == 2


@pytest.mark.parametrize(
    ("node", "sizes", "levels"),
    [
        (4, (8,), [8]),
        (4, (2, 8, 24), [8, 24]),
        (4, (4,), []),
        (1, (8,), []),
        (0, (8,), []),
        (6, (8,), []),
        (4, (6,), []),
    ],
)
def test_groups_that_fill_nodes_have_two_levels(node, sizes, levels):
    plan = plan_of(24, node, stage=3)
    plan = plan.with_distinct(sizes[:1]).with_distinct(sizes[1:])
    topology = plan.topology()
    assert [size for size in (2, 4, 6, 8, 24) if topology.has(far(size))] == levels
    for size in levels:
        assert list(topology.peers(21, "data.near")) == list(range(20, 24))
        first = 21 // size * size
        assert list(topology.peers(21, far(size))) == list(range(first + 1, first + size, node))


def test_levels_that_do_not_nest_with_shards_are_left_out():
    topology = plan_of(24, 6, stage=3, mics_shard_size=4).with_distinct([12]).topology()
    assert not topology.has(far(12))
    assert topology.group_size("data.distinct12") == 12


def test_groups_of_ranks():
    mics = plan_of(8, stage=3, mics_shard_size=4).topology()
    assert list(mics.peers(5, "data.inner")) == [4, 5, 6, 7]
    assert list(mics.peers(5, "data.outer")) == [1, 5]
    assert list(mics.peers(5, "data")) == list(range(8))
    tree = plan_of(8, 2, stage=3, mics_shard_size=4, mics_hierarchical_params_gather=True).topology()
    assert list(tree.peers(5, "data.local")) == [4, 5]
    assert list(tree.peers(5, "data.across")) == [5, 7]
    both = plan_of(8, stage=3, mics_shard_size=4, zero_hpz_partition_size=2).topology()
    assert [list(both.peers(5, f"data.{name}")) for name in ("second", "across", "outer")] == [[4, 5], [5, 7], [1, 5]]
    for size in (1, 8):
        edge = plan_of(8, stage=3, mics_shard_size=size).topology()
        assert (edge.group_size("data.inner"), edge.group_size("data.outer")) == (size, 8 // size)
    assert dict(plan_of(8, stage=3, mics_shard_size=4).describe())["ranks"].endswith("(data.inner 4)")


@pytest.mark.parametrize(
    ("ranks", "node", "zero", "message"),
    [
        (6, None, {"stage": 3, "mics_shard_size": 4}, r"size 4 does not divide the 6 .*use one of 1, 2, 3"),
        (6, None, {"stage": 3, "zero_hpz_partition_size": 4}, r"zero_hpz_partition_size 4 does not divide the 6"),
        (8, None, {"stage": 2, "mics_shard_size": 4}, r"mics_shard_size 4 .*stage 3, found 2"),
        (8, None, {"stage": 0, "zero_hpz_partition_size": 4}, r"zero_hpz_partition_size 4 .*stage 3, found 0"),
        (8, None, {"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 8}, r"8 does not divide .*1, 2, 4"),
        (6, None, {"stage": 3, "mics_shard_size": 6, "zero_hpz_partition_size": 4}, r"4 does not divide .*mics"),
        (8, 4, {"stage": 3, "mics_shard_size": 4, "zero_quantized_gradients": True}, r"not work with .*mics_shard"),
        (8, None, {"stage": 3, "mics_hierarchical_params_gather": True}, r"needs zero_optimization.mics_shard_size"),
        (8, 4, {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}, r"size is 4, .* 4 ranks"),
        (12, 4, {"stage": 3, "mics_shard_size": 6, "mics_hierarchical_params_gather": True}, r"multiple of 4 from 8"),
        (8, 0, {"stage": 3, "mics_shard_size": 8, "mics_hierarchical_params_gather": True}, r"MPISPEED_RANKS_PER_NODE"),
        (8, 0, {"stage": 3, "zero_quantized_gradients": True}, r"equally many ranks .*MPISPEED_RANKS_PER_NODE"),
        (8, 3, {"stage": 3, "zero_quantized_gradients": True}, r"8 ranks are no multiple of 3 ranks per node"),
        (8, 4, {"stage": 0, "zero_quantized_gradients": True}, r"stage 1 to 3, found 0"),
    ],
)  # fmt: skip
def test_what_cannot_hold_is_refused_by_name(ranks, node, zero, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(ranks, node, **zero)


@pytest.mark.parametrize(
    ("node", "second", "axes", "copy"),
    [
        (2, 2, ("second", "across"), ("second",)),
        (4, 2, ("second", "between", "across"), ("second",)),
        (2, 4, ("local", "between", "across"), ("local", "between")),
        (4, 8, ("local", "across"), None),
    ],
)
def test_second_copies_beside_gathers_over_nodes(node, second, axes, copy):
    zero = {"mics_shard_size": 8, "mics_hierarchical_params_gather": True, "zero_hpz_partition_size": second}
    plan = plan_of(24, node, stage=3, **zero)
    cut, part = (names and tuple(f"data.{name}" for name in names) for names in (axes, copy))
    assert cuts(plan) == [cut] * 3 + [part]
    topology, over = plan.topology(), []
    for axis in cut:  # each axis widens the group of neighbours
        over.append(axis)
        assert list(topology.peers(0, over)) == list(range(topology.group_size(over)))
    assert topology.group_size(over) == 8
    assert part is None or topology.group_size(part) == second


def test_second_copies_and_nodes_that_do_not_nest_are_refused():
    zero = {"mics_shard_size": 12, "mics_hierarchical_params_gather": True, "zero_hpz_partition_size": 6}
    with pytest.raises(TopologyError, match=r"zero_hpz_partition_size = 6 .*ranks per node = 4"):
        plan_of(12, 4, stage=3, **zero).topology()


def test_plans_differ_by_their_placements():
    digests = {
        plan_of(8, 4, stage=3, zero_quantized_gradients=True).digest(),
        plan_of(8, 2, stage=3, zero_quantized_gradients=True).digest(),
    }
    assert len(digests) == 2


# -- nodes ---------------------------------------------------------------------------------------------------------


def nodes(ranks, **more):
    return sim.run(ranks, ranks_per_node, **more)


def test_nodes_are_found_or_told(monkeypatch):
    monkeypatch.delenv("MPISPEED_RANKS_PER_NODE", raising=False)
    assert nodes(4) == [4] * 4
    assert nodes(4, ranks_per_node=2) == [2] * 4
    assert nodes(3, ranks_per_node=2) == [0] * 3  # 2 and 1
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", "2")
    assert nodes(4) == [2] * 4
    for wrong in ("0", "-1", "two"):
        monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", wrong)
        with pytest.raises(ConfigError, match=f"RANKS_PER_NODE is '{wrong}'"):
            nodes(2)


# -- engines -------------------------------------------------------------------------------------------------------

SCHEMES = {
    "stage 3": {"stage": 3},
    "mics 1": {"stage": 3, "mics_shard_size": 1},
    "mics 2": {"stage": 3, "mics_shard_size": 2},
    "mics 4": {"stage": 3, "mics_shard_size": 4},
    "mics 4 over nodes": {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True},
    "mics 4, hpz 2": {"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 2},
    "mics 2, hpz 2": {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2},
    "hpz 2": {"stage": 3, "zero_hpz_partition_size": 2},
    "hpz 4": {"stage": 3, "zero_hpz_partition_size": 4},
    "mics 2 by all-reduce": {"stage": 3, "mics_shard_size": 2, "reduce_scatter": False},
    "stage 1 by all-reduce": {"stage": 1, "reduce_scatter": False},
    "stage 2 by all-reduce": {"stage": 2, "reduce_scatter": False},
}


def config_of(zero, **more):
    settings = config(zero["stage"], **ADAM, gradient_clipping=0.3, **more)
    # nothing stays whole, so that every gather and cut is used
    settings["zero_optimization"] = {"param_persistence_threshold": 0, **zero}
    return settings


def trained(zero, *, ranks=4, steps=3, node=2, folder=None, loads=False, data=None, **more):
    """Losses, norm and weights after some steps, of every rank."""
    models = [Net(seed=11 if not loads else 90) for _ in range(ranks)]

    def job(world):
        engine = engine_on(world, config_of(zero, **more), models[world.rank])
        if loads:
            assert engine.load_checkpoint(str(folder))[0] is not None
        own = samples(2 * steps)[steps:] if loads else samples(steps)
        losses = train(engine, own if data is None else data)
        if folder is not None and not loads:
            engine.save_checkpoint(str(folder))
        norm = engine.get_global_grad_norm()
        engine.destroy()  # gives parameters back whole
        return losses, norm, {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    return sim.run(ranks, job, ranks_per_node=node)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_scheme_has_the_bits_of_stage_2(scheme):
    more = {"reduction": "ordered"}
    same_bits(trained(SCHEMES[scheme], **more), trained({"stage": 2}, **more))


@pytest.mark.parametrize("scheme", ["mics 2", "mics 4 over nodes", "mics 4, hpz 2", "hpz 2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_16_bits_too(scheme, dtype):
    section = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "loss_scale": 64}}[dtype]
    more = {"reduction": "ordered", dtype: section}
    same_bits(trained(SCHEMES[scheme], **more), trained({"stage": 2}, **more))


@pytest.mark.parametrize("scheme", ["mics 2", "hpz 2", "stage 3", "stage 2 by all-reduce"])
def test_accumulation_is_right_within_rounding(scheme):
    """Sums of ranks and of micro-steps come in another order, and Adam divides small gradients by small norms."""
    found = trained(SCHEMES[scheme], gradient_accumulation_steps=3)
    expected = trained({"stage": 0}, gradient_accumulation_steps=3)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
        for name in ours[2]:
            torch.testing.assert_close(ours[2][name], theirs[2][name], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("saved", ["mics 2", "mics 4 over nodes", "mics 4, hpz 2", "hpz 2", "mics 1"])
def test_checkpoints_move_between_schemes(saved, tmp_path):
    """Every element is written by one rank; any scheme reads it back."""
    trained(SCHEMES[saved], folder=tmp_path, reduction="ordered")
    schemes = saved, "mics 2", "hpz 2"
    continued = [trained(SCHEMES[s], folder=tmp_path, loads=True, reduction="ordered") for s in schemes]
    trained({"stage": 2}, folder=tmp_path / "plain", reduction="ordered")
    reference = trained({"stage": 2}, folder=tmp_path / "plain", loads=True, reduction="ordered")
    for results in continued:
        same_bits(results, reference)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_are_refused_when_asked(stage):
    class Partly(Net):
        def __init__(self):
            super().__init__()
            self.never = nn.Linear(3, 3)

    models = [Partly() for _ in range(2)]

    def job(world):
        settings = config_of({"stage": stage, "ignore_unused_parameters": False})
        engine = engine_on(world, settings, models[world.rank])
        with pytest.raises(UsageError, match=r"never\.weight, never\.bias.*ignore_unused_parameters"):
            train(engine, samples(1))
        engine.destroy()

    sim.run(2, job)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kept", ["fp32", "bf16"])
def test_dtypes_of_messages_and_accumulators(stage, wire, kept):
    models = [Net() for _ in range(2)]

    def job(world):
        more = {"communication_data_type": wire, "data_types": {"grad_accum_dtype": kept}, "bf16": {"enabled": True}}
        engine = engine_on(world, config_of({"stage": stage}, **more), models[world.rank])
        engine.mesh.comm_trace.reset()
        train(engine, samples(1))
        grads = engine.parts.optimization.grads
        psi = sum(unit.layout.padded for unit in grads.table.units)
        assert engine.mesh.comm_trace.total_bytes("reduce_scatter") == psi * DTYPES[wire].itemsize // 2
        assert grads.shards.rest_bytes == psi * DTYPES[kept].itemsize // (1 if stage == 1 else 2)
        engine.destroy()

    sim.run(2, job)


@pytest.mark.parametrize(
    "more", [{"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}, {"gradient_predivide_factor": 2.0}]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_prescale_and_predivide(stage, more):
    """Powers of two move no bit in fp32."""
    zero = {"stage": stage, "reduce_scatter": stage == 1}
    same_bits(trained(zero, reduction="ordered", **more), trained({"stage": 0}, reduction="ordered"))


def test_sparse_gradients_need_whole_gradients():
    with pytest.raises(ConfigError, match=r"sparse_gradients: .*stage 1.*stage to 0"):
        validate({"train_batch_size": 4, "sparse_gradients": True, "zero_optimization": {"stage": 1}}, "test")


def words(is_sparse, travels, stage=0):
    models = [Words(500, 4, is_sparse=is_sparse) for _ in range(2)]

    def job(world):
        settings = config(stage, **ADAM, sparse_gradients=travels, reduction="ordered")
        engine = engine_on(world, settings, models[world.rank])
        engine.mesh.comm_trace.reset()
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            engine.backward(engine(torch.randint(0, 500, (6,), generator=generator)))
            engine.step()
        sent = engine.mesh.comm_trace.total_bytes("all_reduce")
        engine.destroy()
        return sent, {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    return sim.run(2, job)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_embeddings_whose_rows_travel_train_as_dense_ones(is_sparse):
    rows, dense = words(is_sparse, True), words(False, False)
    for ours, theirs in zip(rows, dense, strict=True):
        assert theirs[0] - ours[0] == 3 * 500 * 4 * 4  # the table is in no all-reduce any more
        for name in ours[1]:
            torch.testing.assert_close(ours[1][name], theirs[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sparse_gradients_that_do_not_travel_as_rows_are_made_dense(stage):
    found, dense = words(True, False, stage), words(False, False)
    for ours, theirs in zip(found, dense, strict=True):
        same_bits(theirs[1], ours[1])


@pytest.mark.deepspeed_row("a15")
@pytest.mark.parametrize("travels", [False, True])
def test_sparse_adam_moves_only_the_rows_that_some_rank_used(travels, tmp_path):
    """Its state returns from a checkpoint; plain torch takes the mean of both ranks' sparse gradients."""
    tokens = torch.randint(0, 40, (4, 2, 3), generator=torch.Generator().manual_seed(5))

    def model():
        made = Words(500, 4, is_sparse=True)
        made.out.requires_grad_(False)
        return made

    def job(world):
        def begin(seen):
            optimizer = torch.optim.SparseAdam(list(seen.embed.parameters()), lr=0.1)
            settings = config(0, sparse_gradients=travels, reduction="ordered")
            return engine_on(world, settings, seen, optimizer=optimizer)

        def go_on(engine, batches):
            for batch in batches:
                engine.backward(engine(batch[world.rank]))
                engine.step()
            return engine

        engine = go_on(begin(models[world.rank]), tokens[:2])
        engine.save_checkpoint(str(tmp_path))
        go_on(engine, tokens[2:]).destroy()
        again = begin(model())
        again.load_checkpoint(str(tmp_path))
        found = go_on(again, tokens[2:]).module.embed.weight.detach().clone()
        again.destroy()
        return found

    models, plain = [model(), model()], model()
    found = sim.run(2, job)
    optimizer = torch.optim.SparseAdam(list(plain.embed.parameters()), lr=0.1)
    for batch in tokens:
        optimizer.zero_grad()
        for part in batch:
            (plain(part) / 2).backward()
        optimizer.step()
    for table in (*found, models[0].embed.weight.detach()):
        same_bits(table, found[0])
        torch.testing.assert_close(table, plain.embed.weight.detach(), rtol=1e-5, atol=1e-6)


def test_sparse_adam_needs_whole_tables():
    def job(world):
        model = Words()
        with pytest.raises(ConfigError, match=r"SparseAdam looks at whole tensors .* use stage 0"):
            engine_on(world, config(1), model, optimizer=torch.optim.SparseAdam([model.embed.weight]))

    sim.run(1, job)


def test_a_model_without_embeddings_makes_sparse_gradients_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    monkeypatch.setattr(logs, "_seen", set())
    with caplog.at_level("WARNING", logger="mpispeed"):
        trained({"stage": 0}, ranks=2, steps=1, sparse_gradients=True)
    assert "sparse_gradients has no effect: no nn.Embedding" in caplog.text


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("loco", [None, {"err_beta": 0.5}])
def test_quantized_gradients_train(stage, loco):
    zero = {"stage": stage, "zero_quantized_gradients": True, "zeropp_loco_param": loco}
    data = samples(1) * 30
    quantized, plain = trained(zero, data=data)[0][0], trained({"stage": stage}, data=data)[0][0]
    assert quantized != plain
    # 4 bits change single steps; the course of the loss stays
    assert quantized[-1] < 0.5 * quantized[0]
    assert quantized[-1] == pytest.approx(plain[-1], rel=0.3)


@pytest.mark.parametrize("node", [2, 3, 4, 6, 8, 12, 24, 30, 0])
@pytest.mark.parametrize("sizes", [(2, 12, 1), (3, 4, 2), (1, 8, 3)])
def test_groups_on_one_node_are_those_whose_ranks_share_one(sizes, node):
    """By the definition, over all groups of every set of axes; one node has all ranks where it has room for them."""
    axes = dict(zip(("pipe", "data", "model"), sizes, strict=True))
    section = {"stage": 3, "zero_hpz_partition_size": 4}
    plan = make_plan(validate({"train_batch_size": 24, "zero_optimization": section}).config, 24, torch.float32,
                     ranks_per_node=node, axes=axes)  # fmt: skip
    topology = plan.topology()
    for count in range(1, len(topology.names) + 1):
        for over in combinations(topology.names, count):
            groups = topology.groups(over)
            expected = node > 0 and all(len({rank // node for rank in group}) == 1 for group in groups)
            assert plan.is_in_node(over) == expected, over


@pytest.mark.parametrize(
    ("node", "keys", "said"),
    [
        (4, {}, "weights in 8 bits, gradients in 4 bits between nodes"),
        (4, {"zero_quantized_in_node": True}, "weights in 8 bits, gradients in 4 bits"),
        (8, {}, "weights plain on one node, gradients plain on one node"),
        (8, {"zero_hpz_partition_size": 2}, "weights plain on one node, gradients plain on one node"),
        (8, {"zero_quantized_in_node": True}, "weights in 8 bits, gradients in 4 bits"),
        (4, {"zero_quantized_weights": False, "zero_quantized_gradients": False}, None),
    ],
)
def test_the_plan_says_what_is_coded(node, keys, said):
    plan = plan_of(8, node, **{"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True, **keys})
    assert dict(plan.describe()).get("codes") == said


def test_on_one_node_gradients_are_not_quantized(caplog, monkeypatch):
    zero = {"stage": 2, "zero_quantized_gradients": True}
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    monkeypatch.setattr(logs, "_seen", set())
    with caplog.at_level("WARNING", logger="mpispeed"):
        same_bits(trained(zero, node=4, reduction="ordered"), trained({"stage": 2}, reduction="ordered"))
    assert "zero_quantized_gradients has no effect on one node" in caplog.text
    assert trained(zero | {"zero_quantized_in_node": True}, node=4)[0] != trained({"stage": 2})[0]


def test_on_one_node_weights_are_not_quantized(caplog, monkeypatch):
    zero = {"stage": 3, "zero_quantized_weights": True}
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    monkeypatch.setattr(logs, "_seen", set())
    plain = trained(zero | {"zero_quantized_weights": False}, reduction="ordered")
    with caplog.at_level("WARNING", logger="mpispeed"):
        same_bits(trained(zero, node=4, reduction="ordered"), plain)
    assert caplog.text.count("zero_quantized_weights has no effect on one node: gathers") == 1
    assert trained(zero, node=2, reduction="ordered")[0] != plain[0]
