"""One attention core: lists of pieces, each by the best kernel of its device, merged exactly by log-sum-exp."""

from mpispeed.nn.attention.block_list import BlockList
from mpispeed.nn.attention.blocks import attend_blocks
from mpispeed.nn.attention.core import attend, run, run_backward
from mpispeed.nn.attention.kernels import merge, partial, partial_backward
from mpispeed.nn.attention.pieces import Piece, pieces_of

__all__ = [
    "BlockList",
    "Piece",
    "attend",
    "attend_blocks",
    "merge",
    "partial",
    "partial_backward",
    "pieces_of",
    "run",
    "run_backward",
]
