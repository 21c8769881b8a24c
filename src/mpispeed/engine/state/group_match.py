"""Parameter groups of an optimizer beside those of a checkpoint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ZeRORuntimeException

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpispeed.ckpt.read.reader import Checkpoint
    from mpispeed.engine.build.parts import Parts

log = logging.getLogger(__name__)

_MARKS = frozenset({"params", "name", "moe"})
"""Keys of a group that tell which parameters it has."""


def matched(
    parts: Parts, source: Checkpoint, stored: Sequence[dict[str, Any]], members: Sequence[Sequence[str]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of a group and the saved one: by their parameters, or by order if these do not match.

    Groups may be divided in other ways than those saved, as DeepSpeed sets experts apart, if all saved groups with
    parameters of a group have the same hyper-parameters.

    Raises:
        ZeRORuntimeException: they do not match, nor are they as many.
    """
    if parts.optimization is None:
        return
    groups = parts.optimization.groups
    by_names = {frozenset(group["params"]): group for group in stored}
    found = [by_names.get(frozenset(names)) for names in members]
    if len(by_names) == len(stored) and all(group is not None for group in found):
        yield from ((own, group) for own, group in zip(groups, found, strict=True) if group is not None)
        return
    found = [_common(stored, set(names)) for names in members]
    if all(group is not None for group in found):
        yield from ((own, group) for own, group in zip(groups, found, strict=True) if group is not None)
        return
    if len(stored) != len(groups):
        msg = (
            f"checkpoint {source.path} has {len(stored)} parameter groups and the optimizer "
            f"{len(groups)}; group the parameters alike, or load with load_optimizer_states=False"
        )
        raise ZeRORuntimeException(msg)
    if parts.mesh.rank == 0:
        log.warning("parameter groups have other parameters than those in %s; they are matched by order", source.path)
    yield from zip(groups, stored, strict=True)


def _common(stored: Sequence[dict[str, Any]], names: set[str]) -> dict[str, Any] | None:
    """The hyper-parameters of all saved groups with some of these parameters; None if there are several, or none."""
    rows = [
        {key: value for key, value in group.items() if key not in _MARKS}
        for group in stored
        if not names.isdisjoint(group["params"])
    ]
    return rows[0] if rows and all(repr(row) == repr(rows[0]) for row in rows[1:]) else None
