"""Floor 3, bytes: flat layouts, cuts, placements and the moves between them, scratch buffers.

Knows where named tensors sit and which collective carries a buffer from one placement to another.
Knows nothing of what a tensor means: gradients, masters and checkpoints all come through here.
"""
