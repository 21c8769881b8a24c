"""Pieces whose elements are read when they are written."""

import pytest
import torch

from mpispeed.base.errors import StoreError
from mpispeed.ckpt.format.logical import Deferred, LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write.save import save
from tests.unit.ckpt.sample import cut, outcomes, params_of, save_by, saved, tensors_of
from tests.unit.ckpt.test_failed_save import assert_holds, assert_same_failure


def deferred(values, length, log=None):
    """The same elements in parts of `length` that do not outlive the next."""

    def parts(first, last):
        buffer = torch.empty(length, dtype=values.dtype)
        try:
            for start in range(first, last, length):
                part = buffer[: min(length, last - start)]
                part.copy_(values[start : start + len(part)])
                yield part
                buffer.view(torch.uint8).fill_(0xA5)
        finally:
            if log is not None:
                log.append("closed")

    return Deferred(values.numel(), values.dtype, parts)


def put_off(tensors, length):
    return [
        LogicalTensor(t.name, t.slot, t.shape, t.dtype, [Piece(p.start, deferred(p.values, length)) for p in t.pieces])
        for t in tensors
    ]


@pytest.mark.parametrize("length", [1000, 4096, 300_000, 2_000_000])
@pytest.mark.parametrize("size", [1, 3])
def test_the_file_is_the_same(tmp_path, size, length):
    tensors = tensors_of()
    if length < 4096:  # the large ones take long in small parts
        tensors = {key: value for key, value in tensors.items() if value.numel() < 10_000}
    expected = saved(tmp_path / "a", size=size, tensors=tensors)

    def work(comm):
        pieces = put_off(cut(tensors, comm.rank, comm.size), length)
        return save(
            comm,
            tmp_path / "b",
            "step7",
            params=params_of(tensors),
            tensors=pieces,
            state={"engine": {"global_steps": 7}},
        )

    reports = outcomes(size, work)
    assert (expected / "model.h5").read_bytes() == (reports[0].path / "model.h5").read_bytes()
    assert_holds(tmp_path / "b", tensors)


@pytest.mark.parametrize(
    "error", [StoreError("cannot be read"), OSError(5, "cannot be read"), RuntimeError("cannot be read")]
)
def test_what_cannot_be_read_fails_the_save_on_every_rank(tmp_path, error):
    saved(tmp_path)
    values, log = torch.randn(20), []

    def failing(_first, _last):
        try:
            yield values[:4]
            raise error
        finally:
            log.append("closed")

    def work(comm):
        start, stop = comm.rank * 10, comm.rank * 10 + 10
        own = Deferred(10, torch.float32, failing) if comm.rank else deferred(values[start:stop], 4, log)
        tensors = [LogicalTensor("w", "master", (4, 5), torch.float32, [Piece(start, own)])]
        return save(comm, tmp_path, "next", params=[ParamInfo("w", (4, 5))], tensors=tensors)

    before = sorted(tmp_path.rglob("*"))
    results = outcomes(2, work)
    assert_same_failure(results, "cannot be read")
    assert "rank 1" in str(results[0])
    assert log == ["closed", "closed"]
    assert sorted(tmp_path.rglob("*")) == before
    assert_holds(tmp_path, tensors_of())


@pytest.mark.parametrize("count", [0, 9, 11])
def test_parts_of_another_length_fail_the_save_and_touch_no_neighbour(tmp_path, count):
    def work(comm):
        own = Deferred(10, torch.float32, lambda _first, _last: iter([torch.ones(count)]))
        tensors = [LogicalTensor("w", "master", (2, 5), torch.float32, [Piece(0, own)])]
        return save(comm, tmp_path, "t", params=[ParamInfo("w", (2, 5))], tensors=tensors)

    assert_same_failure(outcomes(1, work), "w/master that are read when they are written")
    assert list(tmp_path.iterdir()) == []


def test_dtype_and_place_are_checked_before_anything_is_read(tmp_path):
    def refused(_first, _last):
        pytest.fail("it was read")
        yield

    for own, start, message in (
        (Deferred(20, torch.bfloat16, refused), 0, "has dtype bfloat16"),
        (Deferred(20, torch.float32, refused), 1, "ends at 21"),
    ):
        tensors = [LogicalTensor("w", "master", (4, 5), torch.float32, [Piece(start, own)])]
        results = outcomes(
            1, lambda comm, t=tensors: save(comm, tmp_path, "t", params=[ParamInfo("w", (4, 5))], tensors=t)
        )
        assert_same_failure(results, message)


def test_ranks_may_defer_some(tmp_path):
    tensors = tensors_of(seed=3)

    def work(comm):
        pieces = cut(tensors, comm.rank, comm.size)
        pieces = put_off(pieces, 100_000) if comm.rank % 2 else pieces
        return save(comm, tmp_path, "some", params=params_of(tensors), tensors=pieces)

    assert not any(isinstance(result, Exception) for result in outcomes(3, work))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tag == "some"
    assert_holds(tmp_path, tensors, "some")
    assert_same_failure(save_by(1, tmp_path, "some"), "overwrite=True")
