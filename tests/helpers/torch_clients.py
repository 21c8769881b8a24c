"""Programs of torch's own distributed training, small and repeatable, for the default group whatever its backend is.

Each returns tensors by name: losses, and what it has trained. Two runs give the same bits if the group's sums do.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch uses its own torch.jit.script there
    from torch.distributed.optim import ZeroRedundancyOptimizer

Found = dict[str, torch.Tensor]

WIDTH, STEPS = 8, 3


class Net(nn.Module):
    """A residual block between two layers; `branch` names one of two last layers, the other gets no gradient."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(WIDTH, 24)
            self.block = Block(24)
            self.last = nn.Linear(24, 4)
            self.other = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor, branch: str = "") -> torch.Tensor:
        x = self.block(torch.tanh(self.first(x)))
        if branch:
            return self.other(x) if branch == "other" else self.last(x)
        return self.last(x) + 0.5 * self.other(x)


class Block(nn.Module):
    """Norm and two layers beside a residual path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def data(steps: int = STEPS, size: int = 4, *, is_same: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's inputs and targets of each step; of all ranks the same if asked for."""
    generator = torch.Generator().manual_seed(5 if is_same else 5 + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(size, WIDTH, generator=generator)
        yield x, torch.stack([x.sum(-1), x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3].abs()], -1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of most clients."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_same: bool = False, clip: float = 0.0) -> Found:
    """Plain training loop; returns losses, and norms where gradients are clipped."""
    losses, norms = [], []
    for x, y in data(is_same=is_same):
        loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | ({"norms": torch.stack(norms)} if norms else {})


def weights(model: nn.Module) -> Found:
    """Copies of this rank's parts of all parameters."""
    found = {name: getattr(param, "_local_tensor", param) for name, param in model.named_parameters()}
    return {name.replace("module.", ""): part.detach().clone() for name, part in found.items()}


# -- DistributedDataParallel -----------------------------------------------------------------------------------


def ddp(**settings: Any) -> Found:
    """Plain, with buckets so small that there are several."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.002, **settings)
    return train(model, sgd(model)) | weights(model)


def ddp_static_graph() -> Found:
    """Buckets that are made once, of views."""
    return ddp(static_graph=True, gradient_as_bucket_view=True)


def ddp_find_unused() -> Found:
    """Ranks use other parts of the model, and in other steps others."""
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer, losses = sgd(model), []
    for step, (x, y) in enumerate(data()):
        branch = "other" if (step + dist.get_rank()) % 2 else "last"
        loss = nn.functional.mse_loss(model(x, branch), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | weights(model)


def ddp_accumulation() -> Found:
    """Two micro-batches without exchange, one with."""
    model = DistributedDataParallel(Net())
    optimizer, losses = sgd(model), []
    for micro, (x, y) in enumerate(data(6)):
        is_last = micro % 3 == 2
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / 3
            loss.backward()
        losses.append(loss.detach())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": torch.stack(losses)} | weights(model)


def ddp_buffers() -> Found:
    """Batch norm, whose buffers rank 0 broadcasts before each step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))
    found = train(model, sgd(model)) | weights(model)
    return found | {f"buffer {name}": x.clone() for name, x in model.named_buffers()}


def ddp_join() -> Found:
    """Rank 0 has fewer batches than the others."""
    model = DistributedDataParallel(Net())
    optimizer, losses = sgd(model), []
    with Join([model]):
        for x, y in data(1 if dist.get_rank() == 0 else 3):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | weights(model)


def _own_hook(group, bucket):  # torch checks annotations, and those of this file are strings
    work = dist.all_reduce(bucket.buffer(), async_op=True, group=group)
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


HOOKS: dict[str, Callable[..., Any]] = {
    "all_reduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "fp16 around all_reduce": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "own": _own_hook,
}


def ddp_hook(name: str) -> Found:
    """Gradients through one of `HOOKS`."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
    model.register_comm_hook(None, HOOKS[name])
    return train(model, sgd(model)) | weights(model)


def ddp_power_sgd() -> Found:
    """Gradients of low rank; the hook chains futures of several collectives."""
    model = DistributedDataParallel(Net())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, sgd(model)) | weights(model)


def ddp_zero() -> Found:
    """ZeroRedundancyOptimizer; the state of all ranks is collected on rank 0."""
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=True)
    found = train(model, optimizer) | weights(model)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        states = optimizer.state_dict()["state"]
        found |= {f"moment {index}": state["exp_avg"].clone() for index, state in states.items()}
    return found


DDP: dict[str, Callable[[], Found]] = {
    "plain": ddp,
    "static graph": ddp_static_graph,
    "find unused": ddp_find_unused,
    "accumulation": ddp_accumulation,
    "buffers": ddp_buffers,
    "join": ddp_join,
    **{f"hook {name}": lambda name=name: ddp_hook(name) for name in HOOKS},
    "hook power sgd": ddp_power_sgd,
    "zero": ddp_zero,
}
