"""Stochastic depth along a schedule: layers that some passes leave out."""

from mpispeed.nn.layer_drop.layers import convert_to_layer_drop
from mpispeed.nn.layer_drop.schedule import ProgressiveLayerDrop

__all__ = ["ProgressiveLayerDrop", "convert_to_layer_drop"]
