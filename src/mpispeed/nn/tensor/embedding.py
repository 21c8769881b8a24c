"""Vocabulary sliced over a slicing group: the table of embeddings and the layer that makes logits.

All ranks hold equally many rows; those behind the vocabulary are padding, zero and never used.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mpispeed.base.errors import UsageError
from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.entry import Entry
from mpispeed.nn.tensor.linear import CutLayer, whole_linear
from mpispeed.nn.tensor.tensor_cut import TensorCut, marks_of, vocab_rows


class VocabEmbedding(CutLayer):
    """An embedding whose rows are sliced; every rank gets the full result.

    Args:
        num_embeddings: rows of the full table.
        embedding_dim: width.
        comm: the slicing group.
        padding_idx: the row that gets no gradient.
        whole: an `nn.Embedding` whose table is sliced instead of a new one.
        scale: multiplies the result.
        rounds_scale: it has the dtype of the result.
        kwargs: `dtype` and `device` of a new table.

    Shapes:
        input: indices of any shape, equal on all ranks
        output: [*input, embedding_dim]

    Collective over: `comm`, in forward.

    Raises:
        UsageError: `whole` renormalises its rows, counts them or has sparse gradients.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        comm: Comm,
        *,
        padding_idx: int | None = None,
        whole: nn.Embedding | None = None,
        scale: float = 1.0,
        rounds_scale: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(comm)
        table = whole or nn.Embedding(num_embeddings, embedding_dim, padding_idx, **kwargs)
        if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
            msg = "an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be cut; leave it whole"
            raise UsageError(msg)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, table.padding_idx
        self.scale, self.rounds_scale = scale, rounds_scale
        self._adopt("weight", table.weight, TensorCut("vocab", 0, tuple(table.weight.shape)))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """The rows; those of other ranks are zero before the sum."""
        if self.comm.size == 1:
            return self._scaled(self.rows_of(index, self.padding_idx))
        rows = vocab_rows(self.num_embeddings, self.comm.size)
        local = index - self.comm.rank * rows
        is_other = (local < 0) | (local >= rows) | (index >= self.num_embeddings)
        padding = None if self.padding_idx is None else self.padding_idx - self.comm.rank * rows
        padding = padding if padding is not None and 0 <= padding < rows else None
        found = self.rows_of(local.masked_fill(is_other, 0), padding)
        found = found.masked_fill(is_other.unsqueeze(-1), 0.0)
        return self._scaled(regions.reduce_from(found, self.comm, is_own=True))

    def _scaled(self, rows: torch.Tensor) -> torch.Tensor:
        if self.scale == 1.0:
            return rows
        return rows * (torch.tensor(self.scale, dtype=rows.dtype).item() if self.rounds_scale else self.scale)

    def rows_of(self, index: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        """Rows of this rank's part of the table, by their numbers in it."""
        return functional.embedding(index, self.weight, padding_idx)

    def extra_repr(self) -> str:
        """Full sizes and the rank."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rank {self.comm.rank} of {self.comm.size}"


class VocabLinear(CutLayer):
    """The layer from hidden states to logits, sliced by vocabulary.

    Args:
        in_features: width of the hidden states.
        vocab_size: rows of the full weight.
        comm: the slicing group.
        bias: add a bias.
        gather_output: return full logits; else this rank's columns, padding included, for `cross_entropy` of
            this package.
        whole: an `nn.Linear` whose weights are sliced instead of new ones.
        tied: a `VocabEmbedding` whose weight this layer uses.
        kwargs: `dtype` and `device` of new weights.

    Shapes:
        input: [..., in_features], full and equal on all ranks
        output: [..., vocab_size], or [..., rows of each rank]

    Collective over: `comm`, in backward; with `gather_output` in forward too.

    Raises:
        UsageError: `tied` has another shape.
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        comm: Comm,
        *,
        bias: bool = False,
        gather_output: bool = True,
        whole: nn.Module | None = None,
        tied: VocabEmbedding | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(comm)
        if tied is not None and (tied.num_embeddings, tied.embedding_dim) != (vocab_size, in_features):
            msg = f"logits of {vocab_size} from {in_features} cannot share the embedding {tied}"
            raise UsageError(msg)
        self.in_features, self.vocab_size, self.gather_output = in_features, vocab_size, gather_output
        self.entry = Entry(comm)
        layer: Any = whole or whole_linear(in_features, vocab_size, bias, False, **kwargs)
        if tied is None:
            self._adopt("weight", layer.weight, TensorCut("vocab", 0, (vocab_size, in_features)))
        else:
            self.weight = tied.weight
            marks_of(self).cuts["weight"] = marks_of(tied).cuts["weight"]
        self._adopt("bias", getattr(layer, "bias", None), TensorCut("vocab", 0, (vocab_size,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's vocabulary, or of the full one."""
        logits = self.product(self.entry(x), self.weight, self.bias)
        if not self.gather_output:
            return logits
        rows = vocab_rows(self.vocab_size, self.comm.size)
        return regions.gather_from(logits, self.comm, -1, rows * self.comm.size)[..., : self.vocab_size]

    def extra_repr(self) -> str:
        """Full sizes and the rank."""
        return f"{self.in_features}, {self.vocab_size}, rank {self.comm.rank} of {self.comm.size}"
