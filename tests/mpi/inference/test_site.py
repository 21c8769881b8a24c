"""The site's file of defaults in `init_inference`: rank 0 reads it for all, and what it says of training stays out."""

from pathlib import Path

import pytest
import torch

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.base.site_file import VARIABLE, current, hold
from mpispeed.engine.ownership import engine_of
from tests.zoo.models import Net

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]

TEXT = """
locked = ["zero_optimization.allgather_bucket_size", "zero_optimization.stage"]
[config]
gradient_clipping = 0.25
bf16 = {enabled = true}
[config.zero_optimization]
stage = 2
allgather_bucket_size = 4000
stage3_prefetch_bucket_size = 300
"""


@pytest.fixture
def site(comm, tmp_path, monkeypatch):
    """The file, which only rank 0 can see."""
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "site.toml"
    if comm.rank == 0:
        tmp_path.chmod(0o700)
        path.write_text(TEXT)
        path.chmod(0o644)
        monkeypatch.setenv(VARIABLE, str(path))
    yield path if comm.rank == 0 else None
    hold(None)


def test_its_section_for_parameters_counts_where_they_are_streamed(comm, site):
    engine = mpispeed.init_inference(Net(), dtype="fp32", zero={"stage": 3, "stage3_prefetch_bucket_size": 200})
    inner = engine_of(engine.module)
    assert inner.zero_allgather_bucket_size() == 4000
    assert inner.zero_prefetch_bucket_size() == 200
    assert inner.gradient_clipping() == 0
    assert {param.dtype for param in engine.module.parameters()} == {torch.float32}
    engine.destroy()
    assert comm.gather_objects(current().path) == [comm.share(str(site))] * comm.size  # not forgotten within


def test_a_locked_setting_is_refused_on_all_ranks(site):
    zero = {"stage": 3, "allgather_bucket_size": 5000}
    with pytest.raises(ConfigError, match=r"zero\.allgather_bucket_size: is locked at 4000 by .*site\.toml of "):
        mpispeed.init_inference(Net(), zero=zero)


def test_a_file_that_is_wrong_is_told_on_all_ranks(site):
    if site is not None:
        Path(site).chmod(0o666)
    with pytest.raises(ConfigError, match="can be written by others than its owner"):
        mpispeed.init_inference(Net())
