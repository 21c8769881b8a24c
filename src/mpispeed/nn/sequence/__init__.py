"""Attention over sequences that several ranks share: each has a part of every sequence of the batch.

Offers `Layout` (who has which tokens), `SequenceGroup` (ranks), `Running` with `current`, `use` and `set_running` (the
cut of the running pass). It knows tensors and groups of ranks, nothing of models, placements and batches.
"""

from mpispeed.nn.sequence.group import SequenceGroup
from mpispeed.nn.sequence.layout import Layout
from mpispeed.nn.sequence.running import Running, current, mark, set_running, use

__all__ = ["Layout", "Running", "SequenceGroup", "current", "mark", "set_running", "use"]
