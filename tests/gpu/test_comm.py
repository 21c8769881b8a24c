"""Verbs on tensors of a GPU, on one rank and between two ranks that share it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpispeed.launch import plan_launch
from mpispeed.mesh import sim, solo_comm
from mpispeed.mesh.collectives import device_collectives

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def noise(rank, count, dtype):
    return (torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rank_stays_on_the_device(device, dtype):
    comm, x = solo_comm(), noise(0, 1003, dtype)
    on_device, scale = x.to(device), 0.5 if dtype.is_floating_point else 1.0
    comm.all_reduce(x, scale=scale)
    comm.all_reduce(on_device, scale=scale)
    assert torch.equal(on_device.cpu(), x)
    out = torch.zeros(1003, dtype=dtype, device=device)
    comm.all_gather(out, on_device)
    assert torch.equal(out.cpu(), x)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stage_bytes", [1 << 14, device_collectives.WINDOW_BYTES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simulated_ranks(device, monkeypatch, size, stage_bytes, dtype):
    """Ranks as threads that share the GPU; copies are queued behind a long kernel, so that a missing wait shows."""
    monkeypatch.setattr(device_collectives, "WINDOW_BYTES", stage_bytes)
    count = 100_003

    def main(world):
        comm, rank = world.comm, world.rank
        expected, x = noise(rank, count, dtype), noise(rank, count, dtype).to(device)
        comm.all_reduce(expected)
        torch.cuda._sleep(20_000_000)
        work = comm.start_all_reduce(x)
        work.wait()
        x.add_(1)
        assert torch.equal(x.cpu(), expected + 1)
        full = noise(rank, count * size, dtype)
        shard, expected = torch.zeros(count, dtype=dtype, device=device), torch.zeros(count, dtype=dtype)
        comm.reduce_scatter(expected, full)
        torch.cuda._sleep(20_000_000)
        comm.reduce_scatter(shard, full.to(device, non_blocking=True))
        assert torch.equal(shard.cpu(), expected)
        out = torch.zeros(count * size, dtype=dtype, device=device)
        comm.all_gather(out, shard)
        assert torch.equal(out.view(size, -1)[rank].cpu(), expected)

    sim.run(size, main, reduction="ordered")


def test_two_ranks_share_the_gpu(device, tmp_path):
    """Over MPI, in processes of their own."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import torch\n"
        "from mpispeed.mesh import start\n"
        "comm = start('ordered').comm\n"
        "x = torch.full((5_000_001,), float(comm.rank + 1), device='cuda')\n"
        "for _ in range(3):\n"
        "    comm.all_reduce(x, 'avg')\n"
        "assert bool((x == 1.5).all()), x\n"
        "y = torch.empty(2, 1 << 22, device='cuda')\n"
        "comm.all_gather(y, x[: 1 << 22] + comm.rank)\n"
        "assert y[0, 0].item() == 1.5 and y[1, -1].item() == 2.5\n"
        "print('done', flush=True)\n"
    )
    plan = plan_launch([sys.executable, str(script)], 2)
    found = subprocess.run(
        plan.argv, env={**os.environ, **plan.added}, capture_output=True, text=True, timeout=300,
        check=False, cwd=ROOT,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("done") == 2


def test_two_ranks_map_each_others_memory_of_the_gpu(device, tmp_path):
    """Sums, gathers and messages through mapped windows and boxes, in processes of their own; again and again."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import torch\n"
        "from mpispeed.mesh import start\n"
        "from mpispeed.mesh.backends.mapped import open_mapped\n"
        "comm = start('ordered').comm\n"
        "group, other = comm.group, 1 - comm.rank\n"
        "group.device_path = path = open_mapped(group, torch.device('cuda', 0))\n"
        "assert not path.waits_on_host\n"
        "for turn in range(20):\n"
        "    for dtype in (torch.float32, torch.bfloat16, torch.int64):\n"
        "        own = (torch.arange(9_000_001) % 251 + comm.rank + turn).to(dtype)\n"
        "        expected, x = own.clone(), own.cuda()\n"
        "        comm.all_reduce(expected)\n"
        "        torch.cuda._sleep(5_000_000 * comm.rank)\n"
        "        comm.all_reduce(x)\n"
        "        assert torch.equal(x.cpu(), expected), (turn, dtype)\n"
        "    y = torch.full((1 << 20,), comm.rank + turn, device='cuda')\n"
        "    sent, got = path.post_send(y, other, 5), torch.empty_like(y)\n"
        "    path.recv(got, other, 5)\n"
        "    y.zero_()\n"
        "    assert bool((got == other + turn).all()), turn\n"
        "path.close()\n"
        "print('done', flush=True)\n"
    )
    plan = plan_launch([sys.executable, str(script)], 2)
    found = subprocess.run(
        plan.argv, env={**os.environ, **plan.added}, capture_output=True, text=True, timeout=300,
        check=False, cwd=ROOT,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("done") == 2
