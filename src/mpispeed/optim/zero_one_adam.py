"""0/1 Adam. Source: Lu et al., "Maximizing Communication Efficiency ... via 0/1 Adam", ICLR 2023, arXiv 2202.06009."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpispeed.base.errors import UsageError
from mpispeed.native.flat import Terms
from mpispeed.optim.exchange import Exchange
from mpispeed.optim.host_rule import HostRule, run_kernel
from mpispeed.optim.onebit_params import DEFAULTS, check_count, onebit_terms, read_onebit, warm_terms
from mpispeed.optim.rule import RULES, Rule, Window

COUNTS: dict[str, int] = {
    "var_freeze_step": 100_000,
    "var_update_scaler": 16,
    "local_step_scaler": 32_678,
    "local_step_clipper": 16,
}
"""Options of the whole optimizer and their defaults, in updates; 32678 as in DeepSpeed."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Kinds of updates of 0/1 Adam by their number, counted from 1; a function of the number alone.

    The variance is updated where the number is a multiple of an interval that starts at 1 and doubles after every
    `var_update_scaler` such updates, up to update `var_freeze_step`. From then on steps are local, and ranks
    synchronize where the number is a multiple of a second interval; it starts at 1 and doubles after every
    `local_step_scaler` local steps, up to `local_step_clipper`.
    """

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def is_frozen(self, step: int) -> bool:
        """True if update `step` is local and leaves the variance as it is."""
        return step > self.var_freeze_step

    def is_variance_step(self, step: int) -> bool:
        """True if update `step` has the mean of gradients in full precision and updates the variance."""
        if self.is_frozen(step):
            return False
        interval, last = 1, 0  # the last variance step of all shorter intervals
        while True:
            end = (last // interval + self.var_update_scaler) * interval
            if step <= end:
                return step % interval == 0
            interval, last = 2 * interval, end

    def is_sync_step(self, step: int) -> bool:
        """True if ranks synchronize after the local update `step`."""
        if not self.is_frozen(step):
            return False
        doublings = (step - self.var_freeze_step - 1) // self.local_step_scaler
        # A longer shift has no effect and could be a number of a million bits.
        interval = min(self.local_step_clipper, 1 << min(doublings, self.local_step_clipper.bit_length()))
        return step % interval == 0


class ZeroOneAdam(HostRule):
    """Adam without bias correction: a variance updated ever more rarely, then local steps between synchronizations.

    Up to update `var_freeze_step`: on variance steps as the warm-up of `OnebitAdam`; on others the gradient is
    exchanged as one bit and the variance stays. Afterwards `Window.master` is the common parameter p, which changes
    only where ranks synchronize; a local update goes to u = `momentum_accumulator` and to `Window.out`, which is then
    needed:

        m = beta1 m + (1 - beta1) g;  u -= lr (m / (sqrt(v) + eps) + weight_decay (p + u));  out = p + u

    Where `exchanges` says DRIFT, the caller takes `drift` of every window after the update, has it averaged through
    one bit, and gives the result to `settle`. Where `exp_avg_sq` is 0 no variance step saw a gradient: such an element
    keeps a momentum of 0, since one bit cannot say 0, and moves by decay alone.

    Steps are counted from the first update; DeepSpeed's counter is one ahead, because its first has no effect.
    """

    kernel = "adam"
    drift_name = "momentum_accumulator"
    local_names = ("exp_avg", "momentum_accumulator")

    def __init__(
        self,
        *,
        var_freeze_step: int = COUNTS["var_freeze_step"],
        var_update_scaler: int = COUNTS["var_update_scaler"],
        local_step_scaler: int = COUNTS["local_step_scaler"],
        local_step_clipper: int = COUNTS["local_step_clipper"],
        **hyper: Any,
    ) -> None:
        """Raises ConfigError when one of the four is not a whole number of at least 1."""
        super().__init__("ZeroOneAdam", {**DEFAULTS, **hyper})
        self.state_names = (*self.state_names, "momentum_accumulator")
        self.intervals = Intervals(
            check_count(self.name, "var_freeze_step", var_freeze_step),
            check_count(self.name, "var_update_scaler", var_update_scaler),
            check_count(self.name, "local_step_scaler", local_step_scaler),
            check_count(self.name, "local_step_clipper", local_step_clipper),
        )
        self._rates: dict[str, tuple[float, int]] = {}  # by group: sum of lr since the meeting, up to which step
        self._met: set[str] = set()  # groups that met after that step; other windows of theirs may still need the sum

    def exchanges(self, step: int, group: Mapping[str, Any] | None = None) -> Exchange:
        """GRADIENT or CODED_GRADIENT, later NOTHING or DRIFT; see `optim.exchange`."""
        if self.intervals.is_frozen(step):
            return Exchange.DRIFT if self.intervals.is_sync_step(step) else Exchange.NOTHING
        return Exchange.GRADIENT if self.intervals.is_variance_step(step) else Exchange.CODED_GRADIENT

    def update_one(self, window: Window, grad_scale: float, threads: int) -> float | Tensor:
        """Update one window that is not empty; gives 1.

        Raises:
            UsageError: a local update without `out`.
        """
        hyper = {**self.defaults, **window.group}
        m, v, u = (window.state[name] for name in self.state_names)
        if self.intervals.is_variance_step(window.step):
            terms = self.terms(hyper, window.step, grad_scale)
            return run_kernel("adam", window.master, (m, v), window.grad, window.out, terms, threads)
        terms = _terms(hyper, grad_scale)
        if not self.intervals.is_frozen(window.step):
            return run_kernel("zero_one_coded", window.master, (m, v), window.grad, window.out, terms, threads)
        if window.out is None:
            msg = (
                f"ZeroOneAdam: window {window.key} has no out at the local step {window.step}; "
                "its local parameter goes there, the master holds the common one"
            )
            raise UsageError(msg)
        self._count_rate(window, float(hyper["lr"]))
        return run_kernel("zero_one_local", window.master, (m, u, v), window.grad, window.out, terms, threads)

    def drift(self, window: Window, buffer: Tensor, *, threads: int = 1) -> None:
        """Fill `buffer` with the values to be averaged: u (sqrt(v) + eps), 0 where v is 0.

        Shapes: `buffer` is as the master of the window.
        """
        if window.master.numel():
            terms = _terms({**self.defaults, **window.group})
            u, v = window.state["momentum_accumulator"], window.state["exp_avg_sq"]
            run_kernel("zero_one_drift", buffer, (u,), v, None, terms, threads)

    def settle(self, window: Window, agreed: Tensor, *, threads: int = 1) -> None:
        """Meet at the mean of `drift`: master and `out` become the new common parameter, u becomes 0.

        The momentum becomes -agreed / (sum of learning rates since the last meeting); 0 where that sum is 0.

        Shapes: `agreed` is as the master of the window; not modified.

        Raises:
            UsageError: the window's group had no local update of this step.
        """
        if not window.master.numel():
            return
        total, at = self._rates.get(_group_of(window), (0.0, 0))
        if at != window.step:
            msg = (
                f"ZeroOneAdam: window {window.key} meets at step {window.step}, but the last local update of its "
                f"group was {at}; call update first"
            )
            raise UsageError(msg)
        terms = _terms({**self.defaults, **window.group}, rate_sum=total or float("inf"))
        states = tuple(window.state[name] for name in ("exp_avg", "momentum_accumulator", "exp_avg_sq"))
        self._met.add(_group_of(window))
        run_kernel("zero_one_settle", window.master, states, agreed, window.out, terms, threads)

    def _count_rate(self, window: Window, lr: float) -> None:
        group = _group_of(window)
        total, at = self._rates.get(group, (0.0, 0))
        if at != window.step:  # not yet counted for another window of the group
            self._rates[group] = (lr if group in self._met else total + lr, window.step)
            self._met.discard(group)

    def terms(self, hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
        """The factors of the variance step `step` with the hyper-parameters of a group."""
        return warm_terms(hyper, step, grad_scale)

    def scalars(self) -> dict[str, Any]:
        """By group index: the sum of learning rates since the last meeting, and the step up to which it goes."""
        rows = {group: (0.0 if group in self._met else total, at) for group, (total, at) in self._rates.items()}
        return {"rates": {group: {"sum": total, "step": at} for group, (total, at) in rows.items()}}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore the result of `scalars`; an empty dict begins anew, for a drift of 0."""
        rates = scalars.get("rates", {})
        self._met.clear()
        self._rates = {str(group): (float(row["sum"]), int(row["step"])) for group, row in rates.items()}


def _group_of(window: Window) -> str:
    return str(window.key[1]) if len(window.key) > 1 else "0"


def _terms(hyper: Mapping[str, Any], grad_scale: float = 1.0, rate_sum: float = 1.0) -> Terms:
    return onebit_terms(
        lr=float(hyper["lr"]),
        betas=hyper["betas"],
        eps=float(hyper["eps"]),
        weight_decay=float(hyper["weight_decay"]),
        grad_scale=grad_scale,
        rate_sum=rate_sum,
    )


@RULES.register("ZeroOneAdam")
def _build(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    hyper, counts = read_onebit("ZeroOneAdam", params, DEFAULTS, COUNTS)
    rule = ZeroOneAdam(**counts, **hyper)
    return rule, dict(rule.defaults)
