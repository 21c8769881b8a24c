"""Weights & Biases: a run on its server, or a folder that `wandb sync` uploads.

Not for processes of MPI: the library starts a process of its own and may hang. `remote.py` runs it elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAMPLES = "samples"
"""What all charts have on their horizontal axis. It is logged as a value, because the library drops rows whose step is
lower than the last one: the loss of a step stands before its samples, the learning rate after them."""
_TIME = "_timestamp"  # of the library
_INIT_SECONDS = 15.0
_MOST_ROWS = 1000  # that wait for a flush
_FLUSH_SECONDS = 2.0  # 15 unless set: what the library has not written yet is lost with its process


class WandbSink:
    """Writes points to a run; points of one `flush` and the same `x` are one row.

    Args:
        section: a `wandb` section.
        folder: where the library makes its folder `wandb`.
        is_online: send now. Otherwise nothing is sent, and no key is needed.
        run_id: continues this run.
        program: the script's name, for the run's page.
        environ: its WANDB_DIR comes before `folder`.

    Attributes:
        where: the address of a run that is sent, else its folder.
        upload: the command that uploads what is in the folder; empty if the run is disabled.
        run_id: of the run.

    Raises:
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
        import wandb

        self._wandb = wandb
        settings = {
            "console": "off", "silent": True, "init_timeout": _INIT_SECONDS, "disable_code": True, "program": program,
            "x_transaction_log_flush_interval": _FLUSH_SECONDS,
        }  # fmt: skip
        known = getattr(wandb.Settings, "model_fields", {})
        folder = Path((environ or {}).get("WANDB_DIR") or folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=section.get("project") or "deepspeed",
            group=section.get("group"),
            entity=section.get("team"),
            dir=str(folder),
            id=run_id,
            resume="allow" if run_id else None,
            mode=_mode(is_online=is_online),
            settings=wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
        )
        self.run_id: str = self._run.id
        own = str(Path(self._run.dir).parent)
        self.where: str = (self._run.url if is_online else None) or own
        self.upload = "" if self._run.disabled else f"wandb sync {own}"
        self._run.define_metric(SAMPLES, hidden=True)
        self._run.define_metric("*", step_metric=SAMPLES)
        self._rows: dict[int, dict[str, float]] = {}

    def write(self, series: str, value: float, x: int, *, time: float | None = None) -> None:
        """Add one point; `flush` gives it to the library. `time` is in seconds since 1970, the flush's if left out."""
        if series in self._rows.get(x, ()) or len(self._rows) > _MOST_ROWS:
            self.flush()
        row = self._rows.setdefault(x, {} if time is None else {_TIME: time})
        row[series] = value

    def flush(self) -> None:
        """Give all rows to the library, in the order of their first points."""
        for x, row in self._rows.items():
            self._run.log({**row, SAMPLES: x})
        self._rows.clear()

    def close(self, *, is_failed: bool = False) -> None:
        """Finish the run and end the library's process. A run that `is_failed` is shown as such."""
        self.flush()
        self._run.finish(exit_code=int(is_failed))
        self._wandb.teardown()

    def abandon(self) -> None:
        """Forget the library's process, which is gone; another sink starts a new one."""
        with contextlib.suppress(Exception):
            self._wandb.teardown()

    @staticmethod
    def wants_network(section: Mapping[str, Any]) -> bool:
        """False if the user's settings keep the library from the network."""
        import wandb

        return str(wandb.setup().settings.mode) in ("online", "shared")

    @staticmethod
    def server() -> str:
        """The address of the library's server, by the user's settings."""
        import wandb

        return str(wandb.setup().settings.base_url)


def _mode(*, is_online: bool) -> Any:
    """The library's word, unless the user switched it off altogether."""
    import wandb

    found = str(wandb.setup().settings.mode)
    return found if found == "disabled" else "online" if is_online else "offline"
