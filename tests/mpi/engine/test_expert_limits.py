"""Experts where something is missing or wrong on one rank: no rank waits, and all do the same."""

import logging
import math

import pytest
import torch

from mpispeed.base import log
from mpispeed.nn.expert import RoutedExperts
from tests.helpers.covering import in_turn, on_ranks
from tests.helpers.expert_cases import EXACT, Case, Steps, compare, make, of_case, step
from tests.zoo import same_bits
from tests.zoo.training import weights

pytestmark = pytest.mark.mpi(min_size=1)
BOUNDS = (EXACT, EXACT)


def case_of(comm, stage, way="plain", *, k=2, tokens="unequal", accumulation=1):
    return Case(comm.size, comm.size, way, stage, k, tokens, False, True, Steps(accumulation))


def expert_weight(engine):
    """A parameter of an expert of this rank only."""
    return next(module for module in engine.module.modules() if isinstance(module, RoutedExperts)).experts.parameters()


@pytest.mark.parametrize(("stage", "way"), in_turn([(0, "fp16"), (2, "plain"), (3, "fp16"), (2, "bf16")]))
def test_an_overflow_in_one_expert_skips_the_step_on_all_ranks(comm, mpi_tmp_path, stage, way):
    case = case_of(comm, stage, way)
    engine, [batches, _] = make(case, mpi_tmp_path), of_case(case).batches
    before = weights(engine)
    hook = None
    if comm.rank == comm.size - 1:
        hook = next(expert_weight(engine)).register_hook(lambda grad: torch.full_like(grad, math.inf))
    step(engine, case, batches)
    if hook is not None:
        hook.remove()
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    same_bits(weights(engine), before)
    step(engine, case, batches)
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, True)
    assert any(not torch.equal(value, before[name]) for name, value in weights(engine).items())
    engine.destroy()


@pytest.mark.parametrize("stage", in_turn([0, 3, 1, 2]))
def test_nan_tokens_of_one_rank_are_named_there_and_skip_the_step(comm, mpi_tmp_path, stage, caplog, monkeypatch):
    case = case_of(comm, stage)
    wanted, engine = of_case(case), make(case, mpi_tmp_path)
    monkeypatch.setattr(log, "_seen", set())
    logging.getLogger("mpispeed").addHandler(caplog.handler)
    before, is_bad = weights(engine), comm.rank == comm.size - 1
    bad = [[(x.index_fill(1, torch.tensor([0]), math.nan), y) for x, y in micro] for micro in wanted.batches[0]]
    loss = step(engine, case, bad if is_bad else wanted.batches[0])
    logging.getLogger("mpispeed").removeHandler(caplog.handler)
    words = [text for text in caplog.messages if "a router of experts found logits that are not finite (NaN" in text]
    assert (math.isnan(loss), len(words)) == (is_bad, int(is_bad))
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    same_bits(weights(engine), before)
    step(engine, case, wanted.batches[0])
    assert not compare(engine, weights(engine), wanted.weights[0], *BOUNDS)
    engine.destroy()


@pytest.mark.parametrize(
    ("how", "stage", "tokens"),
    [row for row in on_ranks(["by hand", "no_sync"], [0, 1, 2, 3], ["unequal", "none"])
     if row.values[0] == "by hand" or row.values[1] < 2],
)  # fmt: skip
def test_boundaries_that_a_script_sets(comm, mpi_tmp_path, how, stage, tokens):
    case = case_of(comm, stage, k=3, tokens=tokens, accumulation=2)
    wanted = of_case(case)
    engine = make(case._replace(steps=Steps()), mpi_tmp_path)
    for number, [first, second] in enumerate(wanted.batches):
        (x, y), (u, v) = first[comm.rank], second[comm.rank]
        if how == "no_sync":
            with engine.no_sync():
                engine.backward(engine(x, y) / 2)
        else:
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(engine(x, y) / 2)
            engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(u, v) / 2)
        engine.step()
        assert not compare(engine, weights(engine), wanted.weights[number], *BOUNDS)
    engine.destroy()


@pytest.mark.parametrize("stage", in_turn([0, 1, 2, 3]))
def test_evaluation_needs_tokens_on_no_rank(comm, mpi_tmp_path, stage):
    case = case_of(comm, stage, tokens="none")
    wanted, engine = of_case(case), make(case, mpi_tmp_path)
    engine.eval()
    with torch.no_grad():
        total = engine(*wanted.batches[0][0][comm.rank]).double()
    comm.all_reduce(total)
    assert float(total) / comm.size == pytest.approx(wanted.losses[0], rel=1e-5)
    engine.train()
    step(engine, case, wanted.batches[0])
    assert not compare(engine, weights(engine), wanted.weights[0], *BOUNDS)
    engine.destroy()
