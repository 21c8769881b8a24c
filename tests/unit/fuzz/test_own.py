"""Some hundred altered checkpoints and settings of our own: each is read rightly, or refused in a sentence, soon."""

import pytest

from tests.helpers import fuzz

CHECKPOINTS = {"model.h5": 130, "state.h5": 130, "manifest": 60}
SETTINGS = {"config": 90, "base64": 40}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    own = fuzz.run("tests.unit.fuzz.own_kinds", CHECKPOINTS, folder)
    return own | fuzz.run("tests.unit.fuzz.config_kinds", SETTINGS, folder)


@pytest.mark.parametrize(("kind", "cases"), [*CHECKPOINTS.items(), *SETTINGS.items()])
def test_altered_files_are_read_rightly_or_refused(outcomes, kind, cases):
    outcome = outcomes[kind]
    assert outcome.problems == []
    assert outcome.read + outcome.refused == cases
    assert outcome.read
    assert outcome.refused >= cases // 4
