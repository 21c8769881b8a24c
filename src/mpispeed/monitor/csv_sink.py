"""One CSV file per series, appended to across restarts."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from mpispeed.monitor.sink import folder_of


class CsvSink:
    """Writes rows `x,value` to `<folder>/<series with / and spaces as _>.csv`.

    A file begins with the row `step,<last part of the series' name>`, written only when it is empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> CsvSink:
        """Make the sink of a `csv_monitor` section."""
        return cls(folder_of(section))

    def write(self, series: str, value: float, x: int) -> None:
        """Append one row."""
        csv.writer(self._file(series), lineterminator="\n").writerow([x, float(value)])

    def flush(self) -> None:
        """Bring all rows to the files."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Close all files; a later write opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, series: str) -> TextIO:
        if series not in self._files:
            path = self.folder / (series.replace("/", "_").replace(" ", "_") + ".csv")
            self._files[series] = file = path.open("a", newline="", encoding="utf-8")
            if file.tell() == 0:
                csv.writer(file, lineterminator="\n").writerow(["step", series.rsplit("/", 1)[-1]])
        return self._files[series]
