"""Floor 3, bytes: flat layouts, shards, placements and the moves between them, scratch buffers, swap files.

Knows the places of named tensors, and the collectives between placements.
Knows nothing of the meaning of a tensor: gradients, masters and checkpoints are alike here.
"""
