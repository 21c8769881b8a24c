import logging

import pytest


@pytest.fixture(autouse=True)
def _records_reach_caplog(monkeypatch):
    """Other tests may have set the package's own handler up, which ends propagation."""
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
