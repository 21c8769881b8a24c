"""Fused Adam, LAMB, Adagrad and Lion as optimizers of torch for models on a device: one launch per step.

The names and arguments are those of DeepSpeed's fused optimizers. Parameters on the host are updated by the compiled
loops of `cpu`. A step never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpispeed.base.errors import UsageError
from mpispeed.native.cuda.launcher import for_tensor
from mpispeed.native.device_norm import norm_and_finite
from mpispeed.native.device_optim import DeviceTable
from mpispeed.native.multi_tensor_host import HostTable, Row
from mpispeed.optim.adagrad import Adagrad
from mpispeed.optim.adam import Adam
from mpispeed.optim.host_optimizer import Factor, HostOptimizer
from mpispeed.optim.host_rule import HostRule, check_coefficients
from mpispeed.optim.lamb import Lamb
from mpispeed.optim.lion import Lion
from mpispeed.optim.rule import check_range


class FusedOptimizer(HostOptimizer):
    """Updates parameters of one device by one rule; base of the classes below.

    State of a parameter: as of `HostOptimizer`, with tensors of the parameter's dtype unless `fp32_optimizer_states`.
    Each parameter has its own count of updates.
    """

    is_on_host = False

    def __init__(
        self,
        rule: HostRule,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = False,
    ) -> None:
        """Args: `set_grad_none` is the default of `zero_grad`.

        Raises:
            ConfigError: a hyper-parameter is out of range.
            UsageError: a parameter is not dense and contiguous.
            TypeError: there is no update for a parameter's dtype and that of its states.
        """
        self.set_grad_none = bool(set_grad_none)
        super().__init__(rule, params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop all gradients, or set them to zero; `set_grad_none` decides when nothing is said."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def _make_table(self, rows: list[Row]) -> HostTable | DeviceTable:
        devices = sorted({str(row.param.device) for row in rows})
        if len(devices) > 1:
            where = " and ".join(devices)
            msg = f"parameters of {type(self).__name__} are on {where}; make one optimizer for each device"
            raise UsageError(msg)
        is_host = not rows or (devices == ["cpu"] and for_tensor(rows[0].param) is None)
        return (HostTable if is_host else DeviceTable)(self._rule.kernel, rows)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        *,
        lowp_out: Sequence[Tensor] | None = None,
        grad_scale: Factor = 1.0,
    ) -> Any:
        """One update of all parameters with a gradient; returns the result of `closure`, called with grad on.

        Gradients are multiplied by `grad_scale` on the way (unscaling and clipping) and stay as they are; it may be a
        scalar on the device. `lowp_out` has one contiguous bf16 or fp16 buffer for each fp32 parameter, which receives
        the new value, rounded. The arguments between belong to the old interface; they must be None.

        Raises:
            UsageError: an old argument is given; a parameter or gradient is sparse, not contiguous or elsewhere.
            ValueError: `lowp_out` does not fit.
        """
        old = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        named = [name for name, value in old.items() if value is not None]
        if named:
            msg = (
                f"step of {type(self).__name__} was given {' and '.join(named)}, which it does not take; gradients are "
                "those of the parameters, and there are grad_scale and lowp_out"
            )
            raise UsageError(msg)
        loss = self._called(closure)
        self._update_all(None, lowp_out, [self._factor(grad_scale)] * len(self.param_groups))
        return loss

    def _factor(self, factor: Factor) -> Factor:
        """A number, or an fp32 scalar where the parameters are."""
        if not isinstance(factor, Tensor):
            return float(factor)
        device = next((param.device for group in self.param_groups for param in group["params"]), factor.device)
        return factor.detach().to(device, torch.float32)


class FusedAdam(FusedOptimizer):
    """AdamW (`adam_w_mode`), or Adam with L2 decay in the gradient. Source: Loshchilov and Hutter, ICLR 2019."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        fp32_optimizer_states: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        rule = Adam(adam_w_mode=adam_w_mode)
        super().__init__(
            rule, params, defaults, set_grad_none=set_grad_none, fp32_optimizer_states=fp32_optimizer_states
        )


class FusedLion(FusedOptimizer):
    """Lion, with decoupled decay. Source: Chen et al., NeurIPS 2023."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        fp32_optimizer_states: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(
            Lion(), params, defaults, set_grad_none=set_grad_none, fp32_optimizer_states=fp32_optimizer_states
        )


class FusedAdagrad(FusedOptimizer):
    """Adagrad with L2 decay in the gradient. Source: Duchi et al., JMLR 2011."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        fp32_optimizer_states: bool = False,
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            Adagrad(), params, defaults, set_grad_none=set_grad_none, fp32_optimizer_states=fp32_optimizer_states
        )


class FusedLamb(FusedOptimizer):
    """LAMB; the ratio of the norms of a parameter and its step is kept within [min_coeff, max_coeff].

    Source: You et al., ICLR 2020.
    """

    needs_whole_tensors = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        fp32_optimizer_states: bool = False,
    ) -> None:
        """Args: `max_grad_norm` is the norm that gradients of a group are clipped to; 0: no clipping."""
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "amsgrad": amsgrad,
        }
        self._rule: Lamb
        super().__init__(
            Lamb(), params, defaults, set_grad_none=set_grad_none, fp32_optimizer_states=fp32_optimizer_states
        )

    def _check_hyper(self, hyper: Mapping[str, Any]) -> None:
        super()._check_hyper(hyper)
        check_coefficients("FusedLamb", hyper)
        check_range("FusedLamb", "max_grad_norm", hyper["max_grad_norm"])

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Sequence[Factor] | None = None,
        *,
        lowp_out: Sequence[Tensor] | None = None,
        grad_scale: Factor = 1.0,
    ) -> Any:
        """One update of all parameters with a gradient; returns the result of `closure`, called with grad on.

        Gradients are divided by `scale` and multiplied by `grad_scale`. Where a group's max_grad_norm is above 0 and
        (norm / scale + 1e-6) / max_grad_norm is above 1, they are divided by that as well.

        Args:
            closure: computes the loss again.
            grads: gradients to use instead of those of the parameters, of any dtype with an update: one for each
                parameter, flat or as one list for each group.
            output_params: as `lowp_out`, flat or as one list for each group.
            scale: of the loss.
            grad_norms: the norm of the gradients of each group, before `scale`; computed if it is needed and not given.
            lowp_out: one contiguous bf16 or fp16 buffer for each fp32 parameter, which receives the new value, rounded.
            grad_scale: a number, or a scalar on the device.

        Raises:
            UsageError: a parameter or gradient is sparse, not contiguous or elsewhere; or the number of `grads` or
                `grad_norms` is wrong.
            ValueError: `lowp_out` does not fit.
        """
        if output_params is not None and lowp_out is not None:
            msg = "step of FusedLamb was given output_params and lowp_out, which say the same; give one of them"
            raise UsageError(msg)
        loss = self._called(closure)
        groups = [group["params"] for group in self.param_groups]
        count = sum(map(len, groups))
        given = [param.grad for params in groups for param in params] if grads is None else _flat(grads)
        if len(given) != count:
            msg = f"step of FusedLamb was given {len(given)} grads for {count} parameters; give one for each"
            raise UsageError(msg)
        factors = self._factors(given, scale / self._factor(grad_scale), grad_norms)
        self._update_all(given, lowp_out if output_params is None else _flat(output_params), factors)
        return loss

    def _factors(self, grads: list[Any], scale: Factor, norms: Sequence[Factor] | None) -> list[Factor]:
        """Reciprocals of the divisors of each group's gradients."""
        if norms is not None and len(norms) != len(self.param_groups):
            msg = (
                f"step of FusedLamb was given {len(norms)} grad_norms for {len(self.param_groups)} groups; give one "
                "for each"
            )
            raise UsageError(msg)
        factors, first = [], 0
        for index, group in enumerate(self.param_groups):
            own = [grad for grad in grads[first : first + len(group["params"])] if grad is not None]
            first += len(group["params"])
            limit = float(group["max_grad_norm"])
            divisor = scale
            if limit > 0 and own:
                norm = norm_and_finite(own)[0].sqrt() if norms is None else norms[index]
                divisor = _clipped(scale, (norm / scale + 1e-6) / limit)
            factors.append(self._factor(1.0 / divisor))
        return factors

    def get_lamb_coeffs(self) -> list[float]:
        """The ratios of the last step, one for each parameter with a gradient, in the order of the groups.

        After a step of an engine: one for each parameter of which this rank updates a part. Waits for the device.
        """
        ratios = self._ratios
        own = ratios.tolist() if isinstance(ratios, Tensor) else list(ratios)
        return own or self._rule.get_lamb_coeffs()


def _clipped(scale: Factor, clip: Factor) -> Factor:
    if isinstance(clip, Tensor):
        return torch.where(clip > 1, clip * scale, scale)
    return clip * scale if clip > 1 else scale


def _flat(values: Iterable[Any]) -> list[Any]:
    """The tensors of a list, or of lists in a list."""
    found: list[Any] = []
    for value in values:
        found += [value] if value is None or isinstance(value, Tensor) else list(value)
    return found
