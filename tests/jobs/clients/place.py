"""Where cases run: the folder of the jobs of all numbers of ranks, and this job's number."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A job."""

    folder: Path
    ranks: int

    @property
    def own(self):
        """Folder for what no other job reads."""
        return self.folder / f"own{self.ranks}"
