"""The section about sequences that are cut over ranks."""

from __future__ import annotations

from pydantic import Field

from mpispeed.config.section import Positive, Section


class SequenceParallel(Section):
    """Sequences cut over `sequence_parallel_size` ranks."""

    ring_size: Positive = Field(
        1,
        description="Ranks of a ring, around which keys and values travel; the ranks at each place of it, "
        "sequence_parallel_size / ring_size neighbours, exchange heads for sequence (Ulysses).",
    )
    cuts_batches: bool = Field(
        True,
        description="The engine cuts batches along the sequence; false: the script or its loader hands each rank its "
        "own part.",
    )
