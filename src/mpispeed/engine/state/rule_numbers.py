"""Checkpoint state of rules that keep numbers for each parameter (`optim.rule.KeepsNumbers`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpispeed.optim.rule import KeepsNumbers, key_text

if TYPE_CHECKING:
    from mpispeed.ckpt.read.reader import Checkpoint
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.state.global_layout import GlobalLayout
    from mpispeed.store.layout import Entry


def numbers_by_name(parts: Parts, whole: GlobalLayout) -> dict[str, dict[str, float]]:
    """Scalars that the rule keeps for each parameter of this stage.

    For a sliced parameter, names of the first slice's scalars are as they are, others end with the slice's number.

    Collective over: the model axis, for rules that keep any.
    """
    rule = parts.optimization.rule if parts.optimization else None
    if not isinstance(rule, KeepsNumbers):
        return {}
    rows = rule.scalars()
    own = {entry.name: dict(rows.get(key_text(key), {})) for key, entry in _windows(parts)}
    found: dict[str, dict[str, float]] = {}
    for rank, numbers in enumerate(parts.mesh["model"].gather_objects(own)):
        for name, row in numbers.items():
            if rank == 0 or name in whole.slices:
                found.setdefault(name, {}).update({key if rank == 0 else f"{key}.{rank}": x for key, x in row.items()})
    return found


def read_numbers(parts: Parts, source: Checkpoint, saved: Mapping[str, Any], whole: GlobalLayout) -> None:
    """Load the scalars that the rule keeps for each parameter if the checkpoint is of the same rule; else reset them.

    Local; no effect for other rules.
    """
    rule = parts.optimization.rule if parts.optimization else None
    if not isinstance(rule, KeepsNumbers):
        return
    is_same = saved["name"] == rule.name
    comm, stored, rows = parts.mesh["model"], set(source.names()), {}
    is_cut_alike = source.layout.get("model", 1) == comm.size
    for key, entry in _windows(parts):
        if not is_same or entry.name not in stored:
            continue
        numbers = source.info(entry.name).scalars
        suffix = f".{comm.rank}" if is_cut_alike and comm.rank and entry.name in whole.slices else ""
        rows[key_text(key)] = {
            name: numbers.get(name + suffix, numbers[name]) for name in rule.number_names if name in numbers
        }
    rule.load_scalars({key: row for key, row in rows.items() if row})


def _windows(parts: Parts) -> Iterator[tuple[tuple[int, int, int], Entry]]:
    for unit in parts.table.units:
        for entry in unit.layout.entries:
            yield (unit.index, entry.group, entry.offset), entry
