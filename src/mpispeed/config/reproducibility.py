"""The section about runs whose bits do not depend on the ranks."""

from __future__ import annotations

from pydantic import Field

from mpispeed.config.section import Positive, Section


class Reproducibility(Section):
    """Conditions of equal bits at any number of ranks, with `reduction` "invariant"."""

    threads: Positive = Field(1, description="Threads with which each rank computes; kept in checkpoints.")
