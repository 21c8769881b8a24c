"""The record that a run keeps of itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mpispeed.config.section import Positive, Section, either


class RunRecord(Section):
    """One HDF5 file for each job with series of all ranks, settings, versions and events. mpispeed only."""

    enabled: Annotated[bool | Literal["auto"], either('"auto", true or false')] = Field(
        "auto", description="Write the record; auto: where MPISPEED_RUN_DIR names a folder of the run."
    )
    path: str | None = Field(
        None,
        description="Folder, in which it is run.h5, or a name that ends in .h5; -2, -3, ... is added to a name that is "
        "taken. null: MPISPEED_RUN_DIR, else the folder runs.",
    )
    every: Positive = Field(
        10,
        description="Steps between rows of other ranks, and between totals of communication; with more than 64 ranks "
        "so many times longer that the file does not grow faster.",
    )
    rows: Annotated[Positive, Field(le=2**32)] = Field(
        65536, description="Points that the file has space for at first (40 bytes each); it grows when they are used."
    )
