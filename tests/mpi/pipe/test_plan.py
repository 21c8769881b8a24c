"""What `mpispeed plan` predicts of stages and slices is what engines hold and send."""

import pytest

from mpispeed.config.load import validate
from mpispeed.engine.estimate.stages import examine_stages, has_loose_gathers
from tests.helpers import covering
from tests.helpers.pipes import Case, Layout, train

pytestmark = pytest.mark.mpi(min_size=2)
ROWS = [
    ((2, 1, 1), "1f1b", 0, "bf16", False, True),
    ((2, 1, 1), "1f1b", 1, "fp32", False, False),
    ((1, 2, 1), "1f1b", 2, "bf16", False, True),
    ((2, 2, 1), "1f1b", 1, "fp32", False, True),
    ((2, 1, 2), "1f1b", 0, "bf16", False, True),
    ((2, 1, 2), "1f1b", 2, "bf16", False, True),
    ((2, 1, 2), "1f1b", 3, "fp32", False, True),
    ((2, 1, 2), "1f1b", 3, "bf16", True, False),
    ((1, 2, 2), "1f1b", 3, "bf16", False, False),
]
if covering.IS_FULL:
    ROWS += [((2, 1, 2), "1f1b", 1, "bf16", False, True), ((2, 1, 2), "1f1b", 2, "fp32", True, False)]
CASES = [
    Case(Layout(*sizes), schedule, stage, dtype, is_per_micro, is_tied=is_tied)
    for sizes, schedule, stage, dtype, is_per_micro, is_tied in ROWS
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=pytest.mark.ranks(case.layout.ranks)) for case in CASES]
)
def test_memory_and_traffic_of_every_stage(case):
    zero = {"stage": case.stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    engine = case.engine(zero_optimization=zero)
    train(engine, range(2))
    comm_trace = engine.mesh.world.comm_trace  # that of tied weights too
    comm_trace.reset()
    train(engine, range(2, 3))
    sent = {key: entry.bytes for key, entry in comm_trace.entries().items() if entry.bytes}
    parts = engine.mpispeed.parts
    params, optimization = parts.params.shards, parts.optimization
    held = {
        "parameters": params.param_bytes,
        "masters": params.master_bytes,
        "optimizer state": optimization.states.state_bytes,
        "gradients": optimization.grads.shards.rest_bytes,
        "pieces of updated parameters": params.collector.arena.owned_bytes,
    }
    scratch, stage = params.arena.owned_bytes, engine.stage_id
    engine.destroy()
    ranks = case.layout.ranks
    config = validate(case.settings(zero_optimization=zero)).config
    plan, stages = examine_stages(config, ranks, ranks, case.module, None, in_scope=False)
    budget = stages[stage].budget
    assert {what: budget.bytes_of(what) for what in held} == held
    predicted = {}
    for row in budget.sent:
        predicted[row.verb, row.axes] = predicted.get((row.verb, row.axes), 0) + row.bytes
    # activations: between stages, and sums in layers that are sliced
    sums = ("all_reduce", ("model",))  # also that of the norm, where there are only slices
    hidden = {("send", ("pipe",)), ("all_gather", ("model",))} - predicted.keys() | {sums}
    assert sent.get(sums, 0) >= predicted.get(sums, 0)
    is_exact = not has_loose_gathers(plan)
    if is_exact:
        assert budget.bytes_of("gathered parameters") + budget.bytes_of("gradient buckets") == scratch
    else:
        hidden |= {("all_gather", ("data",))}
    assert {k: v for k, v in sent.items() if k not in hidden} == {k: v for k, v in predicted.items() if k not in hidden}
