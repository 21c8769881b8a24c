"""Which parameters form a unit."""

import torch
from torch import nn

from mpispeed.sharding.units import choose_resident, plan_units, tied_names
from tests.zoo.models import TinyLM


def plan(model, parts=2, limit=10**9, groups=1, **more):
    params = [p for p in model.parameters() if p.requires_grad]
    group_of = {id(p): i % groups for i, p in enumerate(params)}
    return plan_units(model, group_of, parts, limit, **more)


def names(units):
    return [unit.name for unit in units]


def test_blocks_are_units_and_the_rest_stands_between():
    table = plan(TinyLM(depth=3))
    assert names(table.units) == ["scale", "embed.weight", "blocks.0", "blocks.1", "blocks.2", "norm.weight"]
    assert [unit.index for unit in table.units] == list(range(6))
    assert table.frozen == ()


def test_tied_parameters_stand_once_under_the_first_name():
    model = TinyLM()
    table = plan(model)
    entries = [entry.name for unit in table.units for entry in unit.layout.entries]
    assert len(entries) == len(set(entries)) == len(list(model.parameters()))
    assert tied_names(model) == {"head.weight": "embed.weight"}
    assert table.by_name("head.weight") == table.by_name("embed.weight")
    assert table.find(model.head.weight) == table.by_name("embed.weight")


def test_frozen_parameters_are_not_managed():
    model = TinyLM()
    model.norm.weight.requires_grad_(False)
    table = plan(model)
    assert table.find(model.norm.weight) is None
    assert table.by_name("norm.weight") is None


def test_the_limit_splits_units_between_parameters():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    assert [len(unit.params) for unit in plan(model, limit=105).units] == [1, 1, 1, 1]
    assert [len(unit.params) for unit in plan(model, limit=110).units] == [2, 2]


def test_dtypes_do_not_mix_and_groups_are_ranges():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    table = plan(model, groups=2)
    for unit in table.units:
        assert {param.dtype for param in unit.params} == {unit.dtype}
        groups = [entry.group for entry in unit.layout.entries]
        assert groups == sorted(groups)
        for entry, param in zip(unit.layout.entries, unit.params, strict=True):
            assert entry.shape == tuple(param.shape)
    assert {unit.dtype for unit in table.units} == {torch.float32, torch.float64}


def test_small_neighbours_share_a_unit():
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(5)))  # 110 elements each
    assert [unit.layout.numel for unit in plan(model).units] == [110] * 5
    assert [unit.layout.numel for unit in plan(model, merge_elements=109).units] == [110] * 5
    assert [unit.layout.numel for unit in plan(model, merge_elements=220).units] == [220, 220, 110]
    assert [unit.layout.numel for unit in plan(model, merge_elements=10**5).units] == [550]
    # never beyond the limit of units
    assert [unit.layout.numel for unit in plan(model, merge_elements=10**5, limit=330).units] == [330, 220]


def test_a_large_run_keeps_small_neighbours_apart():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(10, 10), nn.Linear(2, 2), nn.Linear(2, 2))
    assert [unit.layout.numel for unit in plan(model, merge_elements=20).units] == [6, 110, 12]


def test_dtypes_are_not_merged():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).double())
    units = plan(model, merge_elements=10**5).units
    assert [(unit.layout.numel, unit.dtype) for unit in units] == [(20, torch.float32), (40, torch.float64)]


def test_frozen_parameters_get_units_of_their_own_when_asked_for():
    model = TinyLM(depth=3)
    for param in (model.norm.weight, *model.blocks[1].parameters()):
        param.requires_grad_(False)
    table = plan(model, takes_frozen=True)
    assert names(table.units) == ["scale", "embed.weight", "blocks.0", "blocks.2", "norm.bias"]
    assert names(table.frozen) == ["blocks.1", "norm.weight"]
    assert [unit.index for unit in table.all_units] == list(range(7))
    assert [unit.is_trainable for unit in table.all_units] == [True] * 5 + [False] * 2
    assert table.find(model.norm.weight) is None
    assert table.locate(model.norm.weight) == table.by_name("norm.weight")
    assert table.locate(model.norm.bias) == table.find(model.norm.bias)
    assert table.locate(nn.Parameter(torch.ones(1))) is None
    assert {id(param) for param, _ in table.all_places()} == {id(param) for param in model.parameters()}


def test_merged_units_are_trained_or_frozen_as_a_whole():
    model = TinyLM(depth=3)
    model.blocks[1].requires_grad_(False)
    table = plan(model, takes_frozen=True, merge_elements=10**5)
    assert [len(unit.params) for unit in table.units] == [1 + 1 + 6 + 6 + 2]
    assert [len(unit.params) for unit in table.frozen] == [6]


def test_small_units_stay_whole_in_order_while_they_fit():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(20, 20), nn.Linear(10, 10), nn.Linear(3, 3))
    model[2].requires_grad_(False)
    table = plan(model, takes_frozen=True)
    sizes = [unit.layout.numel for unit in table.all_units]
    assert sizes == [110, 420, 12, 110]  # the frozen one last
    assert choose_resident(table, 0, 10**9) == set()
    assert choose_resident(table, 109, 10**9) == {2}
    assert choose_resident(table, 110, 10**9) == {0, 2, 3}
    assert choose_resident(table, 10**9, 10**9) == {0, 1, 2, 3}
    assert choose_resident(table, 110, 121) == {0}
    assert choose_resident(table, 110, 122) == {0, 2}
    assert choose_resident(table, 10**9, 240) == {0, 2, 3}  # the large one does not fit, later ones do
    assert choose_resident(table, 10**9, 0) == set()
