"""Functions of `deepspeed.runtime.utils`."""

import torch

from mpispeed.compat.runtime_utils import move_to_device


def test_move_to_device_moves_all_tensors_or_the_chosen():
    batch = {"x": torch.ones(2), "rest": [torch.zeros(1, dtype=torch.int64), "text"]}
    moved = move_to_device(batch, "meta")
    assert (moved["x"].device.type, moved["rest"][0].device.type, moved["rest"][1]) == ("meta", "meta", "text")
    chosen = move_to_device(batch, torch.device("meta"), torch.is_floating_point)
    assert (chosen["x"].device.type, chosen["rest"][0].device.type) == ("meta", "cpu")
    assert batch["x"].device.type == "cpu"
