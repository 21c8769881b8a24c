"""The config of an engine as a mapping, for code that reads it like the JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpispeed.config.root import Config


class ConfigView(Mapping[str, Any]):
    """All settings with their defaults: `view["fp16"]["enabled"]`, `view.get("optimizer")`, `view.fp16.enabled`.

    Changes of what is returned have no effect.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._plain = config, config.resolved_dict()

    def __getitem__(self, key: str) -> Any:
        return self._plain[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def __repr__(self) -> str:
        return repr(self._config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in vars(self):
            raise AttributeError(name)
        return getattr(self._config, name)
