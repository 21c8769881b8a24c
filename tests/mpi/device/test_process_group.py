"""Calls of torch.distributed on tensors of a device: those that are waited for come behind those that were started."""

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(2, 3)]


def test_waited_calls_come_behind_started_ones(world, device):
    size, rank = world.size, world.rank
    group = dist.new_group()  # the default group is there, as the fixture has called init_distributed
    module = torch.get_device_module(device)
    stream = module.Stream(device=device)  # not the one that a thread has from the beginning
    with module.stream(stream):
        for turn in range(5):
            x = torch.ones(1003).to(device, non_blocking=True)
            x.mul_(2)
            started = [dist.all_reduce(x, group=group, async_op=True) for _ in range(2)]
            dist.all_reduce(x, group=group)
            x.add_(1)
            places = [torch.zeros(1003, device=device) for _ in range(size)] if rank == turn % size else None
            dist.gather(x, places, turn % size, group=group)
            found = x if places is None else torch.stack(places)
            stream.synchronize()
            assert found.cpu().eq(2 * size**3 + 1).all()
            for work in started:
                work.wait()
    dist.destroy_process_group(group)
