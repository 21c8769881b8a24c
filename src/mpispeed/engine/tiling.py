"""Tiles whose `copy_params_from` gathers cut parameters by itself."""

from __future__ import annotations

from mpispeed.nn import tiled
from mpispeed.zero.gathered import GatheredParameters


class TiledLinear(tiled.TiledLinear):
    """`mpispeed.nn.tiled.TiledLinear` over parameters that may be cut."""

    default_gather = staticmethod(GatheredParameters)


class TiledLinearReturnBias(tiled.TiledLinearReturnBias):
    """`mpispeed.nn.tiled.TiledLinearReturnBias` over parameters that may be cut."""

    default_gather = staticmethod(GatheredParameters)
