"""Keeps pydantic from looking for plugins while the models of settings are made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "PYDANTIC_DISABLE_PLUGINS"


@contextmanager
def without_plugins() -> Iterator[None]:
    """Models made meanwhile have no plugins of pydantic; those made later have.

    Pydantic finds plugins by reading the entry points of every installed package, two files each, in every rank
    (https://docs.pydantic.dev/latest/concepts/plugins/). What plugins do, watching validations of an application's
    models, is of no use for settings.
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
