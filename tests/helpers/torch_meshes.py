"""Programs of torch over meshes of ranks: FSDP, tensors in parts, pipelines, checkpoints; as in `torch_clients`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.helpers.torch_clients import WIDTH, Block, Found, Net, data, sgd, train, weights


def line() -> DeviceMesh:
    """All ranks in one dim."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))


def plane() -> DeviceMesh:
    """Two dims, the first of 2 ranks if their number is even, else of one."""
    size = dist.get_world_size()
    rows = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("rows", "columns"))


# -- FSDP ------------------------------------------------------------------------------------------------------


def fsdp(mesh: DeviceMesh | None = None, **settings: Any) -> Found:
    """Parameters cut over the ranks, collected per module."""
    model = Net()
    mesh = mesh or line()
    fully_shard(model.block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return train(model, sgd(model), clip=0.5) | weights(model)


def fsdp_mixed() -> Found:
    """Compute in bf16, sums in fp32."""
    return fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def fsdp_half_sums() -> Found:
    """Compute and sums in bf16."""
    return fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))


def fsdp_tensor_parallel() -> Found:
    """FSDP over one dim of the mesh, layers cut by column and row over the other."""
    mesh, model = plane(), Net()
    parallelize_module(model.block, mesh["columns"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["rows"])
    return train(model, sgd(model), is_same=True) | weights(model)


# -- tensors in parts ------------------------------------------------------------------------------------------


def dtensor() -> Found:
    """Cuts that do not come out even, every change of placement, products of parts."""
    mesh, found = line(), {}
    whole = torch.arange(7 * 5, dtype=torch.float32).view(7, 5) / 3
    x = distribute_tensor(whole, mesh, [Shard(0)])
    found["other dim"] = x.redistribute(mesh, [Shard(1)]).to_local()
    found["whole"] = x.full_tensor()
    found["product"] = (x @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])).full_tensor()
    found["inner"] = torch.mm(x.redistribute(mesh, [Shard(1)]), x.t().redistribute(mesh, [Shard(0)])).full_tensor()
    part = DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()])
    found["sum"] = part.redistribute(mesh, [Shard(0)]).to_local()
    found["all"] = part.full_tensor()
    found["mean"], found["largest"] = x.mean().full_tensor(), x.max().full_tensor()
    found["two dims"] = distribute_tensor(whole, plane(), [Shard(0), Shard(1)]).full_tensor()
    return {name: tensor.clone() for name, tensor in found.items()}


def tensor_parallel() -> Found:
    """Layers of a block cut by column and row."""
    model = parallelize_module(Net(), line(), {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()})
    return train(model, sgd(model), is_same=True) | weights(model)


class Tokens(nn.Module):
    """Embedding, a block over sequences, and logits; all sizes divide by 2, 3 and 4."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.embed = nn.Embedding(24, 12)
            self.norm = nn.LayerNorm(12)
            self.block = Block(12)
            self.head = nn.Linear(12, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.norm(self.embed(tokens))))


def sequence_parallel() -> Found:
    """Norms over parts of the sequence, the vocabulary and the loss cut over the ranks."""
    mesh, model = line(), Tokens()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "block": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),)),
        "block.norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    optimizer, losses = sgd(model), []
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        tokens = torch.randint(24, (2, 13), generator=generator)
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(tokens[:, :12]).flatten(0, 1), tokens[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().detach())
    return {"losses": torch.stack(losses)} | weights(model)


# -- pipelines -------------------------------------------------------------------------------------------------

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
PIPELINES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS",
             "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")  # fmt: skip


def _stage(index: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20 + index)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(WIDTH))


def _stage_indices(name: str) -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    if name in PIPELINES[:2]:
        return [rank]
    return [rank, 2 * size - 1 - rank] if "ZBV" in name else [rank, rank + size]


def pipeline(name: str) -> Found:
    """A chain of modules, one or two per rank, under one schedule of torch's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    indices = _stage_indices(name)
    count, micro = size * len(indices), 2 * size
    modules = [_stage(index) for index in indices]
    stages = [PipelineStage(m, i, count, torch.device("cpu")) for m, i in zip(modules, indices, strict=True)]
    kind = getattr(schedules, name)
    schedule = kind(stages[0] if len(stages) == 1 else stages, micro, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([param for module in modules for param in module.parameters()], lr=0.1)
    is_last, losses = count - 1 in indices, []
    for x, _ in data(2, 2 * micro, is_same=True):
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        target = {"target": x.roll(1, -1), "losses": found} if is_last else {}
        schedule.step(*([x] if rank == 0 else []), **target)
        optimizer.step()
        losses += [loss.detach() for loss in found]
    state = {}
    for index, module in zip(indices, modules, strict=True):
        state |= {f"{index} {name}": x for name, x in weights(module).items()}
    return state | ({"losses": torch.stack(losses)} if losses else {})


# -- checkpoints -----------------------------------------------------------------------------------------------


@contextmanager
def _folder() -> Iterator[Path]:
    """One folder for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        told = [own]
        dist.broadcast_object_list(told, 0)
        yield Path(told[0])
        dist.barrier()


def _values(model: nn.Module) -> Found:
    values = ((name, getattr(x, "full_tensor", lambda x=x: x)()) for name, x in model.state_dict().items())
    return {name: x.clone() for name, x in values}


def checkpoint() -> Found:
    """Save model and optimizer of one mesh, load into another and into fewer ranks; each gives the same values."""
    model = Net()
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = train(model, optimizer)
    with _folder() as folder:
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
        trained = _values(model)
        other = Net(seed=9)
        fully_shard(other, mesh=plane() if dist.get_world_size() % 2 == 0 else line())
        adam = torch.optim.Adam(other.parameters(), lr=0.01)
        wanted = dict(zip(("model", "optimizer"), get_state_dict(other, adam), strict=True))
        dcp.load(wanted, checkpoint_id=folder)
        set_state_dict(other, adam, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
        found |= {f"loaded {name}": x for name, x in _values(other).items()}
        found |= {f"after {name}": x for name, x in train(other, adam).items()}
        fewer = _load_on_fewer(folder)
    for kind, values in (("loaded ", found), ("", fewer)):
        for name, x in trained.items():
            if fewer or kind:
                assert torch.equal(x, values[f"{kind}{name}"]), name
    return found


def _load_on_fewer(folder: Path) -> Found:
    ranks = list(range(max(1, dist.get_world_size() - 1)))
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return {}
    model = Net(seed=10)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    wanted = {"model": model.state_dict()}
    dcp.load(wanted, checkpoint_id=folder, process_group=group)
    return _values(model)


MESHES: dict[str, Callable[[], Found]] = {
    "fsdp": fsdp,
    "fsdp keeps": lambda: fsdp(reshard_after_forward=False),
    "fsdp mixed": fsdp_mixed,
    "fsdp half sums": fsdp_half_sums,
    "fsdp offload": lambda: fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp hybrid": lambda: fsdp(plane()),
    "fsdp tensor parallel": fsdp_tensor_parallel,
    "dtensor": dtensor,
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
    # In torch 2.6 Schedule1F1B hangs with gloo, to which the others are compared.
    **{f"pipeline {name}": lambda name=name: pipeline(name) for name in PIPELINES if VERSION >= (2, 7)},
    "checkpoint": checkpoint,
}
