"""Ranks that run different modules are told so in seconds, by name; or are served, when that is asked for."""

import time

import pytest
import torch

import mpispeed
from mpispeed.base.errors import AgreementError, UsageError
from tests.zoo import same_bits
from tests.zoo.models import Branches
from tests.zoo.training import ADAM, config, start

LIMIT_SECONDS = 30.0


def make(stage=3, **zero):
    return start(config(stage, reduction="ordered", zero=zero, **ADAM), Branches(8, 6))


def run(engine, x, experts):
    """All ranks run the first layer and the last, and between them the experts whose numbers they are given."""
    engine.module.order = [0, *(1 + index for index in experts), 5]
    return engine(x)


def train(engine, chosen):
    generator = torch.Generator().manual_seed(engine.global_rank)
    for experts in chosen:
        engine.backward(run(engine, torch.randn(2, 8, generator=generator), experts))
        engine.step()


@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("zero", "first_rank", "others"),
    [
        ({}, [0, 1], [0, 2]),  # another expert, both orders were known before
        ({}, [0, 1, 3], [0, 1]),  # one more: the others are in backward already
        ({"stage3_max_reuse_distance": 0}, [0, 1, 3], [0, 1]),
        ({"stage3_max_reuse_distance": 0, "overlap_comm": False}, [0], [0, 1]),
    ],
)
def test_ranks_that_take_other_branches_are_named(zero, first_rank, others):
    engine = make(**zero)
    train(engine, [[0, 1]] * 3)
    begin = time.monotonic()
    with pytest.raises(AgreementError) as caught:
        train(engine, [first_rank if engine.global_rank == 0 else others])
    assert time.monotonic() - begin < LIMIT_SECONDS
    text = str(caught.value)
    assert "rank 0" in text
    assert "layers." in text
    assert len(set(engine.mesh.world.comm.gather_objects(text))) == 1
    begin = time.monotonic()
    engine.destroy()
    assert time.monotonic() - begin < LIMIT_SECONDS


@pytest.mark.mpi(min_size=2)
def test_ranks_may_differ_where_the_union_is_fetched():
    def weights_after(stage, **zero):
        engine = make(stage, stage3_max_reuse_distance=0, **zero)
        rank = engine.global_rank
        train(engine, [[(rank + step) % 4, step % 3][: 1 + (rank + step) % 2] for step in range(5)])
        tally = engine.parts.params.prefetcher.tally if stage == 3 else None
        engine.destroy()
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}, tally

    cut, tally = weights_after(3, divergent_modules="union")
    whole, _ = weights_after(0)
    same_bits(cut, whole)
    assert tally.served > 0
    assert tally.live_elements == 0


@pytest.mark.mpi(min_size=2)
def test_ranks_may_call_the_model_different_numbers_of_times():
    engine = make(divergent_modules="union")
    rank = engine.global_rank
    train(engine, [[0]])
    with torch.no_grad(), mpispeed.zero.uneven_forwards(engine):
        outputs = [run(engine, torch.ones(2, 8), [step % 4]) for step in range(2 + 3 * rank)]
    train(engine, [[1]])  # nobody is out of step afterwards
    first = torch.stack(outputs[:2])
    everyone = engine.mesh.world.comm.gather_objects(first.tolist())
    assert all(values == everyone[0] for values in everyone)
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_uneven_calls_are_refused_where_ranks_must_be_alike():
    engine = make()
    with pytest.raises(UsageError, match="divergent_modules"), mpispeed.zero.uneven_forwards(engine):
        pass
    engine.destroy()
