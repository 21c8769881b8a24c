"""Which modules are watched, and for which units."""

from torch import nn

from mpispeed.sharding.module_units import find_module_units, needed_elements
from mpispeed.sharding.units import plan_units


class Model(nn.Module):
    """A mixture between two layers, and a list of blocks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.mixture = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x):
        return x


def users(model, whole=(), *, limit=10**9, resident=()):
    found = watched(model, whole, limit=limit, resident=resident)
    return {user.name: [unit.name for unit in user.units] for user in found}


def watched(model, whole=(), *, limit=10**9, resident=()):
    table = plan_units(model, {id(p): 0 for p in model.parameters()}, 2, limit)
    return find_module_units(
        model, table, needs=lambda unit: unit.name not in resident, is_whole=lambda module: module in whole
    )


def test_blocks_are_watched_as_one_and_other_modules_by_their_own_parameters():
    found = users(Model())
    assert list(found) == ["", "first", "mixture.a", "mixture.b", "blocks.0", "blocks.1"]  # parents first
    assert found[""] == []
    assert found["blocks.1"] == ["blocks.1"]


def test_a_whole_module_is_watched_with_everything_in_it():
    model = Model()
    found = users(model, [model.mixture])
    assert "mixture.a" not in found
    assert found["mixture"] == users(model)["mixture.a"]  # one unit holds both, as neighbours of one child


def test_modules_in_a_block_of_several_units_are_watched_themselves():
    found = users(Model(), limit=20)
    assert "blocks.0" not in found
    assert len(found["blocks.0.0"]) == 1


def test_what_stays_whole_is_not_fetched():
    assert "blocks.0" in users(Model())
    assert users(Model(), resident=["blocks.0"])["blocks.0"] == []


def test_a_module_in_two_places_is_watched_once():
    shared = nn.Linear(2, 2)
    model = nn.Module()
    model.one, model.two = shared, shared
    assert list(users(model)) == ["", "one"]


def test_a_module_needs_its_own_units_those_around_it_and_the_next_one():
    model = nn.Module()
    model.big, model.small = nn.Linear(64, 64, bias=False), nn.Linear(16, 16, bias=False)
    model.outer = nn.Module()
    model.outer.weight = nn.Parameter(model.small.weight.new_zeros(32, 32))
    model.outer.inner = nn.Linear(16, 32, bias=False)
    found = watched(model, limit=1)
    assert needed_elements(found) == 64 * 64 + 32 * 32 + 512
    assert needed_elements(found[:1]) == needed_elements([]) == 0
    assert needed_elements(watched(nn.Linear(64, 64, bias=False))) == 64 * 64
