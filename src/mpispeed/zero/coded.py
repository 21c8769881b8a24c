"""What ranks tell each other for 1-bit optimizers: momenta, gradients or local updates of units, one bit per element.

The rule says which of them travels at which step (`optim.exchange`); here they are brought together with the errors of
coding, unit by unit. Gradients of such steps stay local: they rest whole and are not summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.onebit import OneBitErrors, exchange, sent_bytes
from mpispeed.native.one_bit import compensate
from mpispeed.optim.exchange import Drifts, Exchange, Exchanges, MixesMomentum
from mpispeed.store.layout import Span
from mpispeed.store.move import widen
from mpispeed.store.placement import WHOLE
from mpispeed.zero.coder import Coder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Window
    from mpispeed.store.layout import Entry
    from mpispeed.store.table import Unit
    from mpispeed.zero.grads import GradStore
    from mpispeed.zero.params import ParamStore
    from mpispeed.zero.walk import StateStore, Walker

LOCAL = (Exchange.NOTHING, Exchange.DRIFT)
"""Steps in which parameters of ranks differ."""

MASK = "exp_avg_mask"
"""Key of a parameter group: 0 where the momentum has to stay 0, 1 elsewhere."""


class CodedExchange:
    """Brings a unit's momenta, gradients or drifts together through one bit per element.

    Holes between the tensors of a unit carry nothing: they and their errors are 0 after every exchange.

    Attributes:
        errors: what coding has left out, by unit; made when a unit is coded for the first time.
        shows_common: parameters are those that ranks last agreed on, though local updates came after.
        sent: bytes that this rank has sent in the exchanges of the last step.
        plain: bytes that sums of the same in fp32 would have sent.
    """

    def __init__(
        self,
        mesh: Mesh,
        params: ParamStore,
        grads: GradStore,
        states: StateStore,
        rule: Any,
        groups: Sequence[dict[str, Any]],
        walker: Walker,
    ) -> None:
        """Args: `rule` is an `Exchanges`, `walker` gives its windows.

        Raises:
            ConfigError: masters are not fp32, or a mask does not fit its group.
        """
        self._mesh, self._params, self._grads, self._states = mesh, params, grads, states
        self._rule: Exchanges = rule
        self._groups, self._walker = groups, walker
        self.coder, self._comm = Coder(mesh, None), mesh["data"]
        self.errors: dict[int, OneBitErrors] = {}
        self._edits, self._is_prepared = states.edits, False
        self._momenta: dict[int, torch.Tensor] = {}  # whole ones, where masters are cut
        self._silent: dict[int, torch.Tensor | None] = {}  # where the momentum has to be 0, after the warm-up
        self.sent = self.plain = 0
        self.shows_common = False
        self._masks = {unit.index: _mask(unit, groups) for unit in params.table.units}
        found = {dtype for unit in params.table.units for dtype in (params.dtypes(unit)[1], grads.dtype(unit))}
        if found - {torch.float32}:
            odd = ", ".join(sorted(map(str, found - {torch.float32})))
            msg = (
                f"optimizer {rule.name} works on masters and gradients in float32, found {odd}; give it a model of "
                "float32 or 16-bit parameters, and leave data_types.grad_accum_dtype out or at fp32"
            )
            raise ConfigError(msg)

    def kind(self, step: int) -> Exchange:
        """What travels for update number `step`."""
        return self._rule.exchanges(step)

    def begin(self, step: int) -> None:
        """Prepare for the gradients of update number `step`. Local."""
        self._grads.is_local = self.kind(step) is not Exchange.GRADIENT
        self.shows_common = False  # an update fills parameters with local ones
        if self.kind(step) in LOCAL and self.kind(step - 1) not in LOCAL:
            for errors in self.errors.values():  # they were of gradients
                errors.clear()

    def subject(self, step: int) -> str:
        """Of what the errors are after update `step`: momentum, gradient or drift."""
        if self.kind(step) in LOCAL:
            return "drift"
        return "momentum" if self.kind(step) is Exchange.MOMENTUM else "gradient"

    def is_apart(self, step: int) -> bool:
        """True if parameters of ranks differ after update `step`."""
        return self.kind(step) is Exchange.NOTHING

    def forget(self) -> None:
        """States are replaced: what follows from them and errors are of others."""
        self._is_prepared = False
        self.errors.clear()
        self._momenta.clear()
        self._silent.clear()

    def drop_drift(self) -> None:
        """Masters are replaced: local updates since ranks met were of the ones before. Local."""
        if isinstance(self._rule, Drifts):
            self._rule.load_scalars({})  # type: ignore[attr-defined]
            for unit in self._params.table.units:
                self._states.cells(unit)[self._rule.drift_name].clear()

    def errors_of(self, unit: Unit) -> OneBitErrors:
        """Those of a unit; zeros if there are none yet."""
        if unit.index not in self.errors:
            self.errors[unit.index] = OneBitErrors.zeros(unit.layout.padded, self._comm.size)
        return self.errors[unit.index]

    def show_local(self) -> None:
        """Compute with this rank's own parameters, as updates left them. Local."""
        self.shows_common = False
        for unit in self._params.table.units:
            drift = self._states.cells(unit)[self._drifts.drift_name].get()
            self._params.fill(unit, self._params.master(unit) + drift)

    def show_common(self) -> None:
        """Compute with the parameters that ranks last agreed on. Local."""
        self.shows_common = True
        for unit in self._params.table.units:
            self._params.fill(unit, self._params.master(unit))

    # -- before an update --------------------------------------------------------------------------------------------

    def before_update(self, step: int, multiplier: float) -> float:
        """Exchange what has to be agreed on before update `step`; gradients count times `multiplier`.

        Returns the multiplier that the update still has to apply.

        Collective over: the data axis.
        """
        kind = self.kind(step)
        if kind is Exchange.CODED_GRADIENT:
            for unit in self._params.table.units:
                self._agree_gradient(unit, multiplier)
            return 1.0
        if kind is Exchange.MOMENTUM:
            if self._edits != self._states.edits:
                self._edits = self._states.edits
                self._momenta.clear()
                self._silent.clear()
            self._prepare(step)
            for unit in self._params.table.units:
                self._agree_momentum(unit, step, multiplier)
        return multiplier

    def _agree_gradient(self, unit: Unit, multiplier: float) -> None:
        errors, grad = self.errors_of(unit), self._grads.reduced(unit)
        squares = compensate(errors.worker[: grad.numel()], grad, keep=multiplier, threads=self._comm.threads)
        self._exchange(unit, grad, errors, squares)
        mask = self._masks[unit.index]
        if mask is not None:
            grad.masked_fill_(mask, 0.0)

    def _agree_momentum(self, unit: Unit, step: int, multiplier: float) -> None:
        errors, grad, momentum = self.errors_of(unit), self._grads.reduced(unit), self._momentum(unit)
        squares: list[float] = []
        apart: list[tuple[Span, torch.Tensor]] = []
        ranges = list(self._ranges(unit))
        for key, group, span in ranges:
            if self._rule.exchanges(step, group) is not Exchange.MOMENTUM:
                self._comm.all_reduce(grad[span.slice], "avg")
                apart.append((span, momentum[span.slice].clone()))
                errors.worker[span.slice].zero_()
                continue
            keep, take = self._mixer.mix(group, multiplier, key)
            mine = [x[span.slice] for x in (errors.worker, momentum, grad)]
            squares += compensate(mine[0], mine[1], keep=keep, grad=mine[2], take=take, threads=self._comm.threads)
            if self._rule.wants_whole:  # type: ignore[attr-defined]
                mine[2].copy_(mine[1])  # the momentum before, where LAMB looks for it
        self._exchange(unit, momentum, errors, squares)
        for key, _, span in ranges:
            coefficient = self._mixer.coefficient(key)
            if coefficient != 1.0:
                momentum[span.slice].div_(coefficient)
        silent = self._silence(unit)
        if silent is not None:
            momentum.masked_fill_(silent, 0.0)
        for span, kept in apart:
            momentum[span.slice].copy_(kept)
        self._keep_momentum(unit, momentum)

    def _prepare(self, step: int) -> None:
        """Norms of all momenta for rules that scale by them.

        Collective over: the axes pipe and model, the first time.
        """
        prepare = getattr(self._rule, "prepare", None)
        if prepare is None or self._is_prepared:
            return
        self._is_prepared = True  # on all stages alike, also on those that have nothing to train
        ranges = [(unit, key, span) for unit in self._params.table.units for key, _, span in self._ranges(unit)]
        comm, keys = self._mesh["pipe", "model"], [key for _, key, _ in ranges]
        if any(comm.gather_objects(self._rule.lacks_scaling(step, keys))):  # type: ignore[attr-defined]
            norms = {}
            for unit, key, span in ranges:
                values = self._momentum(unit)[span.slice]
                norms[key] = float(torch.linalg.vector_norm(values, dtype=torch.float64)), values.numel()
            # One mean for the whole model: copies of a parameter on other stages or slices need the same coefficient.
            own = [norm / math.sqrt(count) for norm, count in norms.values() if count]
            every = [size for sizes in comm.gather_objects(own) for size in sizes]
            prepare(norms, mean=math.fsum(every) / max(1, len(every)))

    # -- after an update ---------------------------------------------------------------------------------------------

    def after_update(self, step: int) -> None:
        """Where ranks meet after the local update `step`: agree on what the local updates since the last time come to.

        Collective over: the data axis.
        """
        if self.kind(step) is Exchange.NOTHING:
            self.plain = sum(self._plain_bytes(unit) for unit in self._params.table.units)
        if self.kind(step) is not Exchange.DRIFT:
            return
        rule = self._drifts
        for unit in self._params.table.units:
            drift = self._grads.reduced(unit)  # no longer needed, and zero in its holes
            for window, span in self._windows(unit, step):
                rule.drift(window, drift[span.slice], threads=self._comm.threads)
            errors = self.errors_of(unit)
            squares = compensate(errors.worker[: drift.numel()], drift, threads=self._comm.threads)
            self._exchange(unit, drift, errors, squares)
            mask = self._masks[unit.index]
            if mask is not None:
                drift.masked_fill_(mask, 0.0)
            for window, span in self._windows(unit, step):
                rule.settle(window, drift[span.slice], threads=self._comm.threads)

    def _windows(self, unit: Unit, step: int) -> Iterator[tuple[Window, Span]]:
        for window in self._walker.windows_of(unit, list(self._groups), step):
            yield window, Span(window.key[2], window.key[2] + window.master.numel())

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _mixer(self) -> MixesMomentum:
        return self._rule  # type: ignore[return-value]

    @property
    def _drifts(self) -> Drifts:
        return self._rule  # type: ignore[return-value]

    def _exchange(self, unit: Unit, out: torch.Tensor, errors: OneBitErrors, squares: list[float]) -> None:
        """The mean of what stands in the errors of the worker. Collective over: the data axis."""
        ranks = self._comm.size
        exchange(self._comm, out, errors, squares)
        self.sent += sent_bytes(out.numel(), ranks)
        self.plain += self._plain_bytes(unit)
        own = Span(self._comm.rank * errors.server.numel(), (self._comm.rank + 1) * errors.server.numel())
        for hole in unit.layout.holes():
            out[hole.slice].zero_()
            errors.worker[hole.slice].zero_()
            common = hole.intersect(own)
            if common.numel:
                errors.server[common.shifted(-own.start).slice].zero_()
        errors.worker[out.numel() :].zero_()
        tail = Span(out.numel(), errors.worker.numel()).intersect(own)
        errors.server[tail.shifted(-own.start).slice].zero_()

    def _plain_bytes(self, unit: Unit) -> int:
        """What a sum of the unit in fp32 would send."""
        return 2 * 4 * unit.layout.padded * (self._comm.size - 1) // self._comm.size

    def _ranges(self, unit: Unit) -> Iterator[tuple[tuple[int, int, int], Mapping[str, Any], Span]]:
        """Key, group and range of what is mixed with one pair of factors."""
        if self._rule.wants_whole:  # type: ignore[attr-defined]
            for entry in unit.layout.entries:
                if entry.numel:
                    yield (unit.index, entry.group, entry.offset), self._groups[entry.group], entry.span
        else:
            for group, span in unit.layout.group_spans():
                yield (unit.index, group, span.start), self._groups[group], span

    def _momentum(self, unit: Unit) -> torch.Tensor:
        """The whole momentum of a unit.

        Collective over: the data axis, the first time and after states were set, where masters are cut.
        """
        cell = self._states.cells(unit)["exp_avg"]
        if self._params.placement.is_whole:
            return cell.get()
        if unit.index not in self._momenta:
            whole = torch.zeros(unit.layout.padded)
            widen(self._mesh, whole, cell.get(), self._params.placement, WHOLE, unit.layout.padded)
            self._momenta[unit.index] = whole
        whole = self._momenta[unit.index]
        whole[self._params.span(unit).slice].copy_(cell.get())  # groups in full precision change theirs in the update
        return whole

    def _keep_momentum(self, unit: Unit, momentum: torch.Tensor) -> None:
        cell = self._states.cells(unit)["exp_avg"]
        if self._params.placement.is_whole:
            cell.put(momentum)
        else:
            own = cell.get()
            own.copy_(momentum[self._params.span(unit).slice])
            cell.put(own)

    def _silence(self, unit: Unit) -> torch.Tensor | None:
        """Where the momentum has to be 0: by a mask, or because the frozen variance is.

        Collective over: the data axis, the first time, where masters are cut.
        """
        if unit.index not in self._silent:
            dead = (self._states.cells(unit)["exp_avg_sq"].get() == 0.0).to(torch.uint8)
            if not self._params.placement.is_whole:
                whole = torch.zeros(unit.layout.padded, dtype=torch.uint8)
                widen(self._mesh, whole, dead, self._params.placement, WHOLE, unit.layout.padded)
                dead = whole
            silent, mask = dead.bool(), self._masks[unit.index]
            for hole in unit.layout.holes():
                silent[hole.slice] = False
            if mask is not None:
                silent |= mask
            self._silent[unit.index] = silent if bool(silent.any()) else None
        return self._silent[unit.index]

    @property
    def nbytes(self) -> int:
        """Bytes of errors and of whole momenta on this rank."""
        momenta = sum(x.nbytes for x in self._momenta.values())
        silent = sum(x.nbytes for x in self._silent.values() if x is not None)
        return momenta + silent + sum(errors.nbytes for errors in self.errors.values())


def _mask(unit: Unit, groups: Sequence[dict[str, Any]]) -> torch.Tensor | None:
    """True where a group's mask says 0; None if no group of the unit has one. Shapes: [padded].

    Raises:
        ConfigError: a mask is of another shape than a parameter of its group.
    """
    entries = [entry for entry in unit.layout.entries if groups[entry.group].get(MASK) is not None]
    if not entries:
        return None
    found = torch.zeros(unit.layout.padded, dtype=torch.bool)
    for entry in entries:
        found[entry.span.slice] = _fitting(entry, groups[entry.group][MASK]) == 0
    return found


def _fitting(entry: Entry, mask: Any) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) not in (entry.shape, (entry.numel,)):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        msg = (
            f"{MASK} of parameter group {entry.group} is {shape} and parameter {entry.name!r} in it has shape "
            f"{entry.shape}; give a tensor of zeros and ones of the parameter's shape, and each such parameter a group"
        )
        raise ConfigError(msg)
    return mask.detach().reshape(-1).cpu()
