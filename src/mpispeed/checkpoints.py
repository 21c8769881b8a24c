"""Checkpoints as named logical tensors, written and read without an engine."""

from mpispeed.ckpt.format.logical import ALL_EXPERTS, LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.read.reader import Checkpoint, open_checkpoint
from mpispeed.ckpt.slices import TensorSlice, gather_pieces, read_slice
from mpispeed.ckpt.tools.packed_weights import load as load_weights
from mpispeed.ckpt.write.request import SaveOptions
from mpispeed.ckpt.write.save import SaveReport, save

__all__ = [
    "ALL_EXPERTS",
    "Checkpoint",
    "LogicalTensor",
    "ParamInfo",
    "Piece",
    "SaveOptions",
    "SaveReport",
    "TensorSlice",
    "gather_pieces",
    "load_weights",
    "open_checkpoint",
    "read_slice",
    "save",
]
