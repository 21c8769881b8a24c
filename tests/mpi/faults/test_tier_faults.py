"""A disk that fails on one rank: the same error on all of them, within seconds, and nothing is left behind."""

import errno
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch

from mpispeed.base.errors import ConfigError, StoreError
from mpispeed.engine.build import nvme_tiers
from mpispeed.native.block_io import inject
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, own_part, start, train_averaged, weights

pytestmark = pytest.mark.ranks(1, 3)

PROMPT_SECONDS = 30
BATCH = 24


@pytest.fixture
def disk():
    """A folder that all ranks name alike; no request goes wrong any more afterwards."""
    from mpi4py import MPI

    made = tempfile.mkdtemp(prefix="mpispeed-test-", dir="/var/tmp") if MPI.COMM_WORLD.rank == 0 else None
    folder = Path(MPI.COMM_WORLD.bcast(made))
    yield folder
    for op in ("read", "write"):
        inject(op, nth=0)
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        shutil.rmtree(folder)


def settings(stage, folder, *, accumulation=1, dtype="bf16", params=True, **optimizer):
    """Everything swapped, nothing gathered ahead and nothing kept, so that every use reads."""
    on_disk = {"device": "nvme", "nvme_path": str(folder)}
    sections = {"offload_optimizer": {**on_disk, **optimizer}, "sub_group_size": 8192}
    if stage == 3 and params:
        sections["offload_param"] = {**on_disk, "max_in_cpu": 0}
        sections |= {
            "stage3_max_live_parameters": 2048,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    return config(stage, BATCH * accumulation, accumulation, dtype=dtype, zero=sections, **WARM)


def fail_on_last(comm, op, **how):
    """The last rank's disk goes wrong."""
    if comm.rank == comm.size - 1:
        inject(op, **how)


def check_told(comm, error, reason, seconds):
    """All ranks know which rank, which file and why, and knew soon."""
    texts = comm.gather_objects(str(error.value))
    assert len(set(texts)) == 1, texts
    assert reason in texts[0]
    assert ".swap" in texts[0]
    assert comm.size == 1 or f"rank {comm.size - 1}" in texts[0]
    assert error.value.is_collective or comm.size == 1
    assert seconds < PROMPT_SECONDS


def check_gone(comm, folder):
    """No swap file is left."""
    comm.barrier()
    assert not list(folder.rglob("*.swap"))
    comm.barrier()


def forward_place(engine, data, fail):
    fail("read")
    engine(*own_part(engine, data[1]))


def later_forward_place(engine, data, fail):
    fail("read", nth=3)
    engine(*own_part(engine, data[1]))


def backward_place(engine, data, fail):
    loss = engine(*own_part(engine, data[1]))
    fail("read")
    engine.backward(loss)


def gradient_write_place(engine, data, fail):
    loss = engine(*own_part(engine, data[1]))
    fail("write")
    engine.backward(loss)
    engine.step()


def walk_read_place(engine, data, fail):
    engine.backward(engine(*own_part(engine, data[1])))
    fail("read")
    engine.step()


def later_walk_read_place(engine, data, fail):
    engine.backward(engine(*own_part(engine, data[1])))
    fail("read", nth=6)
    engine.step()


def walk_write_place(engine, data, fail):
    engine.backward(engine(*own_part(engine, data[1])))
    fail("write")
    engine.step()


def last_write_place(engine, data, fail):
    """With writes behind, a step that ends must have looked at its last writes."""
    engine.backward(engine(*own_part(engine, data[1])))
    fail("write", nth=8)
    engine.step()


PLACES = {
    "params for forward": (forward_place, (3,)),
    "other params for forward": (later_forward_place, (3,)),
    "params for backward": (backward_place, (3,)),
    "gradients written": (gradient_write_place, (2, 3)),
    "states read": (walk_read_place, (1, 2, 3)),
    "other states read": (later_walk_read_place, (3,)),
    "states written": (walk_write_place, (1, 2, 3)),
    "other states written": (last_write_place, (3,)),
}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize(
    ("place", "stage"), [(name, stage) for name, (_, stages) in PLACES.items() for stage in stages]
)
def test_all_ranks_hear_of_a_failure(place, stage, pipeline, disk, comm):
    engine = start(settings(stage, disk, pipeline_read=pipeline, pipeline_write=pipeline), TinyLM())
    data = batches(3, BATCH)
    train_averaged(engine, data[:1])
    comm.barrier()
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        PLACES[place][0](engine, data, lambda op, nth=1: fail_on_last(comm, op, nth=nth, errno=errno.EIO))
    check_told(comm, caught, os.strerror(errno.EIO), time.monotonic() - began)
    engine.destroy()
    check_gone(comm, disk)
    assert all(torch.isfinite(values).all() for values in weights(engine).values())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.mpi(min_size=1)
def test_gradients_that_cannot_be_read_back(disk, comm):
    engine = start(settings(2, disk, accumulation=2), TinyLM())
    data = batches(1, 2 * BATCH)
    engine.backward(engine(*own_part(engine, data[0])))
    engine.step()
    loss = engine(*own_part(engine, data[0], 1))
    fail_on_last(comm, "read", nth=1, errno=errno.EIO)
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        engine.backward(loss)
        engine.step()
    check_told(comm, caught, os.strerror(errno.EIO), time.monotonic() - began)
    engine.destroy()
    check_gone(comm, disk)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.mpi(min_size=1)
def test_after_a_failure_nothing_wrong_is_computed(disk, comm):
    """Several ranks fail again at once, because their channel is broken; one alone may read again."""
    first, engine = (start(settings(3, disk), TinyLM()) for _ in range(2))
    (batch,) = own_part(engine, batches(1, BATCH)[0])
    expected = float(first(batch).detach())
    first.destroy()
    fail_on_last(comm, "read", nth=2, errno=errno.EIO)
    with pytest.raises(StoreError):
        engine(batch)
    began = time.monotonic()
    if comm.size > 1:
        with pytest.raises(StoreError, match="could not be read"):
            engine(batch)
    else:
        assert float(engine(batch).detach()) == expected
    assert time.monotonic() - began < PROMPT_SECONDS
    engine.destroy()
    check_gone(comm, disk)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_short_transfer_goes_on_where_it_stopped(op, disk, comm):
    data = batches(3, BATCH)
    losses = []
    for nth in (0, 1, 4, 9):
        engine = start(settings(3, disk), TinyLM())
        if nth:
            fail_on_last(comm, op, nth=nth, after_bytes=512)
        losses.append(train_averaged(engine, data))
        engine.destroy()
    assert losses[1:] == losses[:1] * 3


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("nth", [1, 4, 7])
def test_a_write_that_fails_in_initialize(nth, disk, comm, monkeypatch):
    looked = nvme_tiers.preflight

    def look(*arguments):
        report = looked(*arguments)
        fail_on_last(comm, "write", nth=nth, errno=errno.ENOSPC)
        return report

    monkeypatch.setattr(nvme_tiers, "preflight", look)
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        start(settings(3, disk), TinyLM())
    check_told(comm, caught, os.strerror(errno.ENOSPC), time.monotonic() - began)
    check_gone(comm, disk)


@pytest.mark.mpi(min_size=1)
def test_a_write_that_fails_in_the_trial(disk, comm):
    fail_on_last(comm, "write", nth=1, errno=errno.ENOSPC)
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOSPC)):
        start(settings(3, disk), TinyLM())
    check_gone(comm, disk)


def own_file(engine, kind):
    """This rank's swap file."""
    return Path(engine.parts.params.tiers._files[kind].path)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("length", [0, 4096])
@pytest.mark.parametrize("kind", ["param", "master", "exp_avg", "grad"])
def test_a_file_cut_by_somebody_else(kind, length, disk, comm):
    engine = start(settings(3, disk), TinyLM())
    data = batches(3, BATCH)
    train_averaged(engine, data[:1])
    comm.barrier()
    if comm.rank == comm.size - 1:
        os.truncate(own_file(engine, kind), length)
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        train_averaged(engine, data[1:2])
    check_told(comm, caught, f"cut the file to {length} bytes", time.monotonic() - began)
    if kind == "param":
        with pytest.raises(StoreError, match="cut the file"):
            engine.destroy()
    else:
        engine.destroy()
    check_gone(comm, disk)


@pytest.mark.mpi(min_size=1)
def test_files_that_lose_their_names_or_rights_go_on(disk, comm):
    data = batches(4, BATCH)
    losses = []
    for is_changed in (False, True):
        engine = start(settings(3, disk), TinyLM())
        losses.append(train_averaged(engine, data[:1]))
        if is_changed:
            file = own_file(engine, "master")
            file.unlink()
            file.write_bytes(b"")  # somebody else's file of that name
            own_file(engine, "param").unlink()
            file.parent.chmod(0)
        losses[-1] += train_averaged(engine, data[1:])
        folder = own_file(engine, "grad").parent
        comm.barrier()
        if is_changed:
            folder.chmod(0o700)
        engine.destroy()
        check_gone(comm, disk)
    assert losses[0] == losses[1]


@pytest.mark.mpi(min_size=1)
def test_two_engines_have_their_own_files(disk, comm):
    data = batches(2, BATCH)
    first, second = (start(settings(3, disk), TinyLM()) for _ in range(2))
    assert own_file(first, "param") != own_file(second, "param")
    losses = train_averaged(first, data)
    fail_on_last(comm, "read", nth=1, errno=errno.EIO)
    with pytest.raises(StoreError):
        train_averaged(first, data)
    assert train_averaged(second, data) == losses
    for engine in (first, second):
        engine.destroy()
    check_gone(comm, disk)
