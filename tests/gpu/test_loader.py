"""Batches that travel to a GPU ahead of their use, out of page-locked memory and beside its work."""

import pytest
import torch
from torch.utils.data import Dataset

from mpispeed.data import ShardedLoader


class Rows(Dataset):
    """Large enough that a copy takes longer than to ask for it."""

    def __len__(self):
        return 64

    def read_batch(self, indices):
        return {"x": torch.tensor(indices, dtype=torch.float32)[:, None].expand(-1, 1 << 18).contiguous(), "n": indices}

    def __getitem__(self, index):
        return self.read_batch([index])


WAYS = [{"prefetch": 0}, {"prefetch": 3}, {"workers": 2, "prefetch": 4}, {"prefetch": 3, "pin_memory": False}]


def loader_of(device, way):
    return ShardedLoader(Rows(), micro_batch=4, rank=0, size=1, device=device, **way)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_batches_arrive_whole_though_their_memory_is_used_again(device, way):
    """Work that is queued on a batch reads it before a later copy may take its place."""
    sums, expected = [], []
    weight = torch.randn(2048, 2048, device=device)
    for batch in loader_of(device, way):
        assert batch["x"].device == device
        for _ in range(20):
            weight = torch.tanh(weight @ weight)  # the device is behind the host
        sums.append(batch["x"].double().sum())
        expected.append(sum(batch["n"]) * float(1 << 18))
        del batch
    assert len(sums) == 16
    assert [float(one) for one in sums] == expected


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # said once in a process
@pytest.mark.parametrize("way", [{"prefetch": 3}, {"workers": 2}], ids=str)
def test_the_host_does_not_wait_for_the_device(device, way):
    batches = iter(loader_of(device, way))
    next(batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            next(batches)
    finally:  # of the whole process
        torch.cuda.set_sync_debug_mode("default")
    batches.close()


def test_pinned_batches_stay_on_the_host_where_they_belong(device):
    loader = ShardedLoader(Rows(), micro_batch=4, rank=0, size=1, pin_memory=True, workers=1)
    assert all(batch["x"].is_pinned() for batch in loader)
