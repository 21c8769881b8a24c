"""Saves by real processes: every rank writes into one file, and a failure of one rank is everybody's."""

import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from mpispeed.ckpt.format import schema, tags
from mpispeed.ckpt.format.errors import SaveFailed, TagMismatch
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write.save import save

pytestmark = pytest.mark.mpi

SHAPES = {"embed": (1500, 1000), "norm": (1000,), "scale": (), "odd": (7, 13)}


@pytest.fixture
def folder(comm):
    """One new folder, the same on all ranks."""
    path = Path(comm.share(tempfile.mkdtemp(prefix="mpispeed-ckpt-") if comm.rank == 0 else None))
    yield path
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


def whole(name):
    make = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=make)


def cut(rank, size):
    tensors = []
    for name, shape in SHAPES.items():
        flat = whole(name).reshape(-1)
        start, stop = (flat.numel() * place // size for place in (rank, rank + 1))
        tensors.append(LogicalTensor(name, "master", shape, torch.float32, [Piece(start, flat[start:stop])]))
    return tensors


def save_as(comm, folder, tag, rank, size, **more):
    params = [ParamInfo(name, shape) for name, shape in SHAPES.items()]
    return save(comm, folder, tag, params=params, tensors=cut(rank, size), **more)


def test_what_all_ranks_write_every_rank_reads(comm, folder):
    report = save_as(comm, folder, "t", comm.rank, comm.size, rng={"cpu": bytes([comm.rank])})
    assert report.path == folder.absolute() / "t"
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.rng("cpu") == [bytes([rank]) for rank in range(comm.size)]
        for name in SHAPES:
            assert torch.equal(checkpoint.read_whole(name, "master"), whole(name))


def test_the_bytes_do_not_depend_on_who_wrote_them(comm, folder):
    save_as(comm, folder, "together", comm.rank, comm.size)
    # rank 0 passes everything, the others nothing
    nothing = [LogicalTensor(name, "master", shape, torch.float32) for name, shape in SHAPES.items()]
    tensors = cut(0, 1) if comm.rank == 0 else nothing
    params = [ParamInfo(name, shape) for name, shape in SHAPES.items()]
    # the tag is part of the file, so the same tag goes elsewhere
    save(comm, folder / "elsewhere", "together", params=params, tensors=tensors)
    first, second = (base / "together" / schema.MODEL_FILE for base in (folder, folder / "elsewhere"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_write_fails_all(comm, folder):
    save_as(comm, folder, "good", comm.rank, comm.size)
    last = comm.size - 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(SaveFailed, match=rf"rank {last} of .*(embed|norm)/master\[.*File too large") as caught:
            save_as(comm, folder, "bad", comm.rank, comm.size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(set(comm.gather_objects(str(caught.value)))) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["good", "latest"]
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.read_whole("embed", "master"), whole("embed"))
    save_as(comm, folder, "next", comm.rank, comm.size)


@pytest.mark.mpi(min_size=2)
def test_pieces_that_overlap_fail_all(comm, folder):
    with pytest.raises(SaveFailed, match="overlaps"):
        save_as(comm, folder, "t", 0, 1)
    assert list(folder.iterdir()) == []


@pytest.mark.mpi(min_size=2)
def test_different_tags_are_found(comm):
    with pytest.raises(TagMismatch, match="rank 1 has 't1'"):
        tags.check_same_tag(comm, f"t{comm.rank}", "Fail")
    assert tags.check_same_tag(comm, f"t{comm.rank}", "Ignore") == "t0"
