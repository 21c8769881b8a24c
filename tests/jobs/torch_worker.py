"""Plain torch under mpirun: `ports` counts listening sockets, `late` sleeps in a script of DDP, `fails` ends in one.

`forgets` leaves with an operation under way, `spawns` starts processes that meet by themselves.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpispeed.comm
import mpispeed.torch_backend

LISTENS = "0A"


def listening() -> int:
    """Number of sockets of this process that take connections."""
    own = {path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    count = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            count += words[3] == LISTENS and f"socket:[{words[9]}]" in own
    return count


def train(steps: int) -> float:
    """Loss after some steps of DDP."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.full((2, 16), 0.1 * step + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def ports(folder: Path) -> None:
    """Sockets after MPI has started, and after 20 steps."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    before = listening()
    dist.init_process_group("mpi4py")
    loss = train(20)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {dist.get_rank()}", str(loss))
    store.get(f"rank {(dist.get_rank() + 1) % dist.get_world_size()}")
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps([before, listening()]))
    dist.destroy_process_group()


def late(seconds: float) -> None:
    """Rank 1 sleeps before its backward pass, while the others sum gradients in theirs."""
    dist.init_process_group("mpi4py")
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    loss = model(torch.ones(2, 16)).square().mean()
    if dist.get_rank() == 1:
        time.sleep(seconds)  # at sleeps
    loss.backward()  # at waits
    dist.barrier()
    dist.destroy_process_group()


def fails(rank: int) -> None:
    """One rank fails between two verbs; its group was made by torch, which adds a hook of its own."""
    dist.init_process_group("mpi4py")
    dist.barrier()
    if dist.get_rank() == rank:
        message = "planted"
        raise ValueError(message)
    dist.all_reduce(torch.ones(3))


def forgets() -> None:
    """One rank starts what the others never come to, and all leave."""
    dist.init_process_group("mpi4py")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
        dist.irecv(torch.ones(3), 1)
        mpispeed.comm.irecv(torch.ones(3), 1)


def meets(number: int) -> None:
    """A process of `spawns`: its rank and their number come in the environment, as its place does."""
    os.environ["RANK"] = str(number)
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    os.write(1, f"child {dist.get_rank()} of {dist.get_world_size()}: {x.item():g}\n".encode())
    dist.destroy_process_group()


def spawns() -> None:
    """Each rank starts as many processes as there are ranks, which inherit the variables of its launcher."""
    dist.init_process_group("mpi4py")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.multiprocessing.spawn(meets, nprocs=dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    way, argument = sys.argv[1:3]
    if way == "ports":
        ports(Path(argument))
    elif way == "late":
        late(float(argument))
    elif way in ("forgets", "spawns"):
        {"forgets": forgets, "spawns": spawns}[way]()
    else:
        fails(int(argument))
