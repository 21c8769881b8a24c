"""Reading of training data."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mpispeed.config.section import Natural, Real, Section


class DataLoader(Section):
    """Reading of `training_data`, and what loaders of `engine.deepspeed_io` do unless told otherwise. mpispeed only."""

    workers: Annotated[Natural, Field(le=1024)] = Field(
        0, description="Processes of each rank that read; 0: the rank itself. They are forked and never use MPI."
    )
    prefetch: Annotated[Natural, Field(le=4096)] | None = Field(
        None,
        description="Batches of a rank that are read ahead, without workers by a thread. null: 2 with workers or for "
        "data sets that read whole batches, else 0, because samples may be made with the model's random numbers.",
    )
    persistent_workers: bool = Field(
        False, description="Workers stay from epoch to epoch, with the data set as it was at first."
    )
    pin_memory: bool = Field(
        True, description="Batches that go to a GPU are copied out of page-locked memory, beside its work."
    )
    stall_warning: Annotated[Real, Field(ge=0, le=1)] = Field(
        0.1, description="Warn if a rank waits for data so great a part of the time of 50 steps; 0: never."
    )
    copy_to: str | None = Field(
        None,
        description="Folder on each node's disk to which one of its ranks copies the files of the data set for the "
        "time of the run, with $VARIABLES of that node.",
    )
