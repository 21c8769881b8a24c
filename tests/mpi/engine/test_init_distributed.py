"""What `init_distributed` makes of arguments that were written for torch.distributed."""

import datetime
import inspect
import logging
import os
import re

import pytest

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.mesh import recorder

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
PLACE = ("MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_place(monkeypatch):
    """Neither before nor after a test."""
    for name in PLACE:
        monkeypatch.setenv(name, "")
        del os.environ[name]


def test_the_signature_is_that_of_deepspeed():
    found = {name: each.default for name, each in inspect.signature(mpispeed.init_distributed).parameters.items()}
    assert found == {
        "dist_backend": None, "auto_mpi_discovery": True, "distributed_port": 29500, "verbose": True,
        "timeout": datetime.timedelta(seconds=1800), "init_method": None, "dist_init_required": None, "config": None,
        "rank": -1, "world_size": -1,
    }  # fmt: skip


def test_no_port_is_claimed_unasked():
    mpispeed.init_distributed(timeout=None)
    assert not set(PLACE) & set(os.environ)


def test_a_meeting_place_for_other_code_is_that_of_rank_0(monkeypatch):
    world = mpispeed.init_distributed(init_method="env://")
    found = world.comm.gather_objects([os.environ[name] for name in PLACE])
    assert len(set(map(tuple, found))) == 1
    assert 10000 <= int(found[0][1]) < 30000
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("MASTER_ADDR", "chosen")
    mpispeed.init_distributed(distributed_port=29501)
    assert [os.environ[name] for name in PLACE] == ["chosen", "29501"]


def test_arguments_without_effect_are_named_once(caplog):
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    world = mpispeed.init_distributed(dist_backend="nccl", init_method="tcp://h:1")
    mpispeed.init_distributed(dist_backend="mpi", init_method="env://")
    logger.removeHandler(caplog.handler)
    wanted = ["dist_backend='nccl'", "init_method='tcp://h:1'"] if world.rank == 0 else []
    assert [re.search(r"\((.*?)\)", record.getMessage())[1] for record in caplog.records] == wanted


@pytest.mark.parametrize("name", ["rank", "world_size"])
def test_numbers_other_than_those_of_mpi_are_refused(world, name):
    mpispeed.init_distributed(rank=world.rank, world_size=world.size)
    found = world.rank if name == "rank" else world.size
    with pytest.raises(ConfigError, match=rf"init_distributed\({name}=7\): MPI says {found}"):
        mpispeed.init_distributed(**{name: 7})


def test_a_later_call_on_one_rank_waits_for_nobody(world):
    if world.rank == 0:
        assert mpispeed.init_distributed() is world


def test_a_timeout_that_is_given_is_the_least_that_ranks_wait(world):
    with pytest.raises(ConfigError, match=r"timeout='soon'.*datetime.timedelta"):
        mpispeed.init_distributed(timeout="soon")
    book = recorder.current()
    before = book.header["hang_seconds"].copy() if book is not None else None
    mpispeed.init_distributed(timeout=datetime.timedelta(minutes=70))
    if book is not None:
        assert book.header["hang_seconds"][0] == 4200
        book.header["hang_seconds"] = before
