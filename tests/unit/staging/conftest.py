"""A place for environments of nodes."""

import pytest


@pytest.fixture
def place(tmp_path, monkeypatch):
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.setenv("MPISPEED_STAGE_DIR", str(folder))
    return folder
