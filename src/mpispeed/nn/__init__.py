"""Floor 5: modules a model is built from. They know torch and the floors below, not the placement of parameters."""

from mpispeed.nn.tiled import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
