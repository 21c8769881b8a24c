"""Every resolved value and its origin."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpispeed.config.derive import derive
from mpispeed.config.load import LoadedConfig, flatten


class Row(NamedTuple):
    """One resolved value."""

    path: str
    value: Any
    origin: str


def explain(loaded: LoadedConfig, world_size: int) -> list[Row]:
    """All values for `world_size` data-parallel ranks, in the order of the file format.

    Raises:
        ConfigError: the batch sizes do not fit that number of ranks.
    """
    derived = derive(loaded.config, world_size)
    values = flatten(loaded.config.resolved_dict())
    rows = [Row(path, *derived.get(path, (value, loaded.origins[path]))) for path, value in values.items()]
    # Keywords that were "auto": the optimizer or schedule has its own default for them.
    rows += [Row(path, None, origin) for path, origin in loaded.origins.items() if _is_open_keyword(path, values)]
    return rows


def _is_open_keyword(path: str, values: dict[str, Any]) -> bool:
    return ".params." in path and path not in values
