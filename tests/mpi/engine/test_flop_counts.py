"""Counted operations of engines: those of the plain model at every stage, and of all ranks together where it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mpispeed.flops.by_module import Counts, ModuleCounter
from mpispeed.nn.activation_checkpointing import checkpoint
from tests.helpers.pipes import Case, Layout, Plain, batch, train
from tests.zoo.models import Stack, built
from tests.zoo.training import ADAM, config, own_part, start

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 3, 4)]


class Model(Stack):
    """Blocks of which the middle one is recomputed, and a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        x = self.blocks[2](checkpoint(self.blocks[1], x))
        return self.last(x).float().square().mean()


def three(counts: Counts) -> tuple[int, int, int]:
    return counts.forward, counts.backward, counts.recompute


def by_path(counter: ModuleCounter) -> dict[str, tuple[Any, ...]]:
    assert not counter.unknown
    assert counter.outside == 0
    return {
        path: (*three(counts), counts.deepspeed_flops, counts.deepspeed_macs, counts.calls)
        for path, counts in counter.own.items()
    }


def summed(comm: Any, counts: Counts) -> tuple[int, ...]:
    total = torch.tensor(three(counts))
    comm.all_reduce(total)
    return tuple(total.tolist())


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("stage", "dtype", "more"),
    [
        (0, "fp16", {}),
        (2, "bf16", {"offload_optimizer": CPU}),
        (3, "fp32", {}),
        (3, "bf16", {"offload_param": CPU, "offload_optimizer": CPU}),
    ],
)
def test_an_engine_counts_as_the_plain_model(comm, stage, more, dtype):
    settings = config(stage, 4 * comm.size, 2, dtype=dtype, zero=more, **ADAM)
    engine, plain = start(settings, built(Model)), built(Model)
    counter, expected = ModuleCounter(engine.module), ModuleCounter(plain)
    x = torch.randn(4 * comm.size, 6, generator=torch.Generator().manual_seed(1))
    x = x.to(next(engine.module.parameters()).dtype)
    counter.start()
    for micro in range(2):
        engine.backward(engine(*own_part(engine, x, micro)))
        engine.step()
    counter.stop()
    plain.to(x.dtype)
    expected.start()
    for micro in range(2):
        plain(*own_part(engine, x, micro)).backward()
    expected.stop()
    assert by_path(counter) == by_path(expected)
    assert counter.total("blocks.1").recompute > 0
    assert 0 < counter.own["first"].seconds < counter.total().seconds
    engine.destroy()


@pytest.mark.ranks(1, 2, 4)
def test_slices_together_count_as_the_plain_model(comm):
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    policy = {"autotp_size": comm.size, "injection_policy_tuple": {"0": "column", "2": "row"}}
    engine = start(config(1, 12, tensor_parallel=policy, **ADAM), nn.Sequential(*plain))
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    counter, expected = ModuleCounter(engine.module), ModuleCounter(plain)
    expected.start()
    plain(x).sum().backward()
    expected.stop()
    counter.start()
    engine.backward(engine(x).sum())
    counter.stop()
    assert summed(comm, counter.total()) == three(expected.total())
    engine.step()
    engine.destroy()


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 1), ("zb-h1", 0)])
def test_stages_together_count_as_the_plain_model(comm, schedule, stage):
    stages = 3 if comm.size == 3 else min(comm.size, 2)
    engine = Case(Layout(stages, 1, comm.size // stages), schedule, stage).engine()
    plain = Plain(is_tied=False)
    counter, expected = ModuleCounter(engine.module), ModuleCounter(plain)
    counter.start()
    train(engine, [0])
    counter.stop()
    expected.start()
    plain(*batch(0)).backward()
    expected.stop()
    assert not counter.unknown
    assert summed(comm, counter.total()) == three(expected.total())
    engine.destroy()


def test_a_tied_head_counts_although_it_is_a_function(comm):
    stages = 3 if comm.size == 3 else min(comm.size, 2)
    profile = {"flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False}}
    engine = Case(Layout(stages, 1, comm.size // stages), is_tied=True).engine(**profile)
    train(engine, [0, 1])
    totals = engine.flops_profiler.facts.totals
    engine.destroy()
    plain = Plain(is_tied=True)
    expected = ModuleCounter(plain)
    expected.start()
    plain(*batch(1)).backward()
    expected.stop()
    assert (totals.forward, totals.backward, totals.recompute) == three(expected.total())
    assert totals.macs == expected.total().deepspeed_macs
