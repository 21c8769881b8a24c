"""The site's file of defaults: rank 0 reads it once for all ranks, whose settings and records have it."""

import os
from pathlib import Path

import pytest

import mpispeed
from mpispeed import checkpointing
from mpispeed.base.errors import ConfigError
from mpispeed.base.site_file import VARIABLE, hold
from mpispeed.nn import activation_checkpointing
from mpispeed.record.reader import open_record
from tests.zoo.models import Net
from tests.zoo.training import ADAM, config

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]

TEXT = """
locked = ["zero_optimization.allgather_bucket_size", "activation_checkpointing.profile"]
[config]
gradient_clipping = 0.25
[config.zero_optimization]
allgather_bucket_size = 4000
[config.activation_checkpointing]
profile = true
"""


@pytest.fixture
def site(comm, tmp_path, monkeypatch):
    """The file, which only rank 0 can see."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if comm.rank == 0:
        tmp_path.chmod(0o700)
        path = tmp_path / "site.toml"
        path.write_text(TEXT)
        path.chmod(0o644)
        monkeypatch.setenv(VARIABLE, str(path))
    yield os.environ.get(VARIABLE)
    hold(None)


def test_rank_0_reads_for_all(comm, site, tmp_path):
    record = comm.share(str(tmp_path / "run.h5"))
    given = config(1, **ADAM, run_record={"enabled": True, "path": record, "rows": 16})
    engine = mpispeed.initialize(model=Net(), config=given)[0]
    assert engine.gradient_clipping() == 0.25
    assert engine.zero_allgather_bucket_size() == 4000
    engine.destroy()
    if comm.rank == 0:
        told = open_record(Path(record)).facts["site"]
        assert told["path"] == site
        assert told["locked"] == ["zero_optimization.allgather_bucket_size", "activation_checkpointing.profile"]


def test_locked_settings_are_refused_on_all_ranks(site):
    given = config(1)
    given["zero_optimization"]["allgather_bucket_size"] = 5000
    with pytest.raises(ConfigError, match=r"allgather_bucket_size: is locked at 4000 by .*site\.toml of "):
        mpispeed.initialize(model=Net(), config=given)


def test_a_file_that_is_wrong_is_told_on_all_ranks(site):
    if site:
        Path(site).chmod(0o666)
    with pytest.raises(ConfigError, match="can be written by others than its owner"):
        mpispeed.initialize(model=Net(), config=config(1))


def test_checkpointing_has_what_initialize_has_read(site):
    """`configure` with a config, on ranks that do not see the file."""
    engine = mpispeed.initialize(model=Net(), config=config(1))[0]
    try:
        checkpointing.configure(None, {"activation_checkpointing": {"number_checkpoints": 2}})
        options = activation_checkpointing.current().options
        assert (options.profile, options.number_checkpoints) == (True, 2)
        with pytest.raises(ConfigError, match="argument profile: is locked at true by "):
            checkpointing.configure(None, {}, profile=False)
    finally:
        activation_checkpointing.unconfigure()
        engine.destroy()
