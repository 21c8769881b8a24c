"""NCCL that torch has loaded: its header, one rank on a GPU, and two ranks that share one, which it does not join."""

import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh import sim, solo_comm
from mpispeed.mesh.backends import nccl, nccl_comm
from mpispeed.mesh.backends.nccl_library import library_for, mapped_file
from tests.helpers import nccl_header


def test_bindings_are_those_of_the_header():
    assert nccl_header.differences(nccl_header.header().read_text()) == []


def test_it_is_the_library_of_torch(device):
    library = library_for(device)
    assert library.path == mapped_file("libnccl")
    assert torch.cuda.nccl.version()[:2] == (library.version // 10000, library.version // 100 % 100)


@pytest.fixture
def path(device):
    made = nccl.open_path(solo_comm(), device)
    yield made
    made.close()
    assert not nccl_comm._everyone()


def test_one_rank(device, path):
    """Each call by its address, behind a long kernel, so that another stream than the caller's would show."""
    x = torch.randn(100_003)
    torch.cuda._sleep(20_000_000)
    on_device = x.to(device, non_blocking=True)
    out = torch.zeros_like(on_device)
    path.all_gather(out, on_device)
    assert torch.equal(out.cpu(), x)
    torch.cuda._sleep(20_000_000)
    on_device.mul_(2)
    path.library_all_reduce(on_device, "sum")
    path.broadcast(on_device, 0)
    path.library_reduce_scatter(out, on_device, "max")
    path.all_to_all(on_device, out)
    assert torch.equal(on_device.cpu(), 2 * x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        on_device.add_(1)
        path.all_gather(out, on_device)
        assert torch.equal(out.cpu(), 2 * x + 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8):
        part = (x[:1003] * 10).clamp(0, 100).to(dtype)
        summed = part.to(device)
        path.library_all_reduce(summed, "sum")
        assert torch.equal(summed.cpu(), part)


def test_a_lane_to_itself_waits_for_nobody(device, path):
    """A message and its receipt in one group, as an exchange has them."""
    sent, got = torch.arange(1003.0, device=device), torch.zeros(1003, device=device)
    made = path._communicator
    with made.grouped("ncclSend and ncclRecv"):
        made.add("ncclSend", sent.data_ptr(), sent.nbytes, 1, 0, made.address, nccl_comm.raw_stream(device))
        made.add("ncclRecv", got.data_ptr(), got.nbytes, 1, 0, made.address, nccl_comm.raw_stream(device))
    assert torch.equal(got, sent)


def test_a_peer_that_does_not_come_is_an_error(device, monkeypatch):
    """The host waits by polling, and an aborted communicator leaves the device usable."""
    library = library_for(device)
    made = nccl_comm.Communicator(library, library.unique_id(), 2, 0, "a group", 2.0)
    with pytest.raises(CommError, match="waited 2 s in vain"):
        made.settle()
    made.abort("its peer has not come")
    assert torch.ones(3, device=device).sum().item() == 3.0


def test_ranks_that_share_a_gpu_are_refused(device):
    def main(world):
        with pytest.raises(CommError, match=r"NCCL cannot join .*: ranks 0 and 1 share"):
            nccl.open_path(world.comm, device, node="this")
        return True

    assert all(sim.run(2, main))
