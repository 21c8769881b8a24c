"""Small stores in a folder of the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.token_stores import Made, make_store


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """Makes a store in a folder of the test."""

    def make_here(name: str = "store.h5", **settings: Any) -> Made:
        return make_store(tmp_path / name, **settings)

    return make_here
