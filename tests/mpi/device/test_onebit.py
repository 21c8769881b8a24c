"""The one-bit mean of values on a device: results, errors and traffic of the host, bit by bit."""

import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.onebit import OneBitErrors, compressed_all_reduce
from mpispeed.mesh.onebit_nodes import compressed_all_reduce_through, zero_errors


def noise(rank, count, dtype, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def same_errors(a, b):
    return torch.equal(a.worker.cpu(), b.worker.cpu()) and torch.equal(a.server.cpu(), b.server.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_means_are_those_of_the_host(comm, device, dtype):
    for count in (0, 1, 1000, 4096 * comm.size):
        errors, there = OneBitErrors.zeros(count, comm.size), OneBitErrors.zeros(count, comm.size, device)
        for seed in range(3):
            host = noise(comm.rank, count, dtype, seed)
            ours = host.to(device)
            comm.journal.reset()
            compressed_all_reduce(comm, host, errors)
            sent = comm.journal.total_bytes()
            comm.journal.reset()
            compressed_all_reduce(comm, ours, there)
            assert comm.journal.total_bytes() == sent
            assert torch.equal(ours.cpu(), host)
            assert same_errors(there, errors)


@pytest.mark.ranks(2, 4)
def test_means_through_nodes_are_those_of_the_host(comm, device):
    place, lane = divmod(comm.rank, 2)
    inner = comm.split(place, [2 * place, 2 * place + 1], ("inner",))
    outer = comm.split(lane, list(range(lane, comm.size, 2)), ("outer",))
    for count in (7, 1000, 4096):
        errors, there = (zero_errors(count, inner.size, outer.size, where) for where in (torch.device("cpu"), device))
        for seed in range(2):
            host = noise(comm.rank, count, torch.bfloat16, seed)
            ours = host.to(device)
            compressed_all_reduce_through(inner, outer, host, errors)
            compressed_all_reduce_through(inner, outer, ours, there)
            assert torch.equal(ours.cpu(), host)
            assert same_errors(there, errors)
    inner.close()
    outer.close()


@pytest.mark.ranks(1)
def test_errors_elsewhere_are_refused(comm, device):
    with pytest.raises(CommError, match=r"errors on cpu and cpu for values on .*; make them there"):
        compressed_all_reduce(comm, torch.zeros(8, device=device), OneBitErrors.zeros(8, 1))
