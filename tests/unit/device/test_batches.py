"""Batches of a loader on a device: copied when they are wanted, or ahead on a stream of the loader's own."""

import pytest
import torch
from torch.utils.data import Dataset

from mpispeed.data import ShardedLoader
from mpispeed.data.prefetch import DeviceCopies
from tests.helpers.device import stand_in


class Rows(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {
            "x": torch.arange(3) + index,
            "half": torch.full((2,), index / 4, dtype=torch.bfloat16),
            "name": str(index),
        }


WAYS = [{"prefetch": 0}, {"prefetch": 3}, {"workers": 2}, {"workers": 1, "prefetch": 0}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_batches_are_on_the_device_with_the_same_values(way):
    device = stand_in()
    plain = ShardedLoader(Rows(), micro_batch=4, rank=0, size=1)
    loader = ShardedLoader(Rows(), micro_batch=4, rank=0, size=1, device=device, **way)
    found = list(loader)
    assert len(found) == 5
    for batch, expected in zip(found, plain, strict=True):
        assert (batch["x"].device, batch["half"].device) == (device, device)
        assert torch.equal(batch["x"].cpu(), expected["x"])
        assert torch.equal(batch["half"].cpu(), expected["half"])
        assert batch["name"] == expected["name"]


def test_what_moves_itself_moves_when_it_is_used():
    class Packed:
        def __init__(self, x):
            self.x = x

        def to(self, device):
            return Packed(self.x.to(device))

    device = stand_in()
    copies = DeviceCopies(device, pins=False)
    sent = copies.send([torch.ones(2), Packed(torch.ones(3))])
    assert (sent.batch[0].device, sent.batch[1].x.device) == (device, torch.device("cpu"))
    plain, packed = copies.receive(sent)
    assert (plain.device, packed.x.device) == (device, device)
