"""Floor 6, data: the samples of a rank, in an order that does not depend on the number of ranks.

Knows torch's data sets and loaders, and two plain numbers: its index on the data axis and the axis'
size. Must not know the engine or the configuration. Nothing here communicates but `node_copies`, which is
handed the groups of ranks.
"""

from __future__ import annotations

from mpispeed.data.loader import RepeatingLoader, ShardedLoader
from mpispeed.data.order import BatchOrder, EpochOrder
from mpispeed.data.sampler import SampleOrder

__all__ = ["BatchOrder", "EpochOrder", "RepeatingLoader", "SampleOrder", "ShardedLoader"]
