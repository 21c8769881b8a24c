"""Tiles of a layer are units of their own, also inside of blocks."""

from torch import nn

from mpispeed.nn import TiledLinear
from mpispeed.sharding.units import plan_units


def unit_names(model):
    table = plan_units(model, {id(p): 0 for p in model.parameters()}, 2, 10**9)
    return [(unit.name, len(unit.params)) for unit in table.units]


def test_tiles_inside_of_a_block_are_fetched_apart():
    block = nn.ModuleDict({"norm": nn.LayerNorm(8), "up": TiledLinear(8, 6, in_splits=2), "down": nn.Linear(6, 8)})
    model = nn.Sequential(block, nn.Linear(8, 8))
    assert unit_names(model) == [
        ("0", 2), ("0.up.linears.0.0", 1), ("0.up.linears.0.1", 2), ("0", 2), ("1", 2)
    ]  # fmt: skip


def test_a_model_that_is_tiles_itself():
    assert unit_names(TiledLinear(8, 6, out_splits=2)) == [("linears.0.0", 2), ("linears.1.0", 2)]


def test_lists_inside_of_blocks_stay_with_their_block():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])))
    assert unit_names(model) == [("0", 6)]
