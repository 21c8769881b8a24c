"""Checkpoint state of optimizers of torch, in memory or in files: slots, and scalars of each parameter.

Scalars (counts, flags, tensors of one element) are written once for all parameters with equal ones. A sharded parameter
has them for each range in which they differ, so that the same number of ranks gets its own back. Ranges are of whole
parameters; of a tensor of all experts each rank has a part.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.optim.rule import KeepsCounts, KeepsState
from mpispeed.sharding.update_windows import UpdateWindows
from mpispeed.store.layout import Span

if TYPE_CHECKING:
    from mpispeed.ckpt.read.reader import Checkpoint
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.state.global_layout import GlobalLayout
    from mpispeed.optim.rule import Scalar, Window
    from mpispeed.store.layout import Entry

log = logging.getLogger(__name__)

_ADAMS = frozenset({"adam", "adamw", "muadam", "muadamw"})
"""Rules whose states are the same."""


def windows_of(parts: Parts) -> list[Window]:
    """The windows of the next update for a rule that keeps its own state; else none.

    Windows of states in swap files would be valid only until the next one; such rules have none there.
    """
    optimization = parts.optimization
    if optimization is None or not isinstance(optimization.rule, KeepsState):
        return []
    update_windows = UpdateWindows(
        parts.params.shards, optimization.grads.shards, optimization.states, optimization.rule
    )
    return list(update_windows.windows(optimization.groups, parts.counters.update_count))


@dataclass(slots=True)
class Kept:
    """Optimizer state of parameters, by name.

    Attributes:
        slots: names of the states that have a value for each element.
        runs: (first element, index into `sets`) of the ranges with equal scalars, in order; parameters without any
            state have none.
        sets: the different sets of scalars.
    """

    slots: dict[str, set[str]] = field(default_factory=dict)
    runs: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    sets: list[dict[str, Scalar]] = field(default_factory=list)
    _known: dict[tuple[object, ...], int] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, parts: Parts, whole: GlobalLayout, windows: Sequence[Window]) -> Kept:
        """State of the whole model, for a rule that keeps its own state or counts; else only the slots, of this stage.

        Collective over: the data axis where masters are sharded or experts are on several ranks, and the pipe axis; for
        rules that keep either.
        """
        optimization, found = parts.optimization, cls()
        if optimization is None:
            return found
        rule = optimization.rule
        if isinstance(rule, KeepsCounts):
            found._add_counts(parts, whole, rule)
        elif isinstance(rule, KeepsState):
            own = _read_windows(parts, whole, rule, windows)
            is_apart = parts.table.shards_masters or bool(parts.plan.placing.distinct)
            rows = parts.mesh["data"].gather_objects(own) if is_apart else [own]
            found._add_rows([row for part in rows for row in part])
        else:
            found.slots = {
                place.entry.name: set(place.unit.states.slots_among(rule.state_names))
                for _, place in parts.table.places()
            }
            return found
        if parts.mesh["pipe"].size > 1:
            stages = parts.mesh["pipe"].gather_objects(found.to_tree() | {"slots": found.slots})
            found = cls()
            for stage in stages:
                found.slots = stage["slots"] | found.slots
                found._add_tree(stage)
        return found

    def _add_rows(self, rows: Sequence[_Row]) -> None:
        """Add rows of windows, sorted by parameter; the result is equal on all ranks that have the same rows."""
        counted = {name for row in rows for name in row.rest}
        for row in sorted(rows, key=lambda row: (row.place, row.name, row.start)):
            # In a window of one element, a tensor of one may be a slot or a scalar; larger windows tell by its name.
            rest = row.rest | {name: value for name, value in row.either.items() if name in counted}
            slots = row.slots | {name for name in row.either if name not in counted}
            if not rest and not slots:
                continue
            index = self.index_of(rest)
            self.slots.setdefault(row.name, set()).update(slots)
            runs = self.runs.setdefault(row.name, [])
            # Ranks with copies have rows of the same start; those of the first count.
            if not runs or (runs[-1][1] != index and runs[-1][0] != row.start):
                runs.append((row.start, index))

    def _add_counts(self, parts: Parts, whole: GlobalLayout, rule: KeepsCounts) -> None:
        """Add the scalars of groups to all their parameters. Collective over: the data axis."""
        best: dict[int, tuple[int, dict[str, Scalar]]] = {}
        for own in parts.mesh["data"].gather_objects(rule.counts()):
            for group, (step, values) in own.items():  # a rank without elements of a group has those it has loaded
                if group not in best or step > best[group][0]:
                    best[group] = step, values
        places = ((place.entry.name, place.entry.group) for _, place in parts.table.places())
        for name, group in whole.expanded(places, lambda _, group: group):
            if group in best:
                self.slots[name] = set(rule.slots_of(parts.optimization.groups[group]))  # type: ignore[union-attr]
                values = best[group][1]
                plain = {key: x.cpu() if isinstance(x, torch.Tensor) else x for key, x in values.items()}
                self.runs[name] = [(0, self.index_of(plain))]

    def _add_tree(self, tree: Mapping[str, Any]) -> None:
        """Add the result of a `to_tree`, except for parameters that are here already."""
        known = set(self.runs)
        indices = [self.index_of(values) for values in tree["sets"]]
        for name, start, index in zip(tree["names"], tree["starts"], tree["indices"], strict=True):
            if name not in known:
                self.runs.setdefault(name, []).append((start, indices[index]))

    def index_of(self, values: Mapping[str, Scalar]) -> int:
        """Index of `values` in `sets`; they are added unless a set is equal bit by bit."""
        key = tuple((name, type(value), _bits(value)) for name, value in values.items())
        if key not in self._known:
            self._known[key] = len(self.sets)
            self.sets.append(dict(values))
        return self._known[key]

    def to_tree(self) -> dict[str, Any]:
        """The scalars in a form that can be saved."""
        rows = [(name, start, index) for name, runs in self.runs.items() for start, index in runs]
        names, starts, indices = ([row[at] for row in rows] for at in range(3))
        return {"sets": self.sets, "names": names, "starts": starts, "indices": indices}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Kept:
        """The reverse of `to_tree`."""
        found = cls()
        found._add_tree(tree)
        return found

    def rest_of(self, whole: GlobalLayout, overlaps: Iterable[tuple[Entry, Span]]) -> dict[str, Scalar] | None:
        """Scalars of a window with these parts of parameters: those of the first part that has any."""
        for entry, common in overlaps:
            runs = self.runs.get(entry.name)
            if runs:
                start = common.start - entry.offset + whole.before(entry.name)
                at = bisect.bisect_right(runs, start, key=lambda run: run[0])
                return self.sets[runs[max(at - 1, 0)][1]]
        return None


@dataclass(frozen=True, slots=True)
class _Row:
    """State of a window, as far as it is of one parameter.

    Attributes:
        place: (unit, first element of the parameter in it), the same on all ranks.
        start: first element in the whole parameter.
    """

    place: tuple[int, int]
    name: str
    start: int
    slots: set[str]
    rest: dict[str, Scalar]
    either: dict[str, Scalar]  # in a window of one element: slots or scalars


def _read_windows(parts: Parts, whole: GlobalLayout, rule: KeepsState, windows: Sequence[Window]) -> list[_Row]:
    rows, lost = [], set()
    for window in windows:
        slots = rule.slots(window.key)
        either: dict[str, Scalar] = {}
        if window.master.numel() == 1:
            either = {name: slot.detach().cpu().view(window.shape or -1) for name, slot in slots.items()}
        unit, _, first = window.key
        overlaps = list(parts.table.units[unit].layout.overlaps(Span(first, first + window.master.numel())))
        is_whole = window.shape is not None and parts.mesh["model"].size == 1 and not _are_cut(whole, overlaps)
        scalars = rule.window_scalars(window.key)
        if not is_whole and (larger := _larger(scalars)):
            lost |= larger  # and with it all of the window: an optimizer does not go on from a part of its state
            continue
        rest = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in scalars.items()}
        for entry, common in overlaps:
            start = common.start - entry.offset + whole.before(entry.name)
            rows.append(_Row((unit, entry.offset), entry.name, start, slots.keys() - either.keys(), rest, either))
    if lost:
        log.warning(
            "%s of the optimizer %s belong to cuts of parameters, as they are on this number of ranks: the state of "
            "these parameters is not saved",
            ", ".join(sorted(lost)),
            rule.name,  # type: ignore[attr-defined]
        )
    return rows


def _are_cut(whole: GlobalLayout, overlaps: Iterable[tuple[Entry, Span]]) -> bool:
    """True for slices, and for parts of a tensor of all experts, of which this rank has some."""
    return any(entry.name in whole.experts.fused or entry.name in whole.slices for entry, _ in overlaps)


def _larger(scalars: Mapping[str, Scalar]) -> set[str]:
    """Names of what is more than a number, as factors of Adafactor are."""
    return {name for name, value in scalars.items() if isinstance(value, torch.Tensor) and value.numel() > 1}


def _bits(value: Scalar) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr(value)


# -- loading ---------------------------------------------------------------------------------------------------------


class Restorer:
    """Restores the state of windows from a checkpoint."""

    def __init__(self, parts: Parts, whole: GlobalLayout, source: Checkpoint, saved: Mapping[str, Any]) -> None:
        self._rule: Any = parts.optimization.rule if parts.optimization else None
        self._whole = whole
        self._source, self._stored = source, set(source.names())
        self._slots = tuple(saved.get("slots", ()))
        self._kept = Kept.from_tree(saved["scalars"]["of_params"]) if saved else Kept()
        # Rules of the JSON count steps for all parameters together; torch's optimizers count for each.
        self._counts = bool(self._slots) and not self._kept.runs
        if saved and not self._takes(str(saved["name"]).lower()):
            level = logging.WARNING if parts.mesh.rank == 0 else logging.DEBUG
            text = "%s has the state of the optimizer %s, which %s cannot take over: it starts afresh"
            log.log(level, text, source.path, saved["name"], parts.optimization.rule.name)  # type: ignore[union-attr]
            self._slots, self._kept = (), Kept()

    def _takes(self, name: str) -> bool:
        own = {kind.lower() for kind in self._rule.kinds}
        return name in own or (name in _ADAMS and not own.isdisjoint(_ADAMS))

    def slots_of(self, overlaps: Sequence[tuple[Entry, Span]]) -> Iterator[str]:
        """Slots that at least one of the parameters has in the file."""
        names = [entry.name for entry, _ in overlaps if entry.name in self._stored]
        return (slot for slot in self._slots if any(slot in self._source.slots(name) for name in names))

    def has(self, slot: str) -> bool:
        """True if the checkpoint has a slot of that name that this rule can take over."""
        return slot in self._slots

    def give_counts(self, parts: Parts) -> None:
        """Restore the scalars of groups, for a rule that keeps those: of the first parameter that has any."""
        known: dict[int, dict[str, Scalar]] = {}
        for unit in parts.table.units:
            for entry in unit.layout.entries:
                rest = self._kept.rest_of(self._whole, [(entry, entry.span)])
                if self._counts and entry.name in self._stored and self._source.info(entry.name).step:
                    rest = {"step": torch.tensor(float(self._source.info(entry.name).step))}
                if rest is None:
                    continue
                if entry.group not in known:
                    known[entry.group] = rest
                    self._rule.restore_counts(entry.group, rest)
                elif repr(known[entry.group]) != repr(rest):
                    text = "parameter %s has not as many updates in %s as others of its group; it goes on with theirs"
                    log.warning(text, entry.name, self._source.path)

    def give(self, window: Window, overlaps: Sequence[tuple[Entry, Span]], slots: Mapping[str, torch.Tensor]) -> bool:
        """Restore `window` if the checkpoint has state for it; False if it has it for the whole of a cut parameter."""
        rest = self._kept.rest_of(self._whole, overlaps)
        if rest and _are_cut(self._whole, overlaps) and _larger(rest):
            return False
        if slots and self._counts:
            step = max(self._source.info(entry.name).step for entry, _ in overlaps if entry.name in self._stored)
            rest = {"step": torch.tensor(float(step))}
        if slots or rest:
            self._rule.restore(window, slots, rest or {})
        return True
