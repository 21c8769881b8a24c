"""`CheckpointPacker` of records that a checkpoint cannot have from a run: a sentence, never a wrong weight."""

from __future__ import annotations

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.read.reader import open_reader
from mpispeed.compression.export import CheckpointPacker
from tests.unit.ckpt.sample import saved

NAME, SHAPE = "layer.weight", (4, 6)
GOOD = {"out_dim": 0, "bits": 4, "kind": "symmetric", "groups": 2, "prunings": [["sparse", "l1", 0.5, 0]]}


def packer_of(folder, layers, mask=(4, 6)):
    """A packer of a checkpoint with one weight and a mask, whose record of layers is `layers`."""
    torch.manual_seed(2)
    tensors = {(NAME, "master"): torch.randn(SHAPE), ("layer.sparse_mask", "buffer"): torch.ones(mask).bool()}
    saved(folder, tensors=tensors, state={"features": {"compression_training": {"layers": layers}}})
    return open_reader(folder)


def test_a_record_that_fits_is_taken(tmp_path):
    with packer_of(tmp_path, {"layer": GOOD}) as reader:
        made = CheckpointPacker(reader).pack(NAME)
        assert (made.bits, made.shape, made.scales.numel()) == (4, SHAPE, 2)


CHANGES = [
    {"out_dim": 2}, {"out_dim": -1}, {"out_dim": None}, {"bits": 10**30}, {"bits": -4}, {"bits": float("inf")},
    {"bits": 1, "kind": "asymmetric"}, {"kind": "other"}, {"groups": -2}, {"prunings": 3},
    {"prunings": [["sparse", "l1", 0.5]]}, {"prunings": [["../sparse", "l1", 0.5, 0]]},
    {"prunings": [["sparse", "l3", 0.5, 0]]}, {"prunings": [["sparse", "l1", float("nan"), 0]]},
    {"prunings": [["sparse", "topk", -(10**400), 0]]}, {"prunings": [["head", "l1", 0.5, 0]]},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_damaged_record_is_refused(tmp_path, change):
    with packer_of(tmp_path, {"layer": GOOD | change}) as reader, pytest.raises(CorruptCheckpoint, match="is damaged"):
        CheckpointPacker(reader)


def test_other_things_than_records_are_refused(tmp_path):
    for number, layers in enumerate(([], "layer", {"layer": None}, None)):
        with packer_of(tmp_path / str(number), layers) as reader, pytest.raises(CorruptCheckpoint, match="is damaged"):
            CheckpointPacker(reader)


@pytest.mark.parametrize(
    ("change", "mask", "said"),
    [
        ({"groups": 5}, SHAPE, "5 equal groups"),
        ({}, (1, 6), r"layer.sparse_mask has shape \(1, 6\)"),
        ({"prunings": [["head", "l1", 0.5, 10**12]]}, SHAPE, "head_mask"),
        ({"prunings": [["row", "topk", 0.5, 0]]}, SHAPE, "row_scores"),
    ],
)
def test_a_record_of_another_weight_is_refused(tmp_path, change, mask, said):
    with packer_of(tmp_path, {"layer": GOOD | change}, mask) as reader:
        packer = CheckpointPacker(reader)
        with pytest.raises(CheckpointError, match=said):
            packer.pack(NAME)
