"""A model with both kinds of layers of experts, its training by plain torch, and views of its engines."""

import torch
from torch import nn

from mpispeed.checkpoints import open_checkpoint
from mpispeed.moe import MoE
from mpispeed.nn.expert import RoutedExperts, Router, RouterOptions, SwiGLUExperts
from tests.helpers.experts import HIDDEN, Block
from tests.zoo.training import weights

BATCH, STEPS, LENGTH = 24, 3, 2
EXPERTS = 7  # on no number of ranks equally many
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "zero_allow_untested_optimizer": True}


class Net(nn.Module):
    """Both kinds of layers of experts, one behind the other; no two experts are alike."""

    def __init__(self, ep_size=1, bias_rate=0.0, experts=EXPERTS, *, fused=SwiGLUExperts, slices=False):
        super().__init__()
        torch.manual_seed(5)
        self.first = MoE(HIDDEN, Block(), num_experts=experts, k=2, drop_tokens=False, use_residual=True,
                         enable_expert_tensor_parallelism=slices, top2_2nd_expert_sampling=False)  # fmt: skip
        gate = Router(HIDDEN, experts, RouterOptions(k=2, bias_rate=bias_rate))
        self.second = RoutedExperts(gate, fused(HIDDEN, 5, experts), slices_experts=slices)
        with torch.no_grad():
            for param in self.first.deepspeed_moe.experts.parameters():
                param.add_(0.2 * torch.randn(param.shape))
        if ep_size > 1:
            self.first.ep_size = self.first.deepspeed_moe.ep_size = self.second.ep_size = ep_size

    def forward(self, x, y):
        hidden, _, _ = self.first(x)  # its balance loss would be one of each rank's tokens
        return (self.second(hidden)[0] - y).square().mean()


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, BATCH, LENGTH, HIDDEN, generator=generator) for _ in range(STEPS)]


def reference(clip=0.0, **options):
    """Weights and norms of plain torch in one process."""
    model, norms = Net(**options), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, y in data():
        model(x, y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def group_sizes(comm):
    return [size for size in range(1, comm.size + 1) if comm.size % size == 0]


def whole_of(engine, comm):
    """Weights of all experts by their names in a model with all of them, on all ranks; and buffers."""
    own = weights(engine) | dict(engine.module.named_buffers())
    held = engine.module.second.experts.held
    rows = comm.gather_objects((held.start, own))
    found = {}
    for _, values in sorted(rows, key=lambda row: row[0]):
        for name, value in values.items():
            if not name.startswith("second.experts."):
                found.setdefault(name, value)
    size = engine.module.second.comm.size if engine.module.second.comm else 1
    for name in (name for name in own if name.startswith("second.experts.")):
        found[name] = torch.cat([values[name] for _, values in rows[:size]])
    return found


def same_tensors(one, two):
    """True if all tensors, slots of the optimizer too, are equal to the bit."""
    a, b = (open_checkpoint(path.parent, path.name) for path in (one, two))
    rows = [(name, slot) for name in a.names() for slot in a.slots(name)]
    assert rows == [(name, slot) for name in b.names() for slot in b.slots(name)]
    return all(torch.equal(a.read_whole(*row), b.read_whole(*row)) for row in rows)
