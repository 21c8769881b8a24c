"""Block-sparse attention with DeepSpeed's names: patterns, modules, their operators, and transformers' encoders."""

from mpispeed.nn.sparse.bert import BertSparseSelfAttention
from mpispeed.nn.sparse.encoders import SparseAttentionUtils
from mpispeed.nn.sparse.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    sparsity_of,
)
from mpispeed.nn.sparse.operators import MatMul, Softmax
from mpispeed.nn.sparse.self_attention import SparseSelfAttention

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "Softmax",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "sparsity_of",
]
