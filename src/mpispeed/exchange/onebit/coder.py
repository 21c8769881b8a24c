"""Compression of units with error feedback: means of momenta, gradients or local updates, one bit per element.

Holes between the tensors of a unit, and their errors, are 0 after every exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.exchange.onebit.compressor import Compressor
from mpispeed.exchange.onebit.momenta import Momenta
from mpispeed.native.flat import divisor
from mpispeed.native.one_bit import compensate
from mpispeed.optim.exchange import Exchange, Exchanges, MixesMomentum
from mpispeed.store.layout import Span
from mpispeed.store.tiers import MASTER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.mesh.compressed.onebit import OneBitErrors
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.param_shards import ParamShards
    from mpispeed.sharding.update_windows import StateStore
    from mpispeed.store.layout import Unit


class UnitCoder:
    """Exchanges a unit's momenta, gradients or drifts through one bit per element, where its states are.

    Attributes:
        errors: errors of compression by unit; made when a unit is compressed for the first time.
        compressor: means over the data axis.
        momenta: the momenta of units.
        sent: bytes that this rank has sent in the exchanges of the last step.
        plain: bytes that sums of the same in fp32 would have sent.
    """

    def __init__(
        self,
        mesh: Mesh,
        params: ParamShards,
        states: StateStore,
        rule: Any,
        groups: Sequence[dict[str, Any]],
        hops: tuple[str, str] | None,
    ) -> None:
        """Args: `rule` is an `Exchanges`, `hops` as in `Compressor`.

        Raises:
            ConfigError: a mask does not fit its group.
        """
        self._mesh, self._params, self._groups = mesh, params, groups
        self._rule: Exchanges = rule
        self.compressor = Compressor(mesh, hops)
        self.errors: dict[int, OneBitErrors] = {}
        self.momenta, self._is_prepared = Momenta(mesh, params, states, groups), False
        self.sent, self.plain = 0, 0

    def kind(self, step: int) -> Exchange:
        """The quantity that is exchanged for update number `step`."""
        return self._rule.exchanges(step)

    def begin(self) -> None:
        """Count bytes from 0. Local."""
        self.sent, self.plain = 0, 0

    def forget(self) -> None:
        """Drop errors and copies, because states are replaced."""
        self._is_prepared = False
        self.errors.clear()
        self.momenta.forget()

    def errors_of(self, unit: Unit) -> OneBitErrors:
        """The errors of a unit; zeros if there are none yet."""
        if unit.index not in self.errors:
            home = self._params.tiers.home(MASTER, unit.index)
            self.errors[unit.index] = self.compressor.zeros(unit.layout.padded, home)
        return self.errors[unit.index]

    def beside_states(self, unit: Unit, values: torch.Tensor) -> torch.Tensor:
        """`values` on the device of the unit's states: themselves if they are there, else a copy."""
        return values.to(self._params.tiers.home(MASTER, unit.index))

    def clear_errors(self) -> None:
        """Forget all errors of compression. Local."""
        for errors in self.errors.values():
            errors.clear()

    @property
    def has_momenta(self) -> bool:
        """True once the data that compressed momenta need from other ranks are here."""
        return self.momenta.is_ready

    @property
    def nbytes(self) -> int:
        """Bytes of errors and of full momenta on this rank."""
        return self.momenta.nbytes + sum(errors.nbytes for errors in self.errors.values())

    # -- momenta and gradients ---------------------------------------------------------------------------------------

    def prepare(self, step: int) -> None:
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
                values = self.momenta.of(unit)[span.slice]
                norms[key] = float(torch.linalg.vector_norm(values, dtype=torch.float64)), values.numel()
            # One mean for the whole model: copies of a parameter on other stages or slices need the same coefficient.
            own = [norm / math.sqrt(count) for norm, count in norms.values() if count]
            every = [size for sizes in comm.gather_objects(own) for size in sizes]
            prepare(norms, mean=math.fsum(every) / max(1, len(every)))

    def code(self, unit: Unit, step: int, multiplier: float, grad: torch.Tensor, compressor: Compressor) -> None:
        """Replace a unit's gradients by what ranks agree on for update `step`: their mean, or the new momentum.

        Collective over: the data axis, through `compressor`.
        Shapes: grad [padded], on the device of the unit's states.
        """
        values, threads = compressor.values(self.errors_of(unit), grad.numel()), compressor.comm.group.threads
        if self.kind(step) is Exchange.CODED_GRADIENT:
            squares = compensate(values, grad, keep=multiplier, threads=threads)
            self.mean(unit, grad, values, squares, compressor)
            return
        momentum, squares = self.momenta.of(unit), []
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
        self.mean(unit, grad, values, squares, compressor, [span for span, _ in apart])
        for span, mean in apart:
            grad[span.slice].copy_(mean)

    def take_momentum(self, unit: Unit, step: int, agreed: torch.Tensor) -> None:
        """Set the momentum to the agreed one, and leave the old one in its place for LAMB."""
        momentum, silent = self.momenta.of(unit), self.momenta.silence(unit)
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
        self.momenta.keep(unit, momentum)

    def add_unsent(self) -> None:
        """Count what sums in fp32 would have sent in a step without an exchange. Local."""
        self.plain = sum(self.compressor.plain_bytes(unit.layout.padded) for unit in self._params.table.units)

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _mixer(self) -> MixesMomentum:
        return self._rule  # type: ignore[return-value]

    def mean(
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
