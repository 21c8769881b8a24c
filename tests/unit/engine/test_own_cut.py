"""Cuts of tensors that a model has cut by its own code: every element of every rank has its place in the whole."""

import pytest
import torch

from mpispeed.base.errors import CheckpointError, ConfigError
from mpispeed.ckpt.format.logical import ParamInfo
from mpispeed.ckpt.slices import TensorSlice
from mpispeed.config.load import validate
from mpispeed.plan.own_slices import asks_for_slices, own_cut


@pytest.mark.parametrize(
    ("shapes", "dim", "whole"),
    [
        ([(3, 4), (3, 4)], 0, (6, 4)),
        ([(3, 4), (3, 4)], 1, (3, 8)),
        ([(3, 4), (3, 5), (3, 1)], -1, (3, 10)),  # the dim in which they differ
        ([(3, 4), (3, 4)], -1, (2, 3, 4)),  # nobody knows the dim
        ([(3, 4), (3, 4)], 7, (2, 3, 4)),
        ([(), ()], -1, (2,)),
        ([(3, 4), (2, 5)], 0, (22,)),
        ([(3, 4), (2,)], -1, (14,)),
        ([(0, 4), (2, 4)], -1, (2, 4)),
    ],
)
def test_pieces_cover_the_whole_and_each_other_nowhere(shapes, dim, whole):
    cut = own_cut(shapes, dim)
    assert cut.shape == whole
    info = ParamInfo("w", cut.shape, tp_kind=cut.kind, tp_dim=cut.dim, tp_sub_sizes=cut.sub_sizes)
    seen = torch.zeros(info.numel, dtype=torch.int64)
    for rank, shape in enumerate(shapes):
        piece = TensorSlice(info, rank, len(shapes))
        assert piece.numel == torch.Size(shape).numel()
        for _, start, count in piece.runs(0, piece.numel):
            seen[start : start + count] += 1
    assert seen.eq(1).all()


def test_other_numbers_of_ranks_are_refused():
    cut = own_cut([(3, 4), (3, 4)], 0)
    info = ParamInfo("w", cut.shape, tp_kind=cut.kind, tp_dim=cut.dim, tp_sub_sizes=cut.sub_sizes)
    with pytest.raises(CheckpointError, match="w was cut over 2 ranks by the model's own code and cannot be over 3"):
        TensorSlice(info, 0, 3)
    with pytest.raises(ConfigError, match="cannot be those of 3"):
        cut.ranges(0, 3)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, False),
        ({"autotp_size": 1}, False),
        ({"autotp_size": 2}, True),
        ({"tp": {"tp_size": 2}}, True),
        ({"vocab_parallel": True}, True),
        ({"injection_policy_tuple": {"up": "column"}}, True),
    ],
)
def test_only_the_config_asks_for_slices(section, expected):
    config = validate({"train_batch_size": 1, "tensor_parallel": section}, "test").config
    assert asks_for_slices(config) is expected
