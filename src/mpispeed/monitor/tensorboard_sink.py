"""TensorBoard event files, through torch's writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.monitor.sink import folder_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Writes one scalar per point to an event file in `folder`."""

    def __init__(self, folder: Path) -> None:
        # Imported here because it takes over a second and the package is an option.
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self._writer: SummaryWriter = SummaryWriter(log_dir=str(folder))

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> TensorBoardSink:
        """Make the sink of a `tensorboard` section."""
        return cls(folder_of(section))

    def write(self, series: str, value: float, x: int, *, time: float | None = None) -> None:
        """Add one scalar; `time` is in seconds since 1970, now if it is left out."""
        self._writer.add_scalar(series, value, x, walltime=time)

    def flush(self) -> None:
        """Bring all scalars to the event file."""
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()
