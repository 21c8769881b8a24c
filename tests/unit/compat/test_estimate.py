"""The published estimates: golden tables of DeepSpeed's documentation, formulas, and how parameters are counted."""

import pytest
import torch
from torch import nn

from mpispeed.compat import estimate
from mpispeed.sharding import sharded_param
from tests.zoo.models import TinyLM

HEAD = "Estimated memory needed for params, optim states and gradients for a:\n"
ZERO2 = (
    HEAD
    + """HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.45GB |   5.31GB | offload_optimizer=cpu\x20
  127.45GB |  15.93GB | offload_optimizer=none
"""
)
ZERO3 = (
    HEAD
    + """HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0
"""
)


def test_published_tables(capsys):
    estimate.estimate_zero2_model_states_mem_needs_all_cold(total_params=2851e6, num_gpus_per_node=8, num_nodes=1)
    assert capsys.readouterr().out == ZERO2
    estimate.estimate_zero3_model_states_mem_needs_all_cold(
        total_params=2851e6, largest_layer_params=32e6, num_gpus_per_node=8, num_nodes=1
    )
    assert capsys.readouterr().out == ZERO3


def test_tables_go_where_they_are_sent(capsys):
    taken = []
    estimate.estimate_zero2_model_states_mem_needs_all_cold(2851e6, 8, write=taken.append)
    estimate.estimate_zero3_model_states_mem_needs_all_cold(2851e6, 32e6, 8, write=taken.append)
    assert "".join(taken) == ZERO2 + ZERO3
    assert capsys.readouterr().out == ""


def test_a_live_model_gives_the_table_of_its_counts():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5000, 3000), nn.Linear(3000, 700, bias=False), nn.LayerNorm(700))
    total, largest = 5000 * 3000 + 3000 + 3000 * 700 + 1400, 5000 * 3000 + 3000
    assert estimate.count_params(model) == (total, largest)
    live, cold = [], []
    estimate.estimate_zero2_model_states_mem_needs_all_live(model, 4, 2, write=live.append)
    estimate.estimate_zero2_model_states_mem_needs_all_cold(total, 4, 2, write=cold.append)
    estimate.estimate_zero3_model_states_mem_needs_all_live(model, 4, 2, 1.0, write=live.append)
    estimate.estimate_zero3_model_states_mem_needs_all_cold(total, largest, 4, 2, 1.0, write=cold.append)
    assert live == cold
    assert "2 nodes, 4 GPUs per node" in live[0]
    assert "17M total params, 15M largest layer params." in live[1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_is_shared_counts_once(device):
    free = estimate.count_params(TinyLM(is_tied=False).to(device))[0]
    with torch.device(device):
        tied = TinyLM(is_tied=True)
    assert free - estimate.count_params(tied)[0] == tied.embed.weight.numel()


def test_views_of_one_storage_count_once():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = nn.Parameter(first.weight.data)  # another object on the same memory
    assert estimate.count_params(nn.Sequential(first, second)) == (64, 64)


def test_a_model_without_parameters_needs_nothing():
    assert estimate.count_params(nn.Sequential(nn.ReLU())) == (0, 0)
    assert all(need.cpu == need.gpu == 0 for need in estimate.zero3_needs(0, 0, 8))


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (8, 1), (4, 16)])
def test_formulas(gpus, nodes):
    psi, layer, f, n = 7_000_003, 1_000_001, 1.25, gpus * nodes
    offloaded, resident = estimate.zero2_needs(psi, gpus, nodes, f)
    assert (offloaded.cpu, offloaded.gpu) == (int(psi * max(4 * gpus, 16) * f), 2 * psi)
    assert (resident.cpu, resident.gpu) == (int(psi * 4 * gpus * f), 4 * psi + 16 * psi // n)
    rows = [(row.cpu, row.gpu) for row in estimate.zero3_needs(psi, layer, gpus, nodes, f)]
    most = 4 * layer
    assert rows == [
        (int(18 * psi / nodes * f), most),
        (int(max(4 * gpus * psi, 18 * psi / nodes) * f), most),
        (int(16 * psi / nodes * f), most + 2 * psi // n),
        (int(max(4 * gpus * psi, 16 * psi / nodes) * f), most + 2 * psi // n),
        (int(layer * 4 * gpus * f), most + 18 * psi // n),
        (int(psi * 4 * gpus * f), most + 18 * psi // n),
    ]


class Owner:
    rests_cut, is_of_init = True, False
    """Has nothing to give."""


def test_parameters_that_are_cut_count_whole():
    model, owner = TinyLM(), Owner()
    before = estimate.count_params(model)
    for param in model.parameters():
        sharded_param.to_sharded(param, param.dtype)
        sharded_param.watch(param, owner)
    assert estimate.count_params(model) == before
