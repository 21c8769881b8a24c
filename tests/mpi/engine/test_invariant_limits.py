"""What runs of slots refuse while they train, and what they tell at a load."""

import logging

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import UsageError
from mpispeed.compat import groups
from tests.zoo.training import config, start

pytestmark = pytest.mark.ranks(1, 3)

SLOTS, MICRO = 12, 2


def settings(**more):
    made = config(1, SLOTS * MICRO, reduction="invariant", train_micro_batch_size_per_gpu=MICRO, steps_per_print=None)
    return made | {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}} | more


class Asks(nn.Module):
    """Calls a function in its forward pass."""

    def __init__(self, ask=lambda: None):
        super().__init__()
        self.inner, self.ask = nn.Linear(4, 1), ask

    def forward(self, x):
        self.ask()
        return self.inner(x).square().mean()


class Counts(Asks):
    """Changes a buffer, in the way of `change`."""

    def __init__(self, change, *, persistent=True):
        super().__init__(lambda: change(self.seen))
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)


def step(engine, batch=MICRO):
    for _ in engine.slots:
        engine.backward(engine(torch.ones(batch, 4)))
        engine.step()


@pytest.mark.parametrize("change", [lambda seen: seen.add_(1), lambda seen: seen.data.add_(1)])
def test_buffers_that_a_pass_changes_are_refused(change):
    engine = start(settings(), Counts(change))
    with pytest.raises(UsageError, match="the forward pass changes buffer 'seen'"):
        engine(torch.ones(MICRO, 4))
    engine.destroy()


def test_buffers_of_no_checkpoint_and_of_evaluations_may_change():
    engine = start(settings(), Counts(lambda seen: seen.add_(1), persistent=False))
    step(engine)
    assert engine.module.seen == len(engine.slots)
    engine.destroy()
    engine = start(settings(), Counts(lambda seen: seen.add_(1)))
    engine.eval()
    engine(torch.ones(MICRO, 4))
    engine.destroy()


def test_batch_norm_is_refused():
    engine = start(settings(), nn.Sequential(nn.BatchNorm1d(4), Asks()))
    with pytest.raises(UsageError, match="running statistics"):
        engine(torch.randn(MICRO, 4))
    engine.destroy()


@pytest.mark.parametrize("ask", [mpispeed.comm.get_rank, mpispeed.comm.get_local_rank, groups.get_data_parallel_rank])
def test_the_rank_is_not_told_in_a_pass(ask):
    engine = start(settings(), Asks(ask))
    with pytest.raises(UsageError, match=r"the model asks for .*rank.* in its forward pass"):
        engine(torch.ones(MICRO, 4))
    engine.eval()
    engine(torch.ones(MICRO, 4))
    ask()
    engine.destroy()


def test_engines_do_not_tell_it_either():
    model = Asks()
    engine = start(settings(), model)
    model.ask = lambda: engine.global_rank
    with pytest.raises(UsageError, match="in its forward pass"):
        engine(torch.ones(MICRO, 4))
    engine.destroy()


def test_another_run_and_other_conditions_are_told(comm, tmp_path_factory, caplog):
    folder = comm.share(str(tmp_path_factory.mktemp("conditions")), 0)
    engine = start(settings(), Asks())
    step(engine)
    engine.save_checkpoint(folder)
    engine.destroy()
    for more, wanted in (
        ({}, ()),
        ({"reproducibility": {"threads": 2}}, ("bits may part", "threads is '1' and '2'")),
        ({"train_batch_size": 2 * SLOTS * MICRO}, ("another run", "slots is '12' and '24'")),
        ({"seed": 7}, ("another run", "seed is '1234' and '7'")),
    ):
        caplog.clear()
        engine = start(settings(**more), Asks())
        with caplog.at_level(logging.WARNING):
            engine.load_checkpoint(folder)
        engine.destroy()
        told = [text for text in caplog.messages if 'reduction "invariant"' in text]
        assert len(told) == (1 if wanted and comm.rank == 0 else 0), told
        assert all(part in text for text in told for part in wanted)
