"""Finding NCCL, what is refused of it, and what is let go before a job ends; with the library of the tests."""

import ctypes
import subprocess

import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh import ending
from mpispeed.mesh.backends import nccl, nccl_comm, nccl_library
from mpispeed.mesh.backends.nccl_library import Library, UniqueId
from tests.helpers import fake_nccl

MAPS = """\
7f0000000000-7f0000100000 r-xp 00000000 08:01 1234 /opt/torch/lib/libtorch_cuda.so
7f0000200000-7f0000300000 r-xp 00000000 08:01 1235 /opt/site-packages/nvidia/nccl/lib/libnccl.so.2
7f0000400000-7f0000500000 r-xp 00000000 08:01 1236 /opt/lib/libnccl_net.so
"""


def test_the_library_that_is_loaded_comes_first(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert nccl_library.mapped_file("libnccl", maps) == "/opt/site-packages/nvidia/nccl/lib/libnccl.so.2"
    assert nccl_library.mapped_file("librccl", maps) is None
    assert nccl_library.mapped_file("libnccl", tmp_path / "none") is None
    monkeypatch.setattr(nccl_library, "mapped_file", lambda stem: f"/loaded/{stem}.so")
    assert nccl_library.find_for_cuda() == ("/loaded/libnccl.so", "nccl")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert nccl_library.find_for_cuda() == ("/loaded/librccl.so", "rccl")


def test_without_one_it_is_said(monkeypatch):
    monkeypatch.setattr(nccl_library, "_candidates", lambda stem: iter(()))
    with pytest.raises(CommError, match="there is no NCCL: torch has not loaded it"):
        nccl_library.library_for(torch.device("cuda", 0))
    with pytest.raises(CommError, match="no library is known that joins devices of kind cpu"):
        nccl_library.library_for(torch.device("cpu"))


def built(folder, version, functions):
    """A library with some of the functions, whose results are all `version` where they tell one, and else 0."""
    source, made = folder / "some.c", folder / "libsome.so"
    lines = [f"int {name}(int *out) {{ (void)out; return 0; }}" for name in functions if name != "ncclGetVersion"]
    lines.append(f"int ncclGetVersion(int *out) {{ *out = {version}; return 0; }}")
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return str(made)


def test_what_is_refused(tmp_path):
    everything = [*nccl_library.FUNCTIONS, *nccl_library.TEXTS]
    with pytest.raises(CommError, match=r"NCCL 2\.12\.12 in .*libsome\.so is too old: 2\.14 or later"):
        Library(built(tmp_path, 21212, everything), "nccl")
    (tmp_path / "other").mkdir()
    with pytest.raises(CommError, match=r"RCCL in .*libsome\.so cannot be used: .*ncclSend"):
        Library(built(tmp_path / "other", 22703, [name for name in everything if name != "ncclSend"]), "rccl")
    with pytest.raises(CommError, match=r"none\.so cannot be used: .*[Nn]o such file"):
        Library(str(tmp_path / "none.so"), "nccl")


def test_layouts_are_those_of_the_header():
    """Of nccl.h of 2.14: the unique id travels by value, the configuration tells its own length."""
    assert ctypes.sizeof(UniqueId) == 128
    config = nccl_library.Config.not_blocking()
    assert (config.size, config.magic, config.version, config.blocking) == (24, 0xCAFEBEEF, 21400, 0)


def test_one_rank_joins_itself_and_is_aborted_before_the_job_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    library = Library(str(fake_nccl.built_library()), "nccl")
    made = nccl_comm.Communicator(library, library.unique_id(), 1, 0, "a group", 10.0)
    made.settle()
    assert made.is_open
    made.look()
    ending.prepare_abort()
    assert not made.is_open
    with pytest.raises(CommError, match=r"NCCL 2\.27\.3 over a group cannot be used any more: the job has ended"):
        made.settle()
    made.close()  # of one that was aborted nothing is left to close


def test_peers_that_do_not_come_end_in_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    library = Library(str(fake_nccl.built_library()), "nccl")
    made = nccl_comm.Communicator(library, library.unique_id(), 2, 0, "a group", 0.05)
    with pytest.raises(CommError, match=r"ncclCommInitRankConfig over a group waited 0\.05 s in vain: a rank of the"):
        made.settle()
    made.abort("its peer has not come")
    assert made not in nccl_comm._everyone()


def test_lanes_of_a_ring():
    assert nccl._neighbours(1) == []
    assert nccl._neighbours(2) == [(0, 1), (1, 0)]
    assert nccl._neighbours(3) == [(a, b) for a in range(3) for b in range(3) if a != b]
    assert (0, 2) not in nccl._neighbours(4)
    assert (3, 0) in nccl._neighbours(4)
