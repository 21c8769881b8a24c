"""Routing of tokens past layers: random layerwise token dropping (random-LTD)."""

from mpispeed.nn.routing.schedule import RandomLTDScheduler

__all__ = ["RandomLTDScheduler"]
