"""Checkpoints of every release are loaded by engines on other numbers of ranks, and train on."""

import json

import pytest
import torch

import mpispeed
from tests.helpers.release_files import CHECKPOINTS, EXPECTED, FOLDER, STEPS, model, settings, step, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
RELEASES = sorted(path for path in FOLDER.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_engines_load_them(release, name):
    told = json.loads((release / EXPECTED).read_text())["checkpoints"][name]
    engine = mpispeed.initialize(model=model(), config=settings(name))[0]
    path, client = engine.load_checkpoint(str(release / name))
    assert path.endswith("step3")
    assert client["note"] == "of this release"
    assert engine.global_steps == STEPS
    found = weights(engine)
    assert found == told
    assert torch.isfinite(torch.tensor(step(engine, STEPS)))
    assert weights(engine) != told
