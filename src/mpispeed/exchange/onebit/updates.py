"""Exchanges of momenta, gradients or local updates around the updates of a run, one bit per element.

The rule chooses what is exchanged at each step (`optim.exchange`); here it is compressed with error feedback, unit by
unit. Gradients of such steps stay local: they are held in full and not summed (`gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.exchange.onebit.coder import UnitCoder
from mpispeed.exchange.onebit.compressor import Compressor
from mpispeed.exchange.onebit.gradients import OneBitGradients
from mpispeed.exchange.strategy import ExchangeStrategy
from mpispeed.native.one_bit import compensate
from mpispeed.optim.exchange import Drifts, Exchange
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.grad_shards import GradShards
    from mpispeed.sharding.params import ParamStore
    from mpispeed.sharding.reducers import SumGradients
    from mpispeed.sharding.update_windows import StateStore, UpdateWindows
    from mpispeed.store.layout import Table, Unit

LOCAL = (Exchange.NOTHING, Exchange.DRIFT)
"""Steps in which parameters of ranks differ."""


class OneBitUpdates(ExchangeStrategy):
    """Exchanges momenta, gradients or drifts through one bit per element, at the steps that the rule chooses.

    Attributes:
        mesh, params, states, rule, groups: the components it works on.
        coder: compresses units.
        step: number of the coming update.
        shows_common: parameters are those that ranks last agreed on, without later local updates.
    """

    is_phased = True

    def __init__(
        self,
        mesh: Mesh,
        params: ParamStore,
        grads: GradShards,
        sums: SumGradients,
        states: StateStore,
        rule: Any,
        groups: Sequence[dict[str, Any]],
        update_windows: UpdateWindows,
        hops: tuple[str, str] | None = None,
        early_lane: Mesh | None = None,
    ) -> None:
        """Args: `rule` is an `Exchanges`, `update_windows` gives its windows, `hops` as in `Compressor`.

        With `early_lane`, the channel of gradients, units are compressed beside the backward pass; their gradients land
        where states are.

        Raises:
            ConfigError: masters are not fp32 or not in common, or a mask does not fit its group.
        """
        self.mesh, self.params, self.states, self.rule, self.groups = mesh, params, states, rule, groups
        self._shards, self._grads, self._update_windows = params.shards, grads, update_windows
        self.coder = UnitCoder(mesh, params.shards, states, rule, groups, hops)
        self.step, self.shows_common = 1, False
        _require_common_fp32(rule, params.table)
        beside = None if early_lane is None else Compressor(early_lane, hops)
        self.gradients = OneBitGradients(self.coder, sums, grads, beside)
        super().__init__(self.gradients, rule)

    def kind(self, step: int) -> Exchange:
        """The quantity that is exchanged for update number `step`."""
        return self.coder.kind(step)

    def begin(self, step: int) -> None:
        """Prepare for the gradients of update number `step`. Local."""
        self.gradients.begin(step)
        self.coder.begin()
        self.step = step
        self.shows_common = False  # an update fills parameters with local ones
        if self.kind(step) in LOCAL and self.kind(step - 1) not in LOCAL:
            self.coder.clear_errors()  # they were of gradients

    def drop(self) -> None:
        """Forget errors of compressed units, because the step is skipped. Local."""
        self.gradients.end(is_applied=False)

    # -- before an update --------------------------------------------------------------------------------------------

    def before_update(self, step: int, multiplier: float) -> float:
        """Exchange what has to be agreed on before update `step`; gradients count times `multiplier`.

        Returns the multiplier that the update still has to apply.

        Collective over: the data axis.
        """
        kind, coder = self.kind(step), self.coder
        if kind not in (Exchange.CODED_GRADIENT, Exchange.MOMENTUM):
            return multiplier
        if kind is Exchange.MOMENTUM:
            coder.momenta.look()
            coder.prepare(step)
        for unit in self._shards.table.units:
            landed = self._grads.reduced(unit)
            grad = coder.beside_states(unit, landed)
            if not self.gradients.has_taken(unit):
                coder.code(unit, step, multiplier, grad, coder.compressor)
            mask = coder.momenta.masks[unit.index]
            if kind is Exchange.MOMENTUM:
                coder.take_momentum(unit, step, grad)
            elif mask is not None:
                grad.masked_fill_(mask, 0.0)
            if grad is not landed:
                landed.copy_(grad)
        self.gradients.end(is_applied=True)
        return 1.0

    # -- after an update ---------------------------------------------------------------------------------------------

    def after_update(self, step: int) -> None:
        """Agree on the sum of local updates since the last agreement, if one is due after update `step`.

        Collective over: the data axis.
        """
        coder = self.coder
        if self.kind(step) is Exchange.NOTHING:
            coder.add_unsent()
        if self.kind(step) is not Exchange.DRIFT:
            return
        rule = self._drifts
        for unit in self._shards.table.units:
            drift = coder.beside_states(unit, self._grads.reduced(unit))  # no longer needed, and zero in its holes
            self._for_windows(unit, step, rule.drift, drift, has_out=False)
            values = coder.compressor.values(coder.errors_of(unit), drift.numel())
            squares = compensate(values, drift, threads=coder.compressor.comm.group.threads)
            coder.mean(unit, drift, values, squares, coder.compressor)
            mask = coder.momenta.masks[unit.index]
            if mask is not None:
                drift.masked_fill_(mask, 0.0)
            self._for_windows(unit, step, rule.settle, drift)

    def _for_windows(
        self, unit: Unit, step: int, call: Callable[..., None], values: torch.Tensor, *, has_out: bool = True
    ) -> None:
        """Call `call(window, its part of values, threads=...)` for all windows of a unit. Shapes: values [padded]."""
        windows = self._update_windows.windows_of((unit,), list(self.groups), step, has_out=has_out)
        threads = self.coder.compressor.comm.group.threads
        with self.coder.momenta.together(), closing(windows):
            for window in windows:
                call(window, values[window.key[2] :][: window.master.numel()], threads=threads)

    @property
    def _drifts(self) -> Drifts:
        return self.rule

    # -- local parameters --------------------------------------------------------------------------------------------

    def is_apart_after(self, step: int) -> bool:
        """True if parameters differ between ranks after update `step`."""
        return self.kind(step) is Exchange.NOTHING

    @property
    def is_apart(self) -> bool:
        """True between updates that ranks made by themselves."""
        return self.is_apart_after(self.step - 1)

    @property
    def has_local_params(self) -> bool:
        """True while the model has this rank's own parameters, which differ from those of other ranks."""
        return self.is_apart and not self.shows_common

    def show(self, *, is_training: bool, is_refreshed: bool = False) -> None:
        """As in `ExchangeStrategy`. Local."""
        if not self.is_apart:
            return
        self.shows_common = self.shows_common or is_refreshed
        if self.shows_common != is_training:
            return
        kinds = (Kind.hp_params, Kind.lp_params, Kind.optim_states)
        self.params.require(kinds, "engine.train() or eval() between meetings of a 1-bit optimizer")
        self.shows_common = not is_training
        for unit in self._shards.table.units:
            if is_training:
                drift = self.states.tensors(unit)[self._drifts.drift_name].get()
                self._shards.fill(unit, self._shards.master(unit) + drift)
            else:
                self._shards.fill(unit, self._shards.master(unit))

    @contextmanager
    def common(self) -> Iterator[None]:
        """As in `ExchangeStrategy`."""
        if not self.has_local_params:
            yield
            return
        self.show(is_training=False)
        try:
            yield
        finally:
            self.show(is_training=True)

    # -- state -------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Errors and full momenta."""
        return {"1-bit errors": self.coder.nbytes}

    def forget(self) -> None:
        """Drop errors and copies, because states are replaced."""
        super().forget()
        self.coder.forget()

    def drop_local(self) -> None:
        """Drop local updates since the last agreement, because masters are replaced. Local."""
        if isinstance(self.rule, Drifts):
            self.rule.load_scalars({})  # type: ignore[attr-defined]
            for unit in self._shards.table.units:
                self.states.tensors(unit)[self.rule.drift_name].clear()

    def subject(self, step: int) -> str:
        """The quantity whose errors are kept after update `step`: momentum, gradient or drift."""
        if self.kind(step) in LOCAL:
            return "drift"
        return "momentum" if self.kind(step) is Exchange.MOMENTUM else "gradient"


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
