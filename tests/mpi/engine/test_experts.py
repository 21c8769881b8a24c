"""Layers of experts under an engine: all stages train them as plain torch does, and biases follow loads."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.moe import MoE
from mpispeed.nn.expert import RoutedExperts, Router, RouterOptions, SwiGLUExperts
from tests.helpers.covering import on_ranks
from tests.helpers.experts import HIDDEN, Block
from tests.helpers.tensor import assert_near
from tests.zoo.training import config, start, weights

pytestmark = pytest.mark.mpi(min_size=1)

BATCH, STEPS = 12, 4
LR = 0.01


class Net(nn.Module):
    """Both kinds of layers of experts, one behind the other."""

    def __init__(self, bias_rate=0.0, ep_size=1):
        super().__init__()
        torch.manual_seed(5)
        self.first = MoE(HIDDEN, Block(), num_experts=4, ep_size=ep_size, k=2, drop_tokens=False, use_residual=True,
                         top2_2nd_expert_sampling=False)  # fmt: skip
        gate = Router(HIDDEN, 4, RouterOptions(k=2, bias_rate=bias_rate))
        self.second = RoutedExperts(gate, SwiGLUExperts(HIDDEN, 5, 4), ep_size=ep_size)

    def forward(self, x, y):
        hidden, _, _ = self.first(x)  # its balance loss would be one of each rank's tokens
        return (self.second(hidden)[0] - y).square().mean()


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, BATCH, 3, HIDDEN, generator=generator) for _ in range(STEPS)]


def trained_plainly():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for x, y in data():
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def settings(stage, **more):
    return config(
        stage, BATCH, 1, optimizer={"type": "SGD", "params": {"lr": LR}}, zero_allow_untested_optimizer=True, **more
    )


def run(engine, comm):
    each = BATCH // comm.size
    for x, y in data():
        own = slice(comm.rank * each, (comm.rank + 1) * each)
        engine.backward(engine(x[own], y[own]))
        engine.step()


@pytest.mark.parametrize("stage", on_ranks([0, 1, 2, 3]))
def test_experts_on_every_rank_train_as_in_plain_torch(comm, stage):
    engine = start(settings(stage), Net())
    run(engine, comm)
    expected = trained_plainly()
    for name, value in weights(engine).items():
        assert_near(value, expected[name], 1e-5, name)
    engine.destroy()


def test_biases_move_once_for_each_update(comm):
    engine = start(settings(2), Net(bias_rate=0.125))
    gate = engine.module.second.gate
    each, before = BATCH // comm.size, gate.bias.clone()
    for x, y in data():
        own = slice(comm.rank * each, (comm.rank + 1) * each)
        engine.backward(engine(x[own], y[own]))
        load = gate._load.clone()
        comm.all_reduce(load)
        assert load.sum() == BATCH * 3 * 2
        engine.step()
        before = before + 0.125 * (load.double().mean() - load).sign()
        assert torch.equal(gate.bias, before.float())
        assert gate._load is None
    engine.destroy()


def test_experts_on_other_ranks_are_refused(comm):
    with pytest.raises(ConfigError, match=r"first\.deepspeed_moe shares its experts out over ep_size = 2 ranks"):
        start(settings(1), Net(ep_size=2))
