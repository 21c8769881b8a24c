"""Worker processes that fail, are killed, get signals, or lose their parent."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from mpispeed.base.errors import DataError
from mpispeed.data import ShardedLoader, workers
from tests.helpers.system import CHECKOUT


class Failing(Dataset):
    """Sample 5 does what it is told to do."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            self.act()
        return torch.tensor(index)


def fail() -> None:
    raise KeyError("x")


def loader_of(data: Any, **more: Any) -> ShardedLoader:
    return ShardedLoader(data, micro_batch=2, rank=0, size=1, shuffle=False, **more)


@pytest.mark.parametrize(
    "way", [{}, {"prefetch": 2}, {"workers": 2}, {"workers": 2, "persistent_workers": True}], ids=str
)
def test_an_error_names_its_sample_and_comes_once(way: dict[str, Any]) -> None:
    loader = loader_of(Failing(fail), **way)
    batches = iter(loader)
    assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match=r"^sample 5 of the data cannot be read: KeyError: 'x'$") as told:
        next(batches)
    assert told.value.__cause__ is not None
    if "workers" in way:
        assert "in fail" in str(told.value.__cause__)
    with pytest.raises(StopIteration):
        next(batches)
    assert loader.position == 4
    with pytest.raises(DataError, match="sample 5"):
        next(iter(loader))
    loader.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("way", [{}, {"workers": 1}], ids=str)
def test_what_is_no_batch_is_told_with_its_samples(way: dict[str, Any]) -> None:
    ragged = [torch.zeros(length) for length in (2, 2, 3, 2)]
    with pytest.raises(DataError, match=r"^samples 2, 3 cannot be made into a batch: RuntimeError: "):
        list(loader_of(ragged, **way))


def test_what_cannot_be_sent_is_told() -> None:
    with pytest.raises(DataError, match=r"cannot be sent by a worker process.*data_loader.workers 0"):
        list(loader_of([1, 2], collate_fn=lambda samples: lambda: samples, workers=1))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL (often for want of memory)"),
        (lambda: os._exit(3), "ended with status 3"),
        (lambda: sys.exit(4), "ended with status 4"),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_worker_that_dies_is_a_sentence(act: Any, text: str, prefetch: int) -> None:
    loader = loader_of(Failing(act), workers=2, prefetch=prefetch, persistent_workers=True)
    with pytest.raises(DataError) as told:
        list(loader)
    assert f"of the data loader {text} while it read samples 4, 5; fewer workers" in str(told.value)
    assert loader.position == 4
    assert not multiprocessing.active_children()
    loader.close()


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STOP_SECONDS", 0.2)
    batches = iter(loader_of(Failing(lambda: time.sleep(600)), workers=2, prefetch=6))
    next(batches)
    batches.close()
    assert not multiprocessing.active_children()


def test_signals_to_the_job_do_not_end_workers() -> None:
    loader = loader_of(range(40), workers=2)
    batches = iter(loader)
    first = next(batches)
    for child in multiprocessing.active_children():
        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
            os.kill(child.pid, getattr(signal, name))
    assert torch.cat([first, *batches]).tolist() == list(range(40))


def test_workers_can_be_made_in_any_thread() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.extend(loader_of(range(8), workers=2)))
    thread.start()
    thread.join()
    assert torch.cat(found).tolist() == list(range(8))


def test_other_children_do_not_keep_workers_alive() -> None:
    """A second loader's workers, and any other child, have no hold on those of the first."""
    first, second = (loader_of(range(40), workers=2) for _ in range(2))
    one, two = iter(first), iter(second)
    next(one), next(two)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    one.close()
    assert len(multiprocessing.active_children()) == 3
    two.close()
    child.kill()
    child.join()


PARENT = """
import os, signal, sys, time
import torch
from mpispeed.data import ShardedLoader

class Slow:
    def __len__(self): return 100
    def __getitem__(self, index):
        if index > 3: time.sleep(600)
        return index

batches = iter(ShardedLoader(Slow(), micro_batch=1, rank=0, size=1, shuffle=False, workers=2))
next(batches)
own = os.getpid()
print(open(f"/proc/{own}/task/{own}/children").read(), flush=True)
how = sys.argv[1]
if how == "kill":
    os.kill(own, signal.SIGKILL)
if how == "error":
    raise SystemExit("enough")
"""


@pytest.mark.parametrize("how", ["kill", "error"])
def test_workers_die_with_their_parent(how: str) -> None:
    """At once when it is killed, though they are within a read of ten minutes."""
    made = subprocess.run(
        [sys.executable, "-c", PARENT, how], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": CHECKOUT},
    )  # fmt: skip
    assert made.returncode == (-signal.SIGKILL if how == "kill" else 1), made.stderr
    pids = made.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_subclasses_and_gradients_travel_too() -> None:
    class Odd(Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return (
                torch.nn.Parameter(torch.ones(2) * index),
                torch.eye(3).to_sparse(),
                torch.ones(2, requires_grad=True),
            )

    ((parameter, sparse, grown),) = loader_of(Odd(), collate_fn=lambda samples: samples[1], workers=1)
    assert isinstance(parameter, torch.nn.Parameter)
    assert sparse.is_sparse and torch.equal(sparse.to_dense(), torch.eye(3))
    assert grown.requires_grad and pickle.dumps(grown)
