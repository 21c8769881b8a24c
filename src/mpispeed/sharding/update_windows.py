"""Masters, gradients and optimizer state of one engine, and windows over them, as an update rule sees them."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import StoreError, UsageError
from mpispeed.optim.exchange import Drifts, Exchanges
from mpispeed.optim.rule import AtRest, KeepsState, Layerwise, Matrixwise, Rule, TakesCodes, Window
from mpispeed.store.coded_tensor import WINDOW, CodedLease, CodedTensor, RestLease, draw_base
from mpispeed.store.layout import Span
from mpispeed.store.placement import Tier
from mpispeed.store.state_code import SCALED
from mpispeed.store.stored_tensor import STEP, WholeLease
from mpispeed.store.tiers import IN_MEMORY, MASTER, Tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from mpispeed.native.coded_update import Rest
    from mpispeed.sharding.grad_shards import GradShards
    from mpispeed.sharding.grads import GradStore
    from mpispeed.sharding.param_shards import ParamShards
    from mpispeed.sharding.params import ParamStore
    from mpispeed.store.layout import Table, Unit
    from mpispeed.store.stored_tensor import Lease, StoredTensor


class StateStore:
    """Optimizer state of this rank: one flat tensor per slot and unit, with the placement of masters."""

    def __init__(
        self,
        table: Table,
        params: ParamShards,
        slots: Sequence[str],
        tiers: Tiers = IN_MEMORY,
        has: Callable[[Unit], bool] = lambda _: True,
        *,
        codes: bool = False,
    ) -> None:
        """Start with zeros.

        Args:
            table: the units.
            params: says which part this rank has.
            slots: names of the states.
            tiers: which slots are in swap files.
            has: which units have any.
            codes: slots rest in the codes of the units' states.
        """
        self.slots = tuple(slots)
        self.edits = 0  # how often slots were set by something else than an update

        def zeros(unit: Unit, slot: str) -> StoredTensor:
            span, code = params.span(unit), unit.states.codes.slot(slot) if codes else None
            if code is None:
                return tiers.zeros(slot, unit.index, span.numel, unit.states.full)
            base = draw_base(unit.layout.entries[0].name, span.start)
            return tiers.coded(slot, unit.index, span.numel, code, base=base)

        self._tensors = [
            {slot: zeros(unit, slot) for slot in unit.states.slots_among(self.slots)} if has(unit) else {}
            for unit in table.units
        ]

    def tensors(self, unit: Unit) -> Mapping[str, StoredTensor]:
        """Slot name -> stored tensor."""
        return self._tensors[unit.index]

    def of(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Slot name -> flat tensor over the unit's master span: itself if it is plain and in memory, else a copy."""
        return {slot: stored.get() for slot, stored in self._tensors[unit.index].items()}

    def put(self, unit: Unit, values: Mapping[str, torch.Tensor]) -> None:
        """Set slots; copies nothing of what `of` returned from memory."""
        self.edits += 1
        for slot, tensor in values.items():
            self._tensors[unit.index][slot].put(tensor)

    def clear(self) -> None:
        """Set everything to zero."""
        for tensors in self._tensors:
            for stored in tensors.values():
                stored.clear()

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots in this rank's memory."""
        return sum(stored.memory_bytes for tensors in self._tensors for stored in tensors.values())

    @property
    def swapped_bytes(self) -> int:
        """Bytes of all slots in this rank's swap files."""
        return sum(stored.file_bytes for tensors in self._tensors for stored in tensors.values())


@dataclass(slots=True)
class _Borrowed:
    """Leases of one chunk of a unit: masters, gradients, states."""

    unit: Unit
    chunk: Span
    master: Lease
    grad: Lease
    state: dict[str, Lease]
    out: Lease | None

    def leases(self) -> list[Lease]:
        """All leases of the chunk."""
        out = [] if self.out is None else [self.out]
        return [self.master, *self.state.values(), *out, self.grad]

    def settle(self, step: int) -> torch.Tensor | None:
        """Encode what rests in codes, for update number `step`.

        Gives 16-bit masters as they rest, rounded once: what parameters in other memory are to be.
        """
        found = {id(lease): lease.settle(step) for lease in self.leases() if isinstance(lease, CodedLease)}
        return self.master.wait() if isinstance(self.master, RestLease) else found.get(id(self.master))

    def at_rest(self) -> AtRest | None:
        """The whole chunk as it rests; None where it is lent in fp32."""
        rest = {slot: _as_it_rests(lease) for slot, lease in {"": self.master, **self.state}.items()}
        starts = [lease.start for lease in (self.master, *self.state.values()) if isinstance(lease, RestLease)]
        return AtRest(rest.pop(""), rest, starts[0]) if starts else None

    def give_back(self, *, changed: bool) -> None:
        """Give back all leases, even if one cannot be written; gradients are never changed."""
        failure: StoreError | None = None
        for lease in self.leases():
            try:
                lease.give_back(changed=changed and lease is not self.grad)
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _as_it_rests(lease: Lease) -> Rest:
    return lease.at_rest() if isinstance(lease, RestLease) else lease.wait()


class UpdateWindows:
    """Yields the windows of one update, in unit order.

    A window is done when the next one is asked for, or, for a rule that keeps all of them, when it has called what is
    due `after` it. States in swap files are read one chunk ahead and written behind, as the tiers plan it; windows end
    at chunk boundaries. A rule that must have whole parameters gets whole units, in memory beside the buffers. States
    that rest in codes are decoded for a window and encoded after it, or come as they are to a rule that takes them.

    Source: ZeRO-Infinity (arXiv 2104.07857), infinity offload engine: the overlap of disk and update.
    """

    def __init__(
        self,
        params: ParamShards,
        grads: GradShards,
        state: StateStore,
        rule: Rule,
        *,
        most_elements: int | None = None,
    ) -> None:
        """Lend parts of these tensors.

        Args:
            params: parameters and masters.
            grads: their gradients.
            state: slots of the optimizer.
            rule: decides whether windows are whole parameters, or parts of one, or of many at once.
            most_elements: of a window in memory, where `takes_any_cut(rule)`; None: no limit. Those of swap files are
                as long as their buffers.
        """
        self._params, self._grads, self._state = params, grads, state
        takes_parts = isinstance(rule, Layerwise | Matrixwise)
        self._per_parameter = rule.wants_whole and (not params.table.shards_masters or takes_parts)
        self._keeps_windows = isinstance(rule, KeepsState)
        self._fills_out = isinstance(rule, Drifts)
        self._lends_units = self._per_parameter and not takes_parts
        self._plan = params.tiers.plan
        # A device copies the gradients of the next window while the host updates this one.
        self._fetches = not self.is_swapping and any(
            unit.states.grad.tier is Tier.DEVICE and params.tiers.is_apart(MASTER, unit.index)
            for unit in params.table.units
        )
        self._codes_for = rule if isinstance(rule, TakesCodes) and takes_any_cut(rule) else None
        self._most_elements = most_elements if takes_any_cut(rule) else None
        counts = [len(unit.layout.entries) for unit in params.table.units]
        self._first_entry = [0, *itertools.accumulate(counts)]

    @property
    def is_swapping(self) -> bool:
        """True if any rank may have states in swap files."""
        return self._params.tiers.is_swapping

    @property
    def entries(self) -> int:
        """Number of parameters that `Window.entry` counts: those of all units, on every rank of the data axis."""
        return self._first_entry[-1]

    def windows(
        self, groups: Sequence[dict[str, Any]], step: int, *, has_out: bool = True
    ) -> Generator[Window, None, None]:
        """All windows of this rank for update number `step`.

        Args:
            groups: hyper-parameters of the parameter groups.
            step: number of the update, from 1.
            has_out: False for windows without `out`.

        Raises:
            StoreError: a swap file cannot be read or written.
        """
        yield from self._walk(self._params.table.units, groups, step, has_out=has_out)

    def windows_of(
        self, units: Sequence[Unit], groups: Sequence[dict[str, Any]], step: int, *, has_out: bool = True
    ) -> Generator[Window, None, None]:
        """The windows of some units."""
        yield from self._walk(units, groups, step, has_out=has_out)

    def _walk(
        self, units: Sequence[Unit], groups: Sequence[dict[str, Any]], step: int, *, has_out: bool = True
    ) -> Iterator[Window]:
        waiting: deque[_Borrowed] = deque()
        try:
            for unit, chunk, is_at_rest in self._chunks(units, groups, step):
                waiting.append(self._borrow(unit, chunk, has_out=has_out, is_at_rest=is_at_rest))
                if len(waiting) > (self._plan.reads_ahead or self._fetches):
                    yield from self._serve(waiting, groups, step)
            while waiting:
                yield from self._serve(waiting, groups, step)
        finally:
            for borrowed in waiting:
                borrowed.give_back(changed=False)
        self._params.tiers.settle()

    def _serve(self, waiting: deque[_Borrowed], groups: Sequence[dict[str, Any]], step: int) -> Iterator[Window]:
        borrowed, changed = waiting[0], False
        try:
            for lease in borrowed.leases():
                lease.wait()
            for group, span, entry in self._ranges(borrowed.unit):
                common = span.intersect(borrowed.chunk)
                if common.numel:
                    window, far = self._window(borrowed, group, common, groups[group], step)
                    if entry is not None:
                        window.entry = self._first_entry[borrowed.unit.index] + entry
                        window.shape = borrowed.unit.layout.entries[entry].shape if common == span else None
                    yield window
                    if far is not None:
                        source, is_kept = (
                            (window.master, not self.is_swapping) if window.out is None else (window.out, True)
                        )
                        self._bring(far, source, is_kept=is_kept)
            rounded = borrowed.settle(step)
            if rounded is not None and borrowed.out is not None:
                self._bring(borrowed.out.wait(), rounded, is_kept=not self.is_swapping)
            changed = True
        finally:
            waiting.popleft()
            borrowed.give_back(changed=changed)
        if not self._plan.writes_behind:
            self._params.tiers.settle()

    def _chunks(
        self, units: Sequence[Unit], groups: Sequence[dict[str, Any]], step: int
    ) -> Iterator[tuple[Unit, Span, bool]]:
        """Units, their chunks, and whether these are lent as they rest."""
        for unit in units:
            own = self._params.span(unit)
            tensors = [
                self._params.stored_master(unit),
                self._grads.stored(unit)[0],
                *self._state.tensors(unit).values(),
            ]
            low = self._params.low_precision(unit)
            is_swapped = any(stored.is_swapped for stored in tensors) or (low is not None and low[0].is_swapped)
            length = own.numel
            if self._lends_units:
                pass
            elif is_swapped:
                length = min(length, self._plan.window_elements)
            elif self._most_elements is not None:
                length = min(length, self._most_elements)
            if not any(isinstance(stored, CodedTensor) for stored in tensors):
                for start in range(0, own.numel, max(length, 1)):
                    yield unit, Span(own.start + start, own.start + min(start + length, own.numel)), False
                continue
            ranges = [(groups[group], span.intersect(own)) for group, span, _ in self._ranges(unit)]
            ranges = [(group, span) for group, span in ranges if span.numel]
            takes_codes = self._takes_codes(unit, [group for group, _ in ranges], step)
            borders = [at - own.start for _, span in ranges for at in (span.start, span.stop)] if takes_codes else []
            step_of_cuts = STEP if is_swapped else SCALED  # scales are of whole blocks
            for cut in cuts_at_rest(own.numel, borders, step_of_cuts):
                is_at_rest = takes_codes and not any(cut.start < at < cut.stop for at in borders)
                most = length if is_at_rest and not is_swapped else min(length, WINDOW)
                most = max(most // SCALED, 1) * SCALED
                for start in range(cut.start, cut.stop, most):
                    chunk = Span(start, min(start + most, cut.stop))
                    yield unit, chunk.shifted(own.start), is_at_rest

    def _takes_codes(self, unit: Unit, groups: Sequence[dict[str, Any]], step: int) -> bool:
        """True if the rule takes the unit's states as they rest: compiled loops of the host do."""
        rule = self._codes_for
        is_on_host = self._params.tiers.home(MASTER, unit.index).type == "cpu"
        return rule is not None and is_on_host and all(rule.takes_codes(group, step) for group in groups)

    def _borrow(self, unit: Unit, chunk: Span, *, has_out: bool, is_at_rest: bool) -> _Borrowed:
        local = chunk.shifted(-self._params.span(unit).start)
        low = self._params.low_precision(unit) if has_out else None
        grad = self._grads.lend(unit, local.start, local.stop, self._params.tiers.home(MASTER, unit.index))
        tensors = {"": self._params.stored_master(unit), **self._state.tensors(unit)}
        if self._lends_units:
            state: dict[str, Lease] = {slot: WholeLease(stored) for slot, stored in tensors.items()}
        else:
            state = {
                slot: stored.lend_at_rest(local.start, local.stop) if is_at_rest and isinstance(stored, CodedTensor)
                else stored.lend(local.start, local.stop)
                for slot, stored in tensors.items()
            }  # fmt: skip
        out = None if low is None else low[0].lend(low[1] + local.start, low[1] + local.stop, reads=False)
        master = state.pop("")
        return _Borrowed(unit, chunk, master, grad, state, out)

    def _ranges(self, unit: Unit) -> Iterator[tuple[int, Span, int | None]]:
        if self._per_parameter:
            for index, entry in enumerate(unit.layout.entries):
                yield entry.group, entry.span, index
        else:
            for group, span in unit.layout.group_spans():
                yield group, span, None

    def _window(
        self, borrowed: _Borrowed, index: int, span: Span, group: dict[str, Any], step: int
    ) -> tuple[Window, torch.Tensor | None]:
        """A window, and the copy to be made of it if `out` is in other memory than the master.

        The copy is due `after` the window instead, where a rule keeps windows until all are there.
        """
        local = span.shifted(-borrowed.chunk.start).slice
        master, far = borrowed.master.wait()[local], None
        is_coded, at_rest = isinstance(borrowed.master, CodedLease | RestLease), borrowed.at_rest()
        out = None if borrowed.out is None or is_coded else borrowed.out.wait()[local]
        after = None
        if out is not None and out.device != master.device and self._keeps_windows:
            after, out = partial(self._round_and_bring, out, master), None
        elif out is not None and out.device != master.device:
            # Rounded by the update, so that only the rounded values are copied; local ones are not the master's.
            far, out = out, _room_beside(master, out) if self._fills_out or out.dtype != master.dtype else None
        window = Window(
            master=master,
            grad=borrowed.grad.wait()[local].to(master.device),
            state={} if at_rest else {slot: lease.wait()[local] for slot, lease in borrowed.state.items()},
            group=group,
            step=step,
            out=out,
            key=(borrowed.unit.index, index, span.start),
            after=after,
            at_rest=at_rest,
        )
        return window, far

    def _bring(self, far: torch.Tensor, source: torch.Tensor, *, is_kept: bool) -> None:
        """Copy the rounded values of an update to other memory.

        Asynchronous to a device, unless the source is a buffer that will be read into again; synchronous to the host.
        """
        far.copy_(source, non_blocking=is_kept and devices.is_on_device(far))

    def _round_and_bring(self, far: torch.Tensor, master: torch.Tensor) -> None:
        """Copy an updated master to other memory; only rounded values travel."""
        source = master if master.dtype == far.dtype else _room_beside(master, far).copy_(master)
        self._bring(far, source, is_kept=source is not master or not self.is_swapping)


def takes_any_cut(rule: Rule) -> bool:
    """True if a rule gives the same bits however the range that it updates is cut, and keeps nothing by window."""
    return rule.is_elementwise is True and not isinstance(rule, KeepsState | Exchanges)


def cuts_at_rest(numel: int, borders: Iterable[int], step: int) -> list[Span]:
    """Cut a range so that few elements are with a border: each is inside of `step` elements, or where two cuts meet.

    All cuts begin at multiples of `step`.
    """
    edges = {0, numel}
    for at in borders:
        if 0 < at < numel:
            edges |= {at // step * step, min(-(-at // step) * step, numel)}
    return [Span(*pair) for pair in itertools.pairwise(sorted(edges))]


def _room_beside(master: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Empty tensor with the length and dtype of `out`, in the memory of `master`."""
    if devices.is_on_device(master):
        return torch.empty(out.numel(), dtype=out.dtype, device=master.device)
    return devices.pinned(out.numel(), out.dtype)


# Weak on both sides: a store that lives on after its engine must not keep gradients and states.
_STATES: weakref.WeakKeyDictionary[ParamStore, weakref.ref[ZeroState]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class ZeroState:
    """All state that an update reads and writes; made last, and found as long as somebody holds it.

    Attributes:
        params: parameters and masters.
        grads: their gradients.
        states: slots of the optimizer.
        rule: the update rule.
        groups: hyper-parameters of the parameter groups.
        is_local: True while the model has this rank's own parameters, which differ from those of other ranks.
    """

    params: ParamStore
    grads: GradStore
    states: StateStore
    rule: Rule
    groups: list[dict[str, Any]]
    is_local: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        _STATES[self.params] = weakref.ref(self)


def state_of(params: ParamStore) -> ZeroState | None:
    """The state trained with `params`; None without an optimizer."""
    known = _STATES.get(params)
    return None if known is None else known()


def take_edited(params: ParamStore, param: nn.Parameter) -> None:
    """`ParamStore.take` of a parameter that a script edited. Local.

    Raises:
        UsageError: the model has this rank's own parameters, which are updated locally.
        StoreError: the parameter is not unsharded now.
    """
    state = state_of(params)
    if state is not None and state.is_local():
        place = params.table.locate(param)
        msg = (
            f"parameter {'?' if place is None else place.entry.name!r} was edited while it is this rank's own, between "
            "meetings of the optimizer; call engine.eval() before, and engine.train() afterwards"
        )
        raise UsageError(msg)
    params.take(param)
