"""Batches ahead, workers, stalls and copies on the node's disk, under an engine: what all ranks see together."""

import logging
import multiprocessing
import os
import re
import threading
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from mpispeed.base.errors import ConfigError, DataError
from mpispeed.data import SampleOrder
from mpispeed.data.node_copies import COPIED
from mpispeed.engine.data_loading import WAIT_MS
from mpispeed.tokens.store import open_store
from mpispeed.tokens.windows import TokenWindows
from tests.helpers.token_stores import make_store
from tests.zoo.models import BATCH, WIDTH
from tests.zoo.training import ADAM, config, start

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 3, 4)]
LENGTH = 5 * BATCH


class Rows(Dataset):
    """Rows of a file of numbers; the first number of each is its index."""

    def __init__(self, path, sleep=0.0):
        self.path, self.sleep = str(path), sleep
        self.file = os.open(path, os.O_RDONLY)

    def __len__(self):
        return LENGTH

    def read_batch(self, indices):
        time.sleep(self.sleep)
        rows = [os.pread(self.file, 4 * WIDTH, 4 * WIDTH * index) for index in indices]
        x = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.float32).view(-1, WIDTH)
        return x, x[:, :2] + 1

    def __getitem__(self, index):
        x, y = self.read_batch([index])
        return x[0], y[0]

    def files(self):
        return [self.path]

    def reopened(self, paths):
        return Rows(paths[self.path], self.sleep)


@pytest.fixture
def rows(comm, mpi_tmp_path):
    path = mpi_tmp_path / "rows.bin"
    if comm.rank == 0:
        x = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)) / 8
        x[:, 0] = torch.arange(LENGTH)
        path.write_bytes(x.numpy().tobytes())
    comm.barrier()
    return path


def trained(engine, loader, steps):
    """Indices of each global batch, and the losses of this rank."""
    indices, losses = [], []
    for _, (x, y) in zip(range(steps), loader, strict=False):
        mine = x[:, 0].long().tolist()
        indices.append(list(chain.from_iterable(engine.mesh["data"].gather_objects(mine))))
        loss = engine(x / LENGTH, y / LENGTH)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return indices, losses


WAYS = [{"prefetch": 3}, {"workers": 4, "prefetch": 6}, {"workers": 1, "persistent_workers": True}]


def test_samples_and_losses_are_those_of_reading_at_once(rows, mpi_tmp_path):
    settings = config(1, **ADAM)
    plain = start(settings | {"data_loader": {"prefetch": 0}}, training_data=Rows(rows))
    expected = trained(plain, plain.training_dataloader, 5)
    plain.destroy()
    order = SampleOrder(LENGTH, 1234, shuffle=True)
    assert expected[0] == [order.indices(range(k, k + BATCH)) for k in range(0, LENGTH, BATCH)]
    for way in WAYS:
        engine = start(settings | {"data_loader": way}, training_data=Rows(rows))
        loader = engine.training_dataloader
        first = trained(engine, loader, 2)
        engine.save_checkpoint(str(mpi_tmp_path / "saved"), tag=str(way.get("prefetch", 0)))
        rest = trained(engine, loader, 9)
        engine.load_checkpoint(str(mpi_tmp_path / "saved"), tag=str(way.get("prefetch", 0)))
        again = trained(engine, loader, 9)
        assert (first[0] + rest[0], first[1] + rest[1]) == expected
        assert again == rest
        engine.destroy()
        assert not multiprocessing.active_children()
        assert not [thread for thread in threading.enumerate() if thread.name == "mpispeed-data"]


def test_loaders_of_scripts_follow_the_section(rows):
    engine = start(config(1, **ADAM, data_loader={"workers": 2}))
    loader = engine.deepspeed_io(Rows(rows))
    assert (loader.workers, engine.deepspeed_io(Rows(rows), num_local_io_workers=0).workers) == (2, 0)
    assert sorted(chain.from_iterable(trained(engine, loader, 5)[0])) == list(range(LENGTH))
    whole = engine.deepspeed_io(Rows(rows), batch_size=7, route="eval")
    assert (whole.num_workers, len(whole)) == (2, -(-LENGTH // 7))
    assert torch.cat([x for x, _ in whole])[:, 0].long().tolist() == list(range(LENGTH))
    batches = iter(loader)
    next(batches)
    assert multiprocessing.active_children()
    engine.destroy()
    assert not multiprocessing.active_children()


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank_names_its_sample(comm, rows):
    """The others have their batch; what ends a job is the error of that rank."""
    data = Rows(rows)
    if comm.rank == 1:
        data.read_batch = lambda indices: 1 / 0
    engine = start(config(1, **ADAM, data_loader={"workers": 1}), training_data=data)
    batches = iter(engine.training_dataloader)
    if comm.rank == 1:
        with pytest.raises(DataError, match=r"^samples \d+(, \d+)+.* of the data cannot be read: ZeroDivision"):
            next(batches)
    else:
        next(batches)
    engine.destroy()


def test_a_stall_is_told_with_the_slowest_rank(comm, rows, caplog, monkeypatch, mpi_tmp_path):
    monkeypatch.setattr("mpispeed.engine.data_loading.WINDOW", 3)
    slow = comm.size - 1
    csv = {"enabled": True, "output_path": str(mpi_tmp_path), "job_name": "run"}
    settings = config(1, **ADAM, data_loader={"prefetch": 0, "stall_warning": 0.01}, csv_monitor=csv)
    engine = start(settings, training_data=Rows(rows, 0.05 if comm.rank == slow else 0.0))
    with caplog.at_level(logging.WARNING, "mpispeed"):
        trained(engine, engine.training_dataloader, 5)
    engine.destroy()  # before anything can fail on one rank only
    told = [record.getMessage() for record in caplog.records if "data stalled" in record.getMessage()]
    if comm.rank == 0:
        (text,) = told
        found = re.fullmatch(
            rf"data stalled steps 2 to 4 on rank {slow}: (\d+) ms of (\d+) ms per step \((\d+) %\); "
            "data_loader.prefetch reads batches ahead, data_loader.workers in processes of their own", text
        )  # fmt: skip
        wait, step, share = map(int, found.groups())
        assert 50 <= wait <= step + 1
        assert share == pytest.approx(100 * wait / step, abs=2)
        lines = (mpi_tmp_path / "run" / f"{WAIT_MS.replace('/', '_')}.csv").read_text().split()
        points = [line.split(",") for line in lines[1:]]
        assert [int(x) for x, _ in points] == [BATCH * k for k in range(1, 6)]
        assert all(float(value) >= 50 for _, value in points)
    else:
        assert told == []


def test_stalls_can_be_left_unsaid(rows, caplog, monkeypatch):
    monkeypatch.setattr("mpispeed.engine.data_loading.WINDOW", 2)
    engine = start(config(1, **ADAM, data_loader={"stall_warning": 0, "prefetch": 0}), training_data=Rows(rows, 0.01))
    with caplog.at_level(logging.WARNING, "mpispeed"):
        trained(engine, engine.training_dataloader, 5)
    assert "stalled" not in caplog.text
    engine.destroy()


def test_files_are_copied_once_for_a_node_and_removed(comm, rows, mpi_tmp_path, monkeypatch):
    disk = mpi_tmp_path / "disk"
    monkeypatch.setenv("NODE_DISK", str(disk))
    settings = config(1, **ADAM, data_loader={"copy_to": "$NODE_DISK/deep", "workers": 1})
    engine = start(settings, training_data=Rows(rows))
    data = engine.training_dataloader.dataset
    copy = Path(data.path)
    assert copy.parent.parent == disk / "deep" / COPIED.parent_name
    assert copy.read_bytes() == rows.read_bytes()
    assert len(set(comm.gather_objects(str(copy)))) == 1
    assert [path.name for path in sorted((disk / "deep").rglob("*.*")) if path.is_file()] == ["0.bin", "owner.json"]
    rows.unlink(missing_ok=True)  # nothing is read there any more
    indices, _ = trained(engine, engine.training_dataloader, 5)
    assert sorted(chain.from_iterable(indices)) == list(range(LENGTH))
    engine.destroy()
    comm.barrier()
    assert [path for path in disk.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: None, r"needs?.* are free"),
        (lambda data: setattr(data, "path", "/nowhere/x"), r"/nowhere/x cannot be copied: No such file"),
        (lambda data: setattr(data, "path", "/dev"), r"/dev is no file that can be copied"),
        (
            lambda data: setattr(data, "reopened", lambda paths: 1 / 0),
            r"the copies of the data cannot be opened.*ZeroDiv",
        ),
        (lambda data: setattr(data, "files", None), r"a Rows does not say which files it reads"),
    ],
)
def test_what_cannot_be_copied_is_one_sentence_on_all_ranks(comm, rows, mpi_tmp_path, monkeypatch, change, text):
    """On the last rank of the node alone, where ranks differ."""
    data = Rows(rows)
    if comm.rank == comm.size - 1:
        change(data)
    if "free" in text:
        monkeypatch.setattr("mpispeed.data.node_copies.free_bytes", lambda folder: 100)
    with pytest.raises(ConfigError, match=text):
        start(config(1, **ADAM, data_loader={"copy_to": str(mpi_tmp_path / "disk")}), training_data=data)
    comm.barrier()
    assert [path for path in (mpi_tmp_path / "disk").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("way", [{}, {"workers": 4, "prefetch": 6}], ids=str)
def test_a_token_store_is_read_from_its_copy(comm, mpi_tmp_path, way):
    """The same bytes as without a loader, on any number of ranks; one file for each node."""
    if comm.rank == 0:
        make_store(mpi_tmp_path / "text.h5", documents=40)
    comm.barrier()
    windows = TokenWindows(open_store(mpi_tmp_path / "text.h5", comm), 8)
    settings = config(1, **ADAM, data_loader={"copy_to": str(mpi_tmp_path / "disk")} | way)
    engine = start(settings, training_data=windows)
    loader, order = engine.training_dataloader, SampleOrder(len(windows), 1234, shuffle=True)
    assert loader.dataset.store.path.is_relative_to(mpi_tmp_path / "disk")
    mine = torch.cat([torch.cat([batch["input_ids"], batch["labels"]], 1) for batch in loader])
    parts = comm.gather_objects(mine.view(len(loader), -1, 16))
    for step, rows in enumerate(torch.cat(parts, 1)):
        places = range(step * BATCH, (step + 1) * BATCH)
        expected = windows.read_batch(order.indices([place % len(windows) for place in places]))
        assert torch.equal(rows, torch.cat([expected["input_ids"], expected["labels"]], 1))
    engine.destroy()


def test_a_variable_that_is_not_set_is_told(rows):
    with pytest.raises(ConfigError, match=r"'\$NO_SUCH_DISK/x' has a variable that is not set there"):
        start(config(1, **ADAM, data_loader={"copy_to": "$NO_SUCH_DISK/x"}), training_data=Rows(rows))
