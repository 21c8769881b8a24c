"""Copies that ranks hold of the same elements: compared when they should be equal, by name when they are not."""

import logging

import pytest
import torch

from mpispeed.ckpt.format.logical import Deferred, LogicalTensor, ParamInfo, Pattern, Piece
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.slices import TensorSlice, gather_pieces
from mpispeed.ckpt.write.save import SaveOptions, save
from tests.unit.ckpt.sample import outcomes
from tests.zoo import has_same_bits

NORM = torch.arange(40.0)


def later(values):
    def parts(first, last):
        for start in range(first, last, 7):
            yield values[start : min(start + 7, last)]

    return Deferred(len(values), values.dtype, parts)


def save_copies(folder, changes=(), *, size=3, kind="replicated", wrap=lambda values: values, ends=None, **options):
    """Each rank passes the whole of `norm` in two ranges; `changes` are the (rank, element) that differ."""
    info = ParamInfo("norm", (5, 8), tp_kind=kind)

    def work(comm):
        mine = NORM.clone()
        for rank, element in changes:
            if rank == comm.rank:
                mine[element] = -1.0
        cut, end = TensorSlice(info, comm.rank, comm.size), (ends or {}).get(comm.rank, 25)
        pieces = gather_pieces(cut, 0, wrap(mine[:end])) + gather_pieces(cut, end, wrap(mine[end:]))
        tensors = [LogicalTensor("norm", "master", (5, 8), torch.float32, pieces)]
        return save(comm, folder, "t", params=[info], tensors=tensors, options=SaveOptions(**options))

    return outcomes(size, work)


def assert_holds(folder, values):
    with open_checkpoint(folder) as checkpoint:
        assert has_same_bits(checkpoint.read_whole("norm", "master"), values.view(5, 8))


@pytest.mark.parametrize("wrap", [lambda values: values, later], ids=["memory", "deferred"])
@pytest.mark.parametrize("kind", ["replicated", "none", "averaged"])
def test_equal_copies_are_saved_once(tmp_path, kind, wrap):
    results = save_copies(tmp_path, kind=kind, wrap=wrap)
    assert not any(isinstance(result, Exception) for result in results), results
    assert_holds(tmp_path, NORM)


@pytest.mark.parametrize("wrap", [lambda values: values, later], ids=["memory", "deferred"])
@pytest.mark.parametrize("kind", ["replicated", "none"])
def test_a_copy_that_differs_fails_on_every_rank_and_is_named(tmp_path, kind, wrap):
    results = save_copies(tmp_path, [(2, 31)], kind=kind, wrap=wrap)
    assert {type(result).__name__ for result in results} == {"SaveFailed"}
    assert len({str(result) for result in results}) == 1
    assert "norm/master, 15 elements from 25 on: rank 0 and rank 2 differ" in str(results[0])
    assert "rank 1 " not in str(results[0]).partition("norm/master")[2]
    assert list(tmp_path.iterdir()) == []


def test_the_first_rank_may_be_the_odd_one(tmp_path):
    message = str(save_copies(tmp_path, [(0, 3)])[0])
    assert "25 elements from 0 on: rank 0 and rank 1 differ" in message
    assert "25 elements from 0 on: rank 0 and rank 2 differ" in message


def test_a_zero_of_another_sign_differs(tmp_path):
    info = ParamInfo("norm", (1,), tp_kind="replicated")

    def work(comm):
        values = torch.tensor([-0.0 if comm.rank else 0.0])
        pieces = gather_pieces(TensorSlice(info, comm.rank, 2), 0, values)
        tensors = [LogicalTensor("norm", "master", (1,), torch.float32, pieces)]
        return save(comm, tmp_path, "t", params=[info], tensors=tensors)

    assert "rank 0 and rank 1 differ" in str(outcomes(2, work)[0])


@pytest.mark.parametrize(("mode", "kind"), [("warn", "replicated"), ("off", "replicated"), ("fail", "averaged")])
def test_differences_that_do_not_stop_a_save(tmp_path, caplog, mode, kind):
    with caplog.at_level(logging.WARNING, logger="mpispeed.ckpt.write.request"):
        results = save_copies(tmp_path, [(1, 0)], kind=kind, compare_replicas=mode)
    assert not any(isinstance(result, Exception) for result in results), results
    assert_holds(tmp_path, NORM)
    assert ["rank 0 and rank 1 differ" in record.message for record in caplog.records] == [True] * (mode == "warn")


def test_a_copy_that_is_cut_otherwise_is_not_taken_for_equal(tmp_path):
    message = str(save_copies(tmp_path, ends={1: 24})[0])
    assert "24 elements from 0 on: rank 1 has a copy, but no rank writes just these" in message
    assert list(tmp_path.iterdir()) == []


def test_many_differences_are_counted(tmp_path):
    message = str(save_copies(tmp_path, [(rank, place) for rank in range(1, 5) for place in (0, 30)], size=5)[0])
    assert message.count("differ") == 5
    assert "and 3 more" in message


def test_copies_of_slices(tmp_path):
    """Two data-parallel ranks with the same cut slice, one as a replica."""
    whole = torch.randn(6, 10)
    info = ParamInfo("norm", (6, 10), tp_kind="row")

    def work(comm, change=0.0):
        part, is_copy = comm.rank % 2, comm.rank >= 2
        values = whole[:, part * 5 : part * 5 + 5].reshape(-1).clone()
        if comm.rank == 3:
            values[7] += change
        piece = Piece(part * 5, values, is_copy, Pattern(10, ((0, 5),)))
        tensors = [LogicalTensor("norm", "master", (6, 10), torch.float32, [piece])]
        return save(comm, tmp_path, "t", params=[info], tensors=tensors)

    assert "30 elements from 5 on: rank 1 and rank 3 differ" in str(outcomes(4, lambda comm: work(comm, 1.0))[0])
    outcomes(4, work)
    with open_checkpoint(tmp_path) as checkpoint:
        assert has_same_bits(checkpoint.read_whole("norm", "master"), whole)
