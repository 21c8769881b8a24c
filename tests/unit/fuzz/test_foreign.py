"""Some hundred altered files of other programs: each is read rightly, or refused in a sentence, soon."""

import pytest

from tests.helpers import fuzz

CASES = {"safetensors": 70, "shards": 40, "torch": 90, "old torch": 50, "grouped": 40, "cut": 20, "universal": 20}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return fuzz.run("tests.unit.fuzz.foreign_kinds", CASES, tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", CASES)
def test_altered_files_are_read_rightly_or_refused(outcomes, kind):
    outcome = outcomes[kind]
    assert outcome.problems == []
    assert outcome.read + outcome.refused == CASES[kind]
    assert outcome.read
    assert outcome.refused >= CASES[kind] // 4
