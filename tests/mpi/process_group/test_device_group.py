"""Tensors that another backend carries: gloo stands for a backend of accelerators, the CPU for one."""

import pytest
import torch
import torch.distributed as dist

from mpispeed.base.errors import CommError, ConfigError
from mpispeed.process_group.options import Options

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(2, 3)]


def make(torch_world, **options):
    ranks = list(range(torch_world.size))
    return dist.new_group(ranks, pg_options=Options(device="gloo", **options))


def test_chosen_tensors_travel_over_the_other_backend(torch_world):
    group = make(torch_world, device_types=("cpu",))
    x = torch.full((5,), float(torch_world.rank))
    dist.all_reduce(x, group=group)
    assert x.tolist() == [sum(range(torch_world.size))] * 5
    gathered = [torch.empty(1) for _ in range(torch_world.size)]
    dist.all_gather(gathered, torch.tensor([float(torch_world.rank)]), group=group)
    assert torch.cat(gathered).tolist() == list(range(torch_world.size))
    assert dist.get_backend(group._other) == "gloo"
    dist.barrier(group)  # has no tensor: over MPI


@pytest.mark.parametrize("options", [{"device_types": ("cpu",), "reduction": "ordered"}, {}])
def test_sums_in_a_fixed_order_and_tensors_of_the_host_stay_with_mpi(torch_world, options):
    group = make(torch_world, **options)
    x = torch.full((5,), float(torch_world.rank))
    dist.all_reduce(x, group=group)
    assert x.tolist() == [sum(range(torch_world.size))] * 5
    assert group._other is None


def test_options_that_cannot_be_are_refused(torch_world):
    with pytest.raises(ConfigError, match="reduction='fast' is unknown"):
        Options(reduction="fast")
    group = make(torch_world)
    dist.destroy_process_group(group)
    with pytest.raises(CommError, match="was destroyed"):
        group.barrier()
