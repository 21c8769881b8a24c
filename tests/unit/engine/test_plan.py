"""Plans, placements and the batch triangle; nothing here communicates."""

import itertools

import pytest
import torch

from mpispeed.base.errors import ConfigError, TopologyError
from mpispeed.config.load import validate
from mpispeed.engine.backward import Accumulation, Counters, scale_loss
from mpispeed.plan.placements import STATES_BY_STAGE
from mpispeed.plan.plan import Batch, make_plan
from mpispeed.store.placement import moves, reduce_moves


def plan_of(ranks=4, dtype=torch.float32, **config):
    config.setdefault("train_batch_size", 24)
    return make_plan(validate(config, "test").config, ranks, dtype)


@pytest.mark.parametrize(("micro", "steps", "ranks"), list(itertools.product((1, 2, 5), (1, 3), (1, 4))))
def test_batch_triangle(micro, steps, ranks):
    batch = Batch(micro * steps * ranks, micro, steps, ranks)
    unit = micro * ranks
    for count in (1, 2, 7):
        changed = batch.with_train_batch_size(count * unit)
        assert changed.triple == (count * unit, micro, count)
    for size in (unit + 1 if unit > 1 else 0, 0, -unit):
        with pytest.raises(ConfigError, match="multiple"):
            batch.with_train_batch_size(size)
    assert batch.with_micro_batch_size(3).triple == (3 * steps * ranks, 3, steps)
    for size in (0, -1):
        with pytest.raises(ConfigError, match="positive"):
            batch.with_micro_batch_size(size)


def test_plan_resolves_what_the_config_leaves_open():
    plan = plan_of(gradient_accumulation_steps=3, bf16={"enabled": True})
    assert plan.batch.triple == (24, 2, 3)
    assert plan.axes == {"pipe": 1, "data": 4, "model": 1}
    assert plan.policy.compute == plan.policy.communicate == torch.bfloat16
    assert plan.policy.master == plan.policy.accumulate == torch.float32
    assert not plan.is_overlapped
    assert plan_of(dtype=torch.float64).policy.master == torch.float64
    assert plan_of(zero_optimization={"stage": 1, "overlap_comm": True}).is_overlapped
    assert plan_of(zero_optimization={"stage": 1, "reduce_bucket_size": 0}).bucket_elements == 1
    assert dict(plan.describe())["batch"] == "24 = 2 x 3 x 4"
    assert "curriculum" not in dict(plan.describe())
    changed = plan.with_batch(plan.batch.with_train_batch_size(8))
    assert changed.batch.gradient_accumulation_steps == 1
    assert plan.batch.gradient_accumulation_steps == 3


@pytest.mark.parametrize(
    ("kind", "numbers", "told"),
    [
        ("fixed_linear", {"total_curriculum_step": 90, "difficulty_step": 8}, "fixed_linear over 90 steps"),
        ("fixed_discrete", {"difficulty": [8, 16], "max_step": [5]}, "fixed_discrete over 5 steps"),
        ("custom", {}, "custom"),
    ],
)
def test_plan_tells_how_lengths_grow(kind, numbers, told):
    growth = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64, "schedule_type": kind}
    plan = plan_of(curriculum_learning={"enabled": True, "schedule_config": numbers, **growth})
    assert dict(plan.describe())["curriculum"] == f"seqlen 8 to 64, {told}"


def test_digest_tells_plans_apart():
    digests = {
        plan_of().digest(),
        plan_of(gradient_clipping=0.5).digest(),
        plan_of(ranks=2).digest(),
        plan_of(zero_optimization={"stage": 2}).digest(),
    }
    assert len(digests) == 4
    assert plan_of().digest() in digests
    assert plan_of(dtype=torch.float64).digest() in digests  # stages may have parameters of other dtypes


def test_axes_that_do_not_fit_are_refused():
    with pytest.raises(TopologyError, match="data_parallel_size 3 does not fit 4 ranks"):
        plan_of(data_parallel_size=3)


def test_ranks_that_share_sequences_share_samples():
    plan = plan_of(8, sequence_parallel_size=4, sequence_parallel={"ring_size": 2}, gradient_accumulation_steps=3)
    assert plan.batch.triple == (24, 4, 3)
    assert dict(plan.describe())["ranks"] == "pipe 1 x data 8 x model 1 (sequence 4, sequence.ulysses 2)"
    topology = plan.topology()
    for name, peers in (
        ("data", range(8)), ("batch", (1, 5)), ("sequence", range(4)), ("sequence.ulysses", (0, 1)),
        ("sequence.ring", (1, 3)), (("batch", "sequence.ring"), (1, 3, 5, 7)),
    ):  # fmt: skip
        assert list(topology.peers(1, name)) == list(peers), name
    assert plan_of(8).topology().names == ("pipe", "data", "model")
    assert plan.digest() != plan_of(8, sequence_parallel_size=4, gradient_accumulation_steps=3).digest()


@pytest.mark.parametrize("axes", [{"pipe": 2, "data": 1, "model": 2}, {"pipe": 1, "data": 4, "model": 1}])
def test_names_of_the_sequence_axis_are_there_without_it(axes):
    plan = make_plan(validate({"train_batch_size": 24}, "test").config, 4, torch.float32, axes=axes)
    topology = plan.topology()
    for rank in range(4):
        assert list(topology.peers(rank, "batch")) == list(topology.peers(rank, "data"))
        for name in ("sequence", "sequence.ulysses", "sequence.ring"):
            assert list(topology.peers(rank, name)) == [rank]


@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("zero", [{"stage": 3, "mics_shard_size": 2}, {"stage": 3, "zero_hpz_partition_size": 2}, {}])
def test_the_sequence_axis_nests_with_other_groups(zero, ring):
    settings = {"sequence_parallel_size": 4, "sequence_parallel": {"ring_size": ring}, "zero_optimization": zero}
    topology = plan_of(8, **settings).with_distinct([2]).topology()
    sizes = {"data": 8, "batch": 2, "sequence": 4, "sequence.ulysses": 4 // ring, "sequence.ring": ring}
    assert {name: topology.group_size(name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"sequence_parallel_size": 4}, "sequence_parallel_size 4 does not divide the 6 ranks .* use one of 1, 2, 3"),
        ({"sequence_parallel_size": 3, "sequence_parallel": {"ring_size": 2}}, "ring_size 2 does not divide .* 1, 3"),
        ({"sequence_parallel_size": 2, "data_parallel_size": 6}, "6 ranks at 2 ranks per sequence; start 12 ranks"),
        (
            {"sequence_parallel_size": 2, "zero_optimization": {"stage": 3, "mics_shard_size": 3}},
            "mics_shard_size = 3 is not a multiple of .*sequence_parallel",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_sequence_axis_are_refused(settings, told):
    with pytest.raises(TopologyError, match=told):
        plan_of(6, **settings).topology()


def test_gradients_of_cut_sequences_travel_in_a_format_of_their_own():
    def wire(sequence=2, **settings):
        plan = plan_of(4, sequence_parallel_size=sequence, **settings)
        return plan.policy.communicate, plan.is_wire_set

    low = {"bf16": {"enabled": True}}
    assert wire(**low) == (torch.float32, True)
    assert wire(1, **low) == (torch.bfloat16, True)
    assert wire(**low, seq_parallel_comm_data_type="fp16") == (torch.float16, True)
    assert wire(**low, communication_data_type="bf16") == (torch.bfloat16, True)
    assert wire() == (torch.float32, False)
    assert wire(seq_parallel_comm_data_type="bf16") == (torch.bfloat16, True)


def test_what_is_cut_grows_with_the_stage():
    cut = {stage: sum(not p.is_replicated for p in (s.param, s.grad, s.master)) for stage, s in STATES_BY_STAGE.items()}
    assert cut == {0: 0, 1: 1, 2: 2, 3: 3}
    for states in STATES_BY_STAGE.values():
        verbs = [move.verb for move in reduce_moves(("data",), states.master)]
        assert verbs == (["all_reduce"] if states.master.is_replicated else ["reduce_scatter"])
        verbs = [move.verb for move in moves(states.master, states.param)]
        assert verbs == ([] if states.master == states.param else ["all_gather"])
        assert states.grad.is_replicated or states.grad == states.master
        assert states.param.is_replicated or states.param == states.grad


def test_boundaries_are_counted_or_set():
    counters = Counters()
    accumulation = Accumulation(3, counters)

    def boundaries():
        for counters.micro_steps in range(3):
            yield accumulation.is_gradient_accumulation_boundary()

    assert list(boundaries()) == [False, False, True]
    counters.micro_steps = 5
    assert accumulation.is_gradient_accumulation_boundary()  # the steps were lowered meanwhile
    for override in (True, False):
        accumulation.set_gradient_accumulation_boundary(override)
        assert set(boundaries()) == {override}
    accumulation.set_gradient_accumulation_boundary(None)
    assert list(boundaries()) == [False, False, True]


def test_counters_end_a_batch():
    counters = Counters(micro_steps=4, pending_backwards=5, updates_before_state=1)
    counters.end_batch(12, is_skipped=False)
    counters.micro_steps += 1
    counters.micro_steps += 1
    counters.end_batch(12, is_skipped=True)
    assert (counters.global_steps, counters.skipped_steps, counters.global_samples) == (2, 1, 24)
    assert (counters.update_count, counters.pending_backwards) == (0, 0)
    assert counters.boundary_micro_steps == 7


def test_losses_are_divided_whatever_holds_them():
    loss = torch.tensor(6.0, requires_grad=True)
    assert scale_loss(loss, 1) is loss
    assert scale_loss(loss, 3).item() == 2.0
    assert [item.item() for item in scale_loss([loss, loss], 2)] == [3.0, 3.0]
    assert isinstance(scale_loss((loss,), 2), tuple)
    assert scale_loss("text", 2) == "text"
    low = torch.tensor(1.0, dtype=torch.bfloat16)
    assert scale_loss(low, 3).item() == pytest.approx(1 / 3, rel=1e-7)  # not rounded to 16 bits
    assert scale_loss(loss.double(), 3).dtype == torch.float64
