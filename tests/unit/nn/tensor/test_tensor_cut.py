"""Cuts of parameters: what ranks take joins to the whole, and checkpoints cut alike."""

import itertools

import pytest
import torch

from mpispeed.base.errors import ConfigError
from mpispeed.ckpt.format.logical import ParamInfo
from mpispeed.ckpt.slices import TensorSlice
from mpispeed.nn.tensor import TensorCut

CASES = [
    TensorCut("replicated", -1, (3, 2)),
    TensorCut("column", 0, (7, 3)),
    TensorCut("column", 1, (3, 7)),
    TensorCut("column", 0, (12,), (), (4,)),
    TensorCut("column", 0, (14, 2), (), (4,)),
    TensorCut("row", 1, (3, 10), (), (4,)),
    TensorCut("row", 1, (3, 2)),
    TensorCut("sub", 0, (24, 2), (16, 4, 4), (8, 2, 2)),
    TensorCut("sub", 1, (2, 24), (16, 4, 4), (8, 2, 2)),
    TensorCut("sub", 0, (14,), (7, 7), (2, 2)),
    TensorCut("vocab", 0, (13, 2)),
    TensorCut("vocab", 0, (1,)),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("cut", CASES, ids=str)
def test_parts_join_and_are_those_of_checkpoints(cut, size):
    whole = torch.arange(1.0, 1 + torch.Size(cut.shape).numel()).view(cut.shape)
    parts = [cut.take(whole, rank, size) for rank in range(size)]
    assert torch.equal(cut.join(parts), whole)
    vocab = cut.shape[0] if cut.kind == "vocab" else -1
    info = ParamInfo(
        "w",
        cut.shape,
        tp_kind=cut.kind,
        tp_dim=cut.dim,
        tp_sub_sizes=cut.sub_sizes,
        tp_grains=cut.grains,
        vocab_size=vocab,
    )
    for rank, part in enumerate(parts):
        stored = TensorSlice(info, rank, size)
        assert stored.shape == tuple(part.shape) == cut.local_shape(rank, size)
        flat = torch.zeros(stored.numel)
        for local, first, count in stored.runs(0, stored.numel):
            flat[local : local + count] = whole.reshape(-1)[first : first + count]
        assert torch.equal(flat.view(part.shape), part)


def test_heads_are_never_cut():
    cut = CASES[7]
    for size, rank in itertools.product([2], range(2)):
        assert [stop - start for start, stop in cut.ranges(rank, size)] == [8, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sub", 0, (9,), (4, 4)), r"parts of \(4, 4\) in grains of \(\) do not make up dim 0 of \(9,\)"),
        (("column", 0, (8,), (), (0,)), "do not make up"),
        (("column", 0, (8,), (), (2, 2)), r"2 grains \(2, 2\) for 1 parts"),
    ],
)
def test_cuts_that_do_not_fit(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TensorCut(*arguments)
