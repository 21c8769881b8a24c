import numpy as np
import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import logical
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece


def tensor(*ranges, shape=(4, 5)):
    pieces = [Piece(start, torch.zeros(stop - start)) for start, stop in ranges]
    return LogicalTensor("w", "master", shape, torch.float32, pieces)


def check(*by_rank, shape=(4, 5)):
    cut = [[tensor(*ranges, shape=shape)] for ranges in by_rank]
    logical.check_coverage(cut[0], [logical.local_ranges(own) for own in cut])


def test_exact_covers_pass():
    check([(0, 20)])
    check([(7, 20)], [(0, 3), (3, 7)])
    check([(5, 5), (0, 20)], [], [(20, 20)])
    check([], [(0, 1)], shape=())
    check([], [(0, 0)], shape=(0, 5))


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        ([[(0, 9)], [(10, 20)]], r"w/master has a hole: no rank passed the elements \[9, 10\)"),
        ([[(1, 20)]], r"hole.*\[0, 1\)"),
        ([[(0, 19)]], r"hole.*\[19, 20\)"),
        ([[], []], r"hole.*\[0, 20\)"),
        ([[(0, 10)], [(9, 20)]], r"w/master overlaps: the elements \[9, 10\) were passed by ranks 0 and 1"),
        ([[(0, 20)], [(0, 20)]], r"overlaps: the elements \[0, 20\)"),
        ([[(0, 10), (5, 20)]], r"\[5, 10\) were passed by rank 0 twice"),
        ([[(0, 20)], [(3, 4)]], r"overlaps: the elements \[3, 4\)"),
    ],
)
def test_holes_and_overlaps_name_tensor_and_range(by_rank, message):
    with pytest.raises(CheckpointError, match=message):
        check(*by_rank)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece(0, torch.zeros(2, 2)), r"shape \(2, 2\)"),
        (Piece(0, torch.zeros(8)[::2]), "contiguous"),
        (Piece(0, torch.zeros(4, dtype=torch.float64)), "dtype float64"),
        (Piece(0, torch.zeros(4, device="meta")), "on meta"),
        (Piece(17, torch.zeros(4)), "ends at 21, outside the 20 elements"),
        (Piece(-1, torch.zeros(4)), "outside"),
    ],
)
def test_pieces_that_do_not_fit_are_named(piece, message):
    with pytest.raises(CheckpointError, match=message):
        logical.check_pieces([LogicalTensor("w", "master", (4, 5), torch.float32, [piece])])


def test_names_are_unique_and_described():
    info = ParamInfo("w", (4, 5))
    logical.check_names([info], [tensor(), LogicalTensor("b", "buffer", (), torch.int64)])
    with pytest.raises(CheckpointError, match="described twice"):
        logical.check_names([info, info], [])
    with pytest.raises(CheckpointError, match="w/master is passed twice"):
        logical.check_names([info], [tensor(), tensor()])
    with pytest.raises(CheckpointError, match="belongs to no described parameter"):
        logical.check_names([], [tensor()])


def test_sizes():
    whole = LogicalTensor("w", "m", np.array([2, 3]), "bfloat16")
    assert (whole.shape, whole.numel, whole.itemsize, whole.size_bytes) == ((2, 3), 6, 2, 12)
    assert LogicalTensor("w", "m", (), torch.float64).size_bytes == 8


def test_first_difference():
    assert logical.first_difference([1, 2], [1, 2]) == ""
    assert "entry 1 is 3 here and 2 on rank 0" in logical.first_difference([1, 3], [1, 2])
    assert "1 entries here and 2" in logical.first_difference([1], [1, 2])
