"""Whose processes meet at env://: the ranks of MPI, or those of another launcher."""

import os

import pytest
import torch.distributed as dist

from mpispeed.base import launched
from mpispeed.process_group import registration

NAMES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "RANK", "WORLD_SIZE", "MASTER_ADDR",
         "MASTER_PORT", "TORCHELASTIC_RUN_ID", "MPISPEED_RANK_PID")  # fmt: skip
PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCH = {**PLACE, "RANK": "0", "WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(registration, "current", lambda: None)
    monkeypatch.setitem(registration._STATE, "pid", os.getpid())
    monkeypatch.setitem(registration._STATE, "join", None)


@pytest.mark.parametrize(
    ("environment", "url", "wanted"),
    [
        ({}, "env://", True),
        ({"PMI_SIZE": "4"}, "env://", True),
        (PLACE, "env://", True),  # one rank in a batch script that exports an address
        ({"PMI_SIZE": "1", **PLACE}, "env://", True),
        ({"PMI_SIZE": "4", **TORCH}, "env://", True),  # mpispeed run --torch-env
        ({"PMI_SIZE": "4", **PLACE}, "env://?rank=1&world_size=4", True),
        ({"PMI_SIZE": "4", **PLACE}, "env://?rank=1&world_size=2", False),  # children of a rank
        ({"PMI_SIZE": "4"}, "env://?rank=1&world_size=2", True),  # where it is refused
        (PLACE, "env://?rank=1&world_size=2", False),  # torch.multiprocessing
        (TORCH, "env://", False),  # accelerate launch
        ({**TORCH, "TORCHELASTIC_RUN_ID": "x"}, "env://", False),
        ({"PMI_SIZE": "4", **TORCH, "TORCHELASTIC_RUN_ID": "x"}, "env://", False),
    ],
)
def test_whose_processes_meet(monkeypatch, environment, url, wanted):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert registration.is_ours(url) is wanted


def test_a_child_by_fork_is_no_rank(monkeypatch):
    monkeypatch.setitem(registration._STATE, "pid", os.getpid() + 1)
    monkeypatch.setenv("PMI_SIZE", "4")
    assert not registration.is_ours("env://")


def test_what_a_rank_starts_is_no_rank(monkeypatch):
    """Though it inherits all variables of the launcher, and meets others like it under an address of their own."""
    for name, value in {"PMI_SIZE": "4", **TORCH}.items():
        monkeypatch.setenv(name, value)
    for pid, wanted in (
        (os.getppid(), False),
        (os.getpid(), True),
        (10**9, True),
    ):  # the last one is of another machine
        monkeypatch.setenv("MPISPEED_RANK_PID", str(pid))
        assert registration.is_ours("env://") is wanted


def test_ranks_of_a_job_that_a_rank_starts_are_ranks(monkeypatch):
    for name, value in {"PMI_SIZE": "4", **TORCH, "MPISPEED_RANK_PID": str(os.getppid())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launched, "LAUNCHERS", (launched._name_and_parent(os.getppid())[0],))
    assert registration.is_ours("env://")


def test_only_devices_that_it_supports_are_its_own():
    registration.register(lambda: None)
    devices = dist.Backend.default_device_backend_map
    assert [device for device, backend in devices.items() if backend == registration.BACKEND] == []
    assert (devices["cpu"], devices["cuda"]) == ("gloo", "nccl")
