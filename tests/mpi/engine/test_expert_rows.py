"""Exchange of rows under an engine: levels follow the nodes, and `mpispeed plan` says what is sent."""

import pytest
import torch
from torch import nn

from mpispeed.config import load
from mpispeed.engine.estimate.feasibility import Setup, examine
from mpispeed.nn.expert import RoutedExperts, Router, RouterOptions, SwiGLUExperts
from tests.helpers.experts import HIDDEN
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)

LENGTH, EXPERTS = 6, 12
BATCH = 24
NODE = "MPISPEED_RANKS_PER_NODE"


class Net(nn.Module):
    """Two layers of experts: all choices travel, and half of them."""

    def __init__(self, ep_size, **options):
        super().__init__()
        torch.manual_seed(3)
        more = ({}, {"capacity_factor": 0.5, "min_capacity": 1})
        gates = [Router(HIDDEN, EXPERTS, RouterOptions(k=2, **options, **each)) for each in more]
        experts = [SwiGLUExperts(HIDDEN, 5, EXPERTS) for _ in more]
        self.layers = nn.ModuleList(map(RoutedExperts, gates, experts))
        for layer in self.layers:
            layer.ep_size = ep_size

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)[0]
        return (x - y).square().mean()


def trained(settings, model, steps=1):
    """An engine after some steps, and the bytes of its exchanges in the last one by axes."""
    engine = start(settings, model)
    trace = engine.mpispeed.parts.mesh.comm_trace
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        trace.reset()
        batch = torch.randn(2, BATCH, LENGTH, HIDDEN, generator=generator).unbind()
        for micro in range(engine.gradient_accumulation_steps()):
            x, y = own_part(engine, batch, micro)
            engine.backward(engine(x.requires_grad_(), y))
            engine.step()
    return engine, {axes: entry.bytes for (verb, axes), entry in trace.entries().items() if verb == "all_to_all"}


def planned(settings, comm, ep_size, nodes=1):
    """Bytes of exchanges in a step by axes, as predicted."""
    setup = Setup(load(settings).config, comm.size, nodes, sequence_length=LENGTH)
    _, [one] = examine(setup, Net(ep_size, force_balance=True))
    found = {}
    for row in one.budget.sent:
        if row.verb == "all_to_all":
            found[row.axes] = found.get(row.axes, 0) + row.bytes
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_plan_says_what_is_sent(comm, accumulation):
    settings = config(2, BATCH, accumulation, **ADAM)
    engine, sent = trained(settings, Net(comm.size, force_balance=True))
    engine.destroy()
    assert planned(settings, comm, comm.size) == sent
    tokens, row = BATCH * LENGTH // comm.size // accumulation, HIDDEN * 4
    kept = (2 * tokens, EXPERTS * (-(-tokens // EXPERTS)))  # capacity 0.5 of two choices
    rows = sum(2 * count * row * (comm.size - 1) // comm.size for count in kept)
    counts = len(kept) * (comm.size - 1) * (EXPERTS // comm.size + 1) * 8
    assert sum(sent.values()) == accumulation * (2 * rows + counts)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("zero", [0, 3])
def test_rows_travel_inside_of_nodes_first(comm, monkeypatch, zero):
    found = []
    for ranks_per_node in ("4", "2", "1"):
        monkeypatch.setenv(NODE, ranks_per_node)
        settings = config(zero, BATCH, 2, reduction="ordered", **ADAM)
        engine, sent = trained(settings, Net(4), steps=2)
        found.append(weights(engine))
        engine.destroy()
        assert len(sent) == (2 if ranks_per_node == "2" else 1)
        if ranks_per_node == "2":
            engine, sent = trained(settings, Net(4, force_balance=True))
            engine.destroy()
            assert planned(settings, comm, 4, nodes=2) == sent
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


@pytest.mark.ranks(4)
def test_groups_that_do_not_fill_nodes_have_one_level(comm, monkeypatch):
    monkeypatch.setenv(NODE, "3")
    engine, sent = trained(config(1, BATCH, 1, **ADAM), Net(4))
    engine.destroy()
    assert len(sent) == 1
