"""Comet: an experiment on its server, or an archive that `comet upload` sends.

Not for processes of MPI: the library waits for its server for half a minute, and longer at its end. `remote.py` runs it
elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CometSink:
    """Logs points of a series whenever it is at least `samples_log_interval` samples after the one logged before.

    Args:
        section: a `comet` section, with the key itself as `api_key`.
        folder: archives go to its folder `comet`.
        is_online: send now. Otherwise nothing is sent, and no key is needed.
        run_id: continues this experiment.
        program: not used.
        environ: its COMET_OFFLINE_DIRECTORY is the folder for archives instead.

    Attributes:
        where: the address of an experiment that is sent, else its archive, complete after `close`.
        upload: the command that uploads the archive; empty if there is none.
        run_id: key of the experiment.

    Raises:
        OSError: the server refused the experiment.
        Exception: the library's own, for whatever keeps it from starting.
    """

    def __init__(
        self,
        section: Mapping[str, Any],
        folder: Path,
        *,
        is_online: bool = False,
        run_id: str | None = None,
        program: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        import comet_ml

        folder = Path((environ or {}).get("COMET_OFFLINE_DIRECTORY") or folder / "comet")
        folder.mkdir(parents=True, exist_ok=True)
        self._interval = int(section.get("samples_log_interval") or 100)
        self._logged: dict[str, int] = {}
        # Of this process neither the code, nor the arguments, nor the output tell anything about the run.
        settings = comet_ml.ExperimentConfig(
            offline_directory=str(folder), log_code=False, log_graph=False, parse_args=False, auto_output_logging=False,
            display_summary_level=0,
        )  # fmt: skip
        self._experiment = comet_ml.start(
            api_key=section.get("api_key") if is_online else None,
            workspace=section.get("workspace"),
            project=section.get("project"),  # in newer versions also project_name
            experiment_key=run_id or section.get("experiment_key"),
            mode="get_or_create" if run_id else section.get("mode"),
            online=is_online,
            experiment_config=settings,
        )
        if is_online and not self._experiment.alive:
            msg = "the server did not accept the experiment"
            raise OSError(msg)
        if section.get("experiment_name"):
            self._experiment.set_name(section["experiment_name"])
        self.run_id: str = self._experiment.get_key()
        archives = sorted(folder.glob(f"{self.run_id}*.zip"), key=lambda path: path.stat().st_mtime_ns)
        self.where = self._experiment.url if is_online else str(archives[-1] if archives else folder)
        self.upload = "" if is_online else f"comet upload {self.where}"

    def write(self, series: str, value: float, x: int, *, time: float | None = None) -> None:
        """Log one point, unless it is too close to the one before; the library knows no `time` but now."""
        last = self._logged.get(series)
        if last is None or x - last >= self._interval:
            self._experiment.log_metric(series, value, step=x)
            self._logged[series] = x

    def flush(self) -> None:
        """Nothing: the library has a thread that writes or sends."""

    def close(self, *, is_failed: bool = False) -> None:
        """Send what is left, or finish the archive."""
        self._experiment.end()

    def abandon(self) -> None:
        """Nothing: the library keeps no process."""

    @staticmethod
    def wants_network(section: Mapping[str, Any]) -> bool:
        """False if the config wants an archive; null is the library's default."""
        return section.get("online") is not False

    @staticmethod
    def server() -> str:
        """The address of the library's server, by the user's settings."""
        import comet_ml

        return str(comet_ml.get_config()["comet.url_override"] or "https://www.comet.com/clientlib/")
