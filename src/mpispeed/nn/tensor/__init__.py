"""Tensor parallelism: layers sliced over a slicing group, and their injection into existing models."""

from mpispeed.nn.tensor.embedding import VocabEmbedding, VocabLinear
from mpispeed.nn.tensor.injection import Report, inject
from mpispeed.nn.tensor.linear import ColumnLinear, RowLinear
from mpispeed.nn.tensor.loss import cross_entropy
from mpispeed.nn.tensor.tensor_cut import TensorCut, cuts, partial_gradients

__all__ = [
    "ColumnLinear",
    "Report",
    "RowLinear",
    "TensorCut",
    "VocabEmbedding",
    "VocabLinear",
    "cross_entropy",
    "cuts",
    "inject",
    "partial_gradients",
]
