"""Tiled linear layers whose `copy_params_from` gathers sharded parameters."""

from __future__ import annotations

from mpispeed.nn import tiled
from mpispeed.sharding.gathered import GatheredParameters


class TiledLinear(tiled.TiledLinear):
    """`mpispeed.nn.tiled.TiledLinear` over parameters that may be sharded."""

    default_gather = staticmethod(GatheredParameters)


class TiledLinearReturnBias(tiled.TiledLinearReturnBias):
    """`mpispeed.nn.tiled.TiledLinearReturnBias` over parameters that may be sharded."""

    default_gather = staticmethod(GatheredParameters)
