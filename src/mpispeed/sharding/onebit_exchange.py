"""The 1-bit exchange of momenta, gradients or local updates of units, one bit per element.

The rule chooses what is exchanged at each step (`optim.exchange`); here it is compressed with error feedback, unit by
unit. Gradients of such steps stay local: they are held in full and not summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.native.flat import divisor
from mpispeed.native.one_bit import compensate
from mpispeed.optim.exchange import Drifts, Exchange, Exchanges, MixesMomentum
from mpispeed.sharding.momenta import Momenta
from mpispeed.sharding.onebit_compressor import Compressor
from mpispeed.sharding.onebit_early import EarlyOneBit
from mpispeed.store.layout import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.mesh.compressed.onebit import OneBitErrors
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.grads import GradStore
    from mpispeed.sharding.param_shards import ParamShards
    from mpispeed.sharding.update_windows import StateStore, UpdateWindows
    from mpispeed.store.layout import Table, Unit

LOCAL = (Exchange.NOTHING, Exchange.DRIFT)
"""Steps in which parameters of ranks differ."""


class OneBitExchange:
    """Exchanges a unit's momenta, gradients or drifts through one bit per element.

    Holes between the tensors of a unit, and their errors, are 0 after every exchange.

    Attributes:
        errors: errors of compression by unit; made when a unit is compressed for the first time.
        step: number of the coming update.
        shows_common: parameters are those that ranks last agreed on, without later local updates.
        sent: bytes that this rank has sent in the exchanges of the last step.
        plain: bytes that sums of the same in fp32 would have sent.
    """

    def __init__(
        self,
        mesh: Mesh,
        params: ParamShards,
        grads: GradStore,
        states: StateStore,
        rule: Any,
        groups: Sequence[dict[str, Any]],
        update_windows: UpdateWindows,
        hops: tuple[str, str] | None = None,
        early_lane: Mesh | None = None,
    ) -> None:
        """Args: `rule` is an `Exchanges`, `update_windows` gives its windows, `hops` as in `Compressor`.

        With `early_lane`, the channel of gradients, units are compressed beside the backward pass.

        Raises:
            ConfigError: masters are not fp32 or not in common, or a mask does not fit its group.
        """
        self._mesh, self._params, self._grads, self._states = mesh, params, grads, states
        self._rule: Exchanges = rule
        self._groups, self._update_windows = groups, update_windows
        self.compressor, self._comm = Compressor(mesh, hops, params.tiers.device), mesh["data"]
        self.errors: dict[int, OneBitErrors] = {}
        self._momenta, self._is_prepared = Momenta(mesh, params, states, groups), False
        self.step, self.sent, self.plain, self.shows_common = 1, 0, 0, False
        _require_common_fp32(rule, params.table)
        self.early = (
            None if early_lane is None else EarlyOneBit(self, Compressor(early_lane, hops, self.compressor.device))
        )

    def kind(self, step: int) -> Exchange:
        """The quantity that is exchanged for update number `step`."""
        return self._rule.exchanges(step)

    def begin(self, step: int) -> None:
        """Prepare for the gradients of update number `step`. Local."""
        self._grads.expect(is_local=self.kind(step) is not Exchange.GRADIENT, early=self.early)
        if self.early is not None:
            self.early.begin(step)
        self.step, self.sent, self.plain = step, 0, 0
        self.shows_common = False  # an update fills parameters with local ones
        if self.kind(step) in LOCAL and self.kind(step - 1) not in LOCAL:
            self.clear_errors()  # they were of gradients

    def subject(self, step: int) -> str:
        """The quantity whose errors are kept after update `step`: momentum, gradient or drift."""
        if self.kind(step) in LOCAL:
            return "drift"
        return "momentum" if self.kind(step) is Exchange.MOMENTUM else "gradient"

    def is_apart(self, step: int) -> bool:
        """True if parameters differ between ranks after update `step`."""
        return self.kind(step) is Exchange.NOTHING

    def forget(self) -> None:
        """Drop errors and copies, because states are replaced."""
        self._is_prepared = False
        self.errors.clear()
        self._momenta.forget()

    def drop_drift(self) -> None:
        """Drop local updates since the last agreement, because masters are replaced. Local."""
        if isinstance(self._rule, Drifts):
            self._rule.load_scalars({})  # type: ignore[attr-defined]
            for unit in self._params.table.units:
                self._states.tensors(unit)[self._rule.drift_name].clear()

    def errors_of(self, unit: Unit) -> OneBitErrors:
        """The errors of a unit; zeros if there are none yet."""
        if unit.index not in self.errors:
            self.errors[unit.index] = self.compressor.zeros(unit.layout.padded)
        return self.errors[unit.index]

    def show_local(self) -> None:
        """Compute with this rank's own parameters, as updates left them. Local."""
        self.shows_common = False
        for unit in self._params.table.units:
            drift = self._states.tensors(unit)[self._drifts.drift_name].get()
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
        if kind not in (Exchange.CODED_GRADIENT, Exchange.MOMENTUM):
            return multiplier
        if kind is Exchange.MOMENTUM:
            self._momenta.look()
            self._prepare(step)
        for unit in self._params.table.units:
            grad = self._grads.shards.reduced(unit)
            if self.early is None or not self.early.has(unit):
                self.code(unit, step, multiplier, grad, self.compressor)
            mask = self._momenta.masks[unit.index]
            if kind is Exchange.MOMENTUM:
                self._take_momentum(unit, step, grad)
            elif mask is not None:
                grad.masked_fill_(mask, 0.0)
        if self.early is not None:
            self.early.end(is_applied=True)
        return 1.0

    def code(self, unit: Unit, step: int, multiplier: float, grad: torch.Tensor, compressor: Compressor) -> None:
        """Replace a unit's gradients by what ranks agree on for update `step`: their mean, or the new momentum.

        Collective over: the data axis, through `compressor`.
        Shapes: grad [padded].
        """
        values, threads = compressor.values(self.errors_of(unit), grad.numel()), compressor.comm.group.threads
        if self.kind(step) is Exchange.CODED_GRADIENT:
            squares = compensate(values, grad, keep=multiplier, threads=threads)
            self._exchange(unit, grad, values, squares, compressor)
            return
        momentum, squares = self._momenta.of(unit), []
        apart: list[tuple[Span, torch.Tensor]] = []
        for key, group, span in self._ranges(unit):
            mine = [x[span.slice] for x in (values, momentum, grad)]
            if self._rule.exchanges(step, group) is Exchange.MOMENTUM:
                keep, take = self._mixer.mix(group, multiplier, key)
                squares += compensate(mine[0], mine[1], keep=keep, grad=mine[2], take=take, threads=threads)
            else:
                compressor.comm.all_reduce(mine[2], "avg")
                apart.append((span, mine[2] * multiplier))
                mine[0].zero_()
        self._exchange(unit, grad, values, squares, compressor, [span for span, _ in apart])
        for span, mean in apart:
            grad[span.slice].copy_(mean)

    def _take_momentum(self, unit: Unit, step: int, agreed: torch.Tensor) -> None:
        """Set the momentum to the agreed one, and leave the old one in its place for LAMB."""
        momentum, silent = self._momenta.of(unit), self._momenta.silence(unit)
        for key, group, span in self._ranges(unit):
            if self._rule.exchanges(step, group) is not Exchange.MOMENTUM:
                continue
            values, new = momentum[span.slice], agreed[span.slice]
            before = values.clone() if self._rule.wants_whole else None  # type: ignore[attr-defined]
            values.copy_(new)
            if before is not None:
                new.copy_(before)
            coefficient = self._mixer.coefficient(key)
            if coefficient != 1.0:
                values.div_(divisor(coefficient, values))
            if silent is not None:
                values.masked_fill_(silent[span.slice], 0.0)
        self._momenta.keep(unit, momentum)

    @property
    def has_momenta(self) -> bool:
        """True once the data that compressed momenta need from other ranks are here."""
        return self._momenta.is_ready

    def clear_errors(self) -> None:
        """Forget all errors of compression. Local."""
        for errors in self.errors.values():
            errors.clear()

    def drop(self) -> None:
        """Forget errors of compressed units, because the step is skipped. Local."""
        if self.early is not None:
            self.early.end(is_applied=False)

    @property
    def is_pending(self) -> bool:
        """True between a compressed message and the update that takes it: parameters have not seen its errors."""
        return self.early is not None and self.early.is_pending

    def _prepare(self, step: int) -> None:
        """Compute norms of all momenta for rules that scale by them.

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
                values = self._momenta.of(unit)[span.slice]
                norms[key] = float(torch.linalg.vector_norm(values, dtype=torch.float64)), values.numel()
            # One mean for the whole model: copies of a parameter on other stages or slices need the same coefficient.
            own = [norm / math.sqrt(count) for norm, count in norms.values() if count]
            every = [size for sizes in comm.gather_objects(own) for size in sizes]
            prepare(norms, mean=math.fsum(every) / max(1, len(every)))

    # -- after an update ---------------------------------------------------------------------------------------------

    def after_update(self, step: int) -> None:
        """Agree on the sum of local updates since the last agreement, if one is due after update `step`.

        Collective over: the data axis.
        """
        if self.kind(step) is Exchange.NOTHING:
            self.plain = sum(self.compressor.plain_bytes(unit.layout.padded) for unit in self._params.table.units)
        if self.kind(step) is not Exchange.DRIFT:
            return
        rule = self._drifts
        for unit in self._params.table.units:
            drift = self._grads.shards.reduced(unit)  # no longer needed, and zero in its holes
            self._for_windows(unit, step, rule.drift, drift)
            values = self.compressor.values(self.errors_of(unit), drift.numel())
            squares = compensate(values, drift, threads=self._comm.group.threads)
            self._exchange(unit, drift, values, squares, self.compressor)
            mask = self._momenta.masks[unit.index]
            if mask is not None:
                drift.masked_fill_(mask, 0.0)
            self._for_windows(unit, step, rule.settle, drift)

    def _for_windows(self, unit: Unit, step: int, call: Callable[..., None], values: torch.Tensor) -> None:
        """Call `call(window, its part of values, threads=...)` for all windows of a unit. Shapes: values [padded]."""
        windows, threads = self._update_windows.windows_of(unit, list(self._groups), step), self._comm.group.threads
        with self._momenta.together(), closing(windows):
            for window in windows:
                call(window, values[window.key[2] :][: window.master.numel()], threads=threads)

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _mixer(self) -> MixesMomentum:
        return self._rule  # type: ignore[return-value]

    @property
    def _drifts(self) -> Drifts:
        return self._rule  # type: ignore[return-value]

    def _exchange(
        self,
        unit: Unit,
        out: torch.Tensor,
        values: torch.Tensor,
        squares: list[float],
        compressor: Compressor,
        apart: Sequence[Span] = (),
    ) -> None:
        """Write the mean over ranks of `values` into `out`; 0 in holes and in `apart`.

        Collective over: the data axis, through `compressor`.
        """
        errors, padded = self.errors_of(unit), unit.layout.padded
        compressor.mean(out, errors, values, squares)
        self.sent += self.compressor.sent_bytes(padded)
        self.plain += self.compressor.plain_bytes(padded)
        (worker, server), holes = self.compressor.spans(errors), [*unit.layout.holes(), *apart]
        for hole in holes:
            out[hole.slice].zero_()
        for hole in (*holes, Span(padded, max(padded, worker.stop))):
            for own, error in ((worker, errors.worker), (server, errors.server)):
                common = hole.intersect(own)
                if common.numel:
                    error[common.shifted(-own.start).slice].zero_()

    def _ranges(self, unit: Unit) -> Iterator[tuple[tuple[int, int, int], Mapping[str, Any], Span]]:
        """Key, group and range of each part that is mixed with one pair of factors."""
        if self._rule.wants_whole:  # type: ignore[attr-defined]
            for entry in unit.layout.entries:
                if entry.numel:
                    yield (unit.index, entry.group, entry.offset), self._groups[entry.group], entry.span
        else:
            for group, span in unit.layout.group_spans():
                yield (unit.index, group, span.start), self._groups[group], span

    @property
    def nbytes(self) -> int:
        """Bytes of errors and of full momenta on this rank."""
        return self._momenta.nbytes + sum(errors.nbytes for errors in self.errors.values())


def _require_common_fp32(rule: Any, table: Table) -> None:
    """Require masters and gradients in fp32, of parameters that all data ranks have in common.

    Raises:
        ConfigError: some are not.
    """
    found = {dtype for unit in table.units for dtype in (unit.states.full, unit.states.accumulate)}
    if found - {torch.float32}:
        odd = ", ".join(sorted(map(str, found - {torch.float32})))
        msg = (
            f"optimizer {rule.name} works on masters and gradients in float32, found {odd}; give it a model of "
            "float32 or 16-bit parameters, and leave data_types.grad_accum_dtype out or at fp32"
        )
        raise ConfigError(msg)
    apart = next((unit for unit in table.units if unit.states.differs_over_data), None)
    if apart is not None:
        msg = (
            f"optimizer {rule.name} takes means over all data ranks, and these have values of their own of the "
            f"parameters of {apart.name!r}; use another optimizer, such as Adam"
        )
        raise ConfigError(msg)


def is_local(onebit: OneBitExchange | None) -> bool:
    """True while the model has this rank's own parameters, which differ from those of other ranks."""
    return onebit is not None and onebit.is_apart(onebit.step - 1) and not onebit.shows_common
