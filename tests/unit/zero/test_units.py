"""Which parameters form a unit."""

import torch
from torch import nn

from mpispeed.zero.units import plan_units, tied_names
from tests.helpers.training import TinyLM


def plan(model, parts=2, limit=10**9, groups=1):
    params = [p for p in model.parameters() if p.requires_grad]
    group_of = {id(p): i % groups for i, p in enumerate(params)}
    return plan_units(model, group_of, parts, limit)


def test_blocks_are_units_and_the_rest_stands_between():
    table = plan(TinyLM(depth=3))
    assert [unit.name for unit in table.units] == ["scale", "blocks.0", "blocks.1", "blocks.2", "norm.weight"]


def test_tied_parameters_stand_once_under_the_first_name():
    model = TinyLM()
    table = plan(model)
    names = [entry.name for unit in table.units for entry in unit.layout.entries]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
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
