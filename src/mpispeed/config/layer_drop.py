"""Progressive layer drop."""

from __future__ import annotations

from pydantic import Field

from mpispeed.config.section import Fraction, NonNegative, Section, Seed


class ProgressiveLayerDrop(Section):
    """Leave out layers of training passes, the more the deeper they are and the longer the run (arXiv 2010.13369)."""

    enabled: bool = Field(False, description="Leave out layers.")
    theta: Fraction = Field(1.0, description="Probability with which the last layer runs in the end; the paper: 0.5.")
    gamma: NonNegative = Field(0.001, description="Rate at which theta falls from 1; the paper: 100 / steps.")
    seed: Seed = Field(1234, description="Seed of the decisions (mpispeed only).")
