"""Token stores and real processes: one open file for all ranks of a node, one stream for any number of them."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from mpispeed.data import SampleOrder, ShardedLoader
from mpispeed.tokens import descriptor
from mpispeed.tokens.errors import NoTokenStore, TokenStoreError, UnfinishedStore
from mpispeed.tokens.store import open_store
from mpispeed.tokens.windows import TokenWindows
from tests.helpers.token_stores import make_store

pytestmark = pytest.mark.mpi

LENGTH, SEED, GLOBAL_BATCH = 24, 9, 12
OPENED: list[str] = []


def note_opens(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        OPENED.append(os.fsdecode(arguments[0]))


sys.addaudithook(note_opens)


@pytest.fixture
def folder(comm):
    """One new folder, the same on all ranks."""
    path = Path(comm.share(tempfile.mkdtemp(prefix="mpispeed-tokens-") if comm.rank == 0 else None))
    yield path
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


@pytest.fixture
def made(comm, folder):
    """A store that rank 0 has written, and what is in it."""
    return comm.share(make_store(folder / "store.h5", documents=300) if comm.rank == 0 else None)


def opens_of(path):
    return sum(opened == str(path) for opened in OPENED)


def test_a_node_opens_the_file_once(comm, made):
    before = opens_of(made.path)
    with open_store(made.path, node=comm) as store:
        assert sum(comm.gather_objects(opens_of(made.path) - before)) == 1
        # all descriptors are of one open file: they share its position
        if comm.rank == 0:
            os.lseek(store.fileno(), 1234, os.SEEK_SET)
        comm.barrier()
        assert os.lseek(store.fileno(), 0, os.SEEK_CUR) == 1234
        assert not os.get_inheritable(store.fileno())
        assert np.array_equal(store.read(0, store.token_count).numpy(), made.tokens)
        assert store.facts["eos"] == 1
    comm.barrier()


def test_ranks_that_cannot_share_a_descriptor_open_the_file_by_themselves(comm, made, monkeypatch):
    monkeypatch.setattr(descriptor, "_listener", lambda _: None)
    before = opens_of(made.path)
    with open_store(made.path, node=comm) as store:
        assert sum(comm.gather_objects(opens_of(made.path) - before)) == comm.size
        assert np.array_equal(store.read(0, store.token_count).numpy(), made.tokens)
    comm.barrier()


@pytest.mark.parametrize("kind", [NoTokenStore, UnfinishedStore, TokenStoreError])
def test_what_the_first_rank_cannot_open_is_one_error_for_all(comm, folder, made, kind):
    from mpispeed.tokens.create import create

    path = folder / "other.h5"
    if comm.rank == 0:
        if kind is UnfinishedStore:
            create(path, tokens=10, documents=2, dtype="u2")
        elif kind is TokenStoreError:
            path.write_bytes(made.path.read_bytes()[:70_000])
    comm.barrier()
    with pytest.raises(TokenStoreError) as caught:
        open_store(path, node=comm)
    assert type(caught.value) is kind
    assert caught.value.is_collective
    assert len(set(comm.gather_objects(str(caught.value)))) == 1


def loader_of(samples, rank, size, workers=0):
    return ShardedLoader(
        samples,
        micro_batch=GLOBAL_BATCH // size,
        rank=rank,
        size=size,
        seed=SEED,
        step_samples=GLOBAL_BATCH,
        workers=workers,
    )


def expected(samples, made, steps, first=0):
    """Global batches by the definition: the order is a function of the position, a sample of its number."""
    order = SampleOrder(len(samples), SEED, shuffle=True)
    for step in range(first, steps):
        numbers = order.indices(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
        yield torch.tensor(np.array([made.tokens[number * LENGTH : (number + 1) * LENGTH] for number in numbers]))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_is_the_same_on_any_number_of_ranks_and_goes_on_on_any_other(comm, made, workers):
    steps, whole = 9, torch.empty(GLOBAL_BATCH, LENGTH, dtype=torch.int64)
    with open_store(made.path, node=comm) as store:
        samples = TokenWindows(store, LENGTH)
        assert len(samples) > 2 * steps * GLOBAL_BATCH  # all of it is within an epoch
        loader = loader_of(samples, comm.rank, comm.size, workers)
        batches = iter(loader)
        for wanted in expected(samples, made, steps):
            comm.all_gather(whole, next(batches)["input_ids"].contiguous())
            assert torch.equal(whole, wanted)
        state = loader.state_dict()
        assert state["position"] == steps * GLOBAL_BATCH
        for size in (1, 2, 3, 4):
            others = [loader_of(samples, rank, size) for rank in range(size)]
            for other in others:
                other.load_state_dict(state)
            streams = [iter(other) for other in others]
            for wanted in expected(samples, made, steps + 3, first=steps):
                found = torch.cat([next(stream)["input_ids"] for stream in streams])
                assert torch.equal(found, wanted)
        del batches
    comm.barrier()
