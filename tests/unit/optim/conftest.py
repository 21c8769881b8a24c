"""Warnings of the package reach `caplog` whatever other tests did to its logger."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _propagating_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
