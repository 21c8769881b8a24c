"""Token stores built by real processes: the bytes of one process, and one message for what one rank finds."""

import json
import random
import shutil
import tempfile
from pathlib import Path

import pytest

from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.tokens.store import open_store
from mpispeed.tokens_build.errors import BuildError
from mpispeed.tokens_build.job import Request, build
from mpispeed.tokens_build.merging import merge
from mpispeed.tokens_build.work_folder import unfinished

pytestmark = pytest.mark.mpi

LINES = 400


@pytest.fixture
def folder(comm):
    """One new folder, the same on all ranks, with lines of JSON."""
    path = Path(comm.share(tempfile.mkdtemp(prefix="mpispeed-build-") if comm.rank == 0 else None))
    if comm.rank == 0:
        draw = random.Random(5)
        texts = ["ab" * draw.randint(0, 90) for _ in range(LINES)]
        (path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    comm.barrier()
    yield path
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


def request(folder, name, **settings):
    inputs = [folder / "corpus.jsonl"]
    return Request(folder / name, inputs, "byte", columns=("length", "rarity"), part_bytes=4000, **settings)


@pytest.mark.parametrize("row", [0, 100])
def test_all_ranks_build_what_one_would(comm, folder, row):
    report = build(comm, request(folder, "all.h5", row=row))
    if comm.rank == 0:
        build(solo_comm(), request(folder, "one.h5", row=row))
        assert (folder / "all.h5").read_bytes() == (folder / "one.h5").read_bytes()
    assert report.parts > 2 * comm.size
    comm.barrier()
    merge(comm, folder / "twice.h5", [folder / "all.h5", folder / "all.h5"])
    assert open_store(folder / "twice.h5").document_count == 2 * report.documents


def test_one_rank_finds_a_bad_line_and_all_say_so(comm, folder):
    if comm.rank == 0:
        with (folder / "corpus.jsonl").open("a") as file:
            file.write("{\n")
    comm.barrier()
    with pytest.raises(BuildError, match=f"line {LINES + 1}: it is no JSON") as caught:
        build(comm, request(folder, "s.h5"))
    assert caught.value.is_collective
    assert "goes on" in unfinished(folder / "s.h5")
    assert build(comm, request(folder, "s.h5", skips_bad=True)).skipped == 1


def test_a_folder_that_other_ranks_do_not_see(comm, folder):
    """As where each node has a folder of that name of its own."""
    own = folder / str(comm.rank)
    own.mkdir()
    wish = Request(own / "s.h5", [folder / "corpus.jsonl"], "byte")
    if comm.size == 1:
        assert build(comm, wish).is_new
        return
    with pytest.raises(BuildError, match="was made by another rank and is not here; build in a folder that all nodes"):
        build(comm, wish)
