"""Routing of tokens past layers: random layerwise token dropping (random-LTD)."""

from mpispeed.nn.routing.convert import convert_to_random_ltd, remove_random_ltd_state_dict, save_without_random_ltd
from mpispeed.nn.routing.schedule import RandomLTDScheduler
from mpispeed.nn.routing.token_drop import RandomLayerTokenDrop

__all__ = [
    "RandomLTDScheduler",
    "RandomLayerTokenDrop",
    "convert_to_random_ltd",
    "remove_random_ltd_state_dict",
    "save_without_random_ltd",
]
