"""Runs of slots: which rank has a slot does not matter, and each part of that is missed when it is taken out.

At stages 0 and 1 each rank has a run of slots, at 2 and 3 ranks take turns; so two stages on the same ranks are also
two ways to deal out slots.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.data import EpochOrder
from mpispeed.engine.slot_streams import SlotStreams
from mpispeed.sharding.slot_sums import SlotSums
from tests.zoo.models import built
from tests.zoo.training import config, weights

SLOTS, MICRO, WIDTH = 12, 2, 12
LONG = 40_000  # a sum that torch cuts among threads


class Drops(nn.Module):
    """Dropout of torch, noise of numpy and Python, and a long sum; returns the mean square."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(WIDTH, 24), nn.Linear(24, 3), nn.Dropout(0.1)
        self.register_buffer("long", torch.linspace(-1.0, 1.3, LONG), persistent=False)

    def forward(self, x):
        noise = 1.0 + 0.01 * (random.random() + float(np.random.rand()))
        y = self.last(self.drop(torch.tanh(self.first(x))))
        return (y * noise).square().mean() + (self.long * y.mean()).sum() / LONG


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def settings(stage):
    made = config(stage, SLOTS * MICRO, gradient_clipping=0.05, reduction="invariant", steps_per_print=None)
    made["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-3}}
    return made | {"train_micro_batch_size_per_gpu": MICRO}


def trained(comm, stage, *, is_mean_of_ranks=False):
    """Losses and weights after 2 steps; all ranks draw other numbers outside of slots."""
    torch.manual_seed(comm.rank)
    engine, _, loader, _ = mpispeed.initialize(model=built(Drops), config=settings(stage), training_data=Rows())
    if is_mean_of_ranks:
        engine.mpispeed.updates.slot_losses = None
    feed, losses = iter(mpispeed.RepeatingLoader(loader)), []
    for _ in range(2):
        loss = torch.tensor(engine.train_batch(feed), dtype=torch.float64)
        if is_mean_of_ranks:
            comm.all_reduce(loss, "avg")
        losses.append(float(loss).hex())
    found = weights(engine)
    engine.destroy()
    return losses, {name: value.view(torch.int32).tolist() for name, value in found.items()}


@pytest.fixture
def expected(comm):
    return trained(comm, 1)


@pytest.mark.ranks(1, 2, 3)
def test_slots_are_the_same_whoever_computes_them(comm, expected):
    for stage in (0, 2, 3):
        assert trained(comm, stage) == expected


@pytest.mark.ranks(2, 3)
def test_orders_of_samples_are_missed(comm, monkeypatch, expected):
    made = EpochOrder.__init__
    monkeypatch.setattr(
        EpochOrder, "__init__", lambda self, *args, **more: made(self, *args, **more | {"slot_of": None})
    )
    assert trained(comm, 1) != expected


@pytest.mark.ranks(2, 3)
def test_seeds_are_missed(comm, monkeypatch, expected):
    def unseeded(self, update, micro_step, chunk=0):
        return self._slots().slot(comm.rank, micro_step)

    monkeypatch.setattr(SlotStreams, "begin", unseeded)
    one, two = trained(comm, 1), trained(comm, 2)
    assert one != two
    assert expected not in (one, two)


@pytest.mark.ranks(1, 2)
def test_threads_are_missed(comm, monkeypatch, expected):
    before, fix = torch.get_num_threads(), torch.set_num_threads
    try:
        fix(3)
        assert trained(comm, 1) == expected
        assert torch.get_num_threads() == 3
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        assert trained(comm, 1) != expected
    finally:
        fix(before)


@pytest.mark.ranks(1, 3)
def test_undivided_sums_are_missed(comm, monkeypatch, expected):
    made, add = SlotSums.__init__, SlotSums._add

    def divides_first(self, unit, growing, bucket):
        add(self, unit, growing, bucket.mul_(1 / SLOTS))

    monkeypatch.setattr(SlotSums, "_add", divides_first)
    monkeypatch.setattr(SlotSums, "__init__", lambda self, a, b, _, c, **more: made(self, a, b, 1.0, c, **more))
    losses, found = trained(comm, 1)
    assert losses[0] == expected[0][0]
    assert found != expected[1]


@pytest.mark.ranks(2, 3)
def test_sums_in_the_order_of_slots_are_missed(comm, monkeypatch, expected):
    of = SlotSums.__init__

    def by_rank(self, shards, channel, scale, leaves_of, **more):
        """The leaves of the first rank are those of the last."""

        def turned(axes):
            leaves = leaves_of(axes)
            return type(leaves)(leaves.of[::-1])

        of(self, shards, channel, scale, turned, **more)

    monkeypatch.setattr(SlotSums, "__init__", by_rank)
    assert trained(comm, 1)[1] != expected[1]


@pytest.mark.ranks(2)  # of 6 micro-batches each: means of a power of two are exact
def test_losses_of_slots_are_missed(comm, expected):
    ranks = [trained(comm, stage, is_mean_of_ranks=True) for stage in (1, 2)]
    assert [found for _, found in ranks] == [expected[1]] * 2
    assert expected[0] not in [losses for losses, _ in ranks]
