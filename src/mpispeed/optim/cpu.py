"""Adam, Adagrad, Lion and LAMB as optimizers of torch for any model in host memory.

The names and arguments are those of DeepSpeed's CPU optimizers; the rules are those of a JSON file, see `adam`,
`adagrad`, `lion` and `lamb`. For models on a device see `fused`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpispeed.optim.adagrad import Adagrad
from mpispeed.optim.adam import Adam
from mpispeed.optim.host_optimizer import Factor, HostOptimizer
from mpispeed.optim.host_rule import check_coefficients
from mpispeed.optim.lamb import Lamb
from mpispeed.optim.lion import Lion
from mpispeed.optim.sparse_rows import has_rows, update_rows


class CPUAdam(HostOptimizer):
    """AdamW (`adamw_mode`), or Adam with L2 decay in the gradient."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        *,
        threads: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
        }
        rule = Adam(adam_w_mode=adamw_mode)
        super().__init__(rule, model_params, defaults, fp32_optimizer_states=fp32_optimizer_states, threads=threads)


class CPUAdagrad(HostOptimizer):
    """Adagrad with L2 decay in the gradient."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        lr_decay: float = 0,
        initial_accumulator_value: float = 0,
        maximize: bool = False,
        threads: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "lr_decay": lr_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
            "amsgrad": amsgrad,
        }
        super().__init__(
            Adagrad(), model_params, defaults, fp32_optimizer_states=fp32_optimizer_states, threads=threads
        )

    def _begin(self, param: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        super()._begin(param, state, group)
        state["sum"].fill_(float(group["initial_accumulator_value"]))

    def _update(self, live: list[Tensor], grads: list[Tensor], outs: list[Tensor], factors: Sequence[Factor]) -> None:
        """As every optimizer here, and by rows where a gradient has only those; with decay all rows change."""
        groups = {id(param): index for index, group in enumerate(self.param_groups) for param in group["params"]}
        is_short = [
            has_rows(grad) and not self.param_groups[groups[id(param)]]["weight_decay"]
            for param, grad in zip(live, grads, strict=True)
        ]
        for place, (param, grad) in enumerate(zip(live, grads, strict=True)):
            if is_short[place]:
                self._update_rows(param, grad, groups[id(param)], factors)
                if outs:
                    outs[place].view(-1).copy_(param.view(-1))
        rest = [place for place, is_done in enumerate(is_short) if not is_done]
        if rest:
            dense = [grads[place].to_dense() if has_rows(grads[place]) else grads[place] for place in rest]
            super()._update([live[place] for place in rest], dense, [outs[place] for place in rest if outs], factors)

    def _update_rows(self, param: Tensor, grad: Tensor, index: int, factors: Sequence[Factor]) -> None:
        self._check_tensor("a parameter of", param)
        state, group = self.state[param], self.param_groups[index]
        if not state:
            self._begin(param, state, group)
        state["step"] = int(state["step"]) + 1
        terms = self._rule.terms({**self._rule.defaults, **group}, state["step"], float(factors[index]))
        threads = self.threads or torch.get_num_threads()
        update_rows(param, state, self._rule.state_names, grad, terms, self._make_table, threads)


class CPULion(HostOptimizer):
    """Lion, with decoupled decay."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
        *,
        threads: int | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(Lion(), model_params, defaults, fp32_optimizer_states=fp32_optimizer_states, threads=threads)


class CPULamb(HostOptimizer):
    """LAMB; the ratio of the norms of a parameter and its step is kept within [min_coeff, max_coeff].

    Gradients are unscaled and clipped by `grad_scale` of `step`.
    """

    needs_whole_tensors = True

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        threads: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "amsgrad": amsgrad,
        }
        self._rule: Lamb
        super().__init__(Lamb(), model_params, defaults, fp32_optimizer_states=fp32_optimizer_states, threads=threads)

    def _check_hyper(self, hyper: Mapping[str, Any]) -> None:
        super()._check_hyper(hyper)
        check_coefficients("CPULamb", hyper)

    def get_lamb_coeffs(self) -> list[float]:
        """The ratios of the last step, one for each parameter with a gradient, in the order of the groups.

        After a step of an engine: one for each parameter of which this rank updates a part.
        """
        return [float(ratio) for ratio in self._ratios] or self._rule.get_lamb_coeffs()
