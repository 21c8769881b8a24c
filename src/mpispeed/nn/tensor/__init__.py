"""Tensor parallelism: layers cut over a slicing group, and their injection into existing models."""

from mpispeed.nn.tensor.cuts import TensorCut, cuts, partial_gradients
from mpispeed.nn.tensor.embedding import VocabEmbedding, VocabLinear
from mpispeed.nn.tensor.linear import ColumnLinear, RowLinear
from mpispeed.nn.tensor.loss import cross_entropy

__all__ = [
    "ColumnLinear",
    "RowLinear",
    "TensorCut",
    "VocabEmbedding",
    "VocabLinear",
    "cross_entropy",
    "cuts",
    "partial_gradients",
]
