"""The section about runs whose bits do not depend on the ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from mpispeed.config.section import Section, require_whole

Threads = Annotated[int, Field(ge=1, le=1024), BeforeValidator(require_whole)]
"""More threads than any node has end in an abort of the library that starts them."""


class Reproducibility(Section):
    """Conditions of equal bits at any number of ranks, with `reduction` "invariant"."""

    threads: Threads = Field(1, description="Threads with which each rank computes; kept in checkpoints.")
