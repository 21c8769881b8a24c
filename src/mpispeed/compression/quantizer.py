"""DeepSpeed's `runtime.quantize.Quantizer`: quantizes parameters after each step of a loop without an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch

from mpispeed.native.token_choice import key_of
from mpispeed.nn.compression import quantizers
from mpispeed.nn.compression.bits import BitPlan, BitSchedule

log = logging.getLogger(__name__)


class Quantizer:
    """Rounds parameters to bits that fall, each along a schedule of its own.

    A parameter takes part if it has two dims or more and the attributes `start_bits`, `target_bits` and `q_period`; the
    first and the last are changed as bits fall. With an engine, weight quantization of the config does this.
    """

    def __init__(
        self,
        q_groups: int = 1,
        q_mixed_fp16: bool = False,
        q_change_ratio: float = 0.01,
        q_type: int = 0,
        q_rounding: int = 0,
        q_verbose: bool = False,
        q_eigenvalue: bool = False,
        use_quantizer_kernel: bool = False,
        layer_num: int = 0,
    ) -> None:
        """Start before the first step.

        Args:
            q_groups: groups of a parameter with their own scale.
            q_mixed_fp16: mix plain and quantized values; the part of the former falls by `q_change_ratio` each step.
            q_change_ratio: see there.
            q_type: 0 symmetric, 1 asymmetric.
            q_rounding: 0 to the nearest, 1 stochastic.
            q_verbose: log bits that fall.
            q_eigenvalue: no effect: eigenvalues are looked at where they are given.
            use_quantizer_kernel: no effect: all bits have the same quantizer.
            layer_num: no effect.
        """
        kind, rounding = ("asymmetric" if q_type else "symmetric"), ("stochastic" if q_rounding else "nearest")
        self._quantizer = quantizers.Quantizer(kind, rounding, q_groups)  # type: ignore[arg-type]
        self._change = q_change_ratio if q_mixed_fp16 else 0.0
        self._verbose = q_verbose
        self._schedules: dict[torch.Tensor, tuple[int, BitSchedule]] = {}
        self.qsteps = 0

    def any_precision_switch(self) -> bool:
        """True if the next call of `quantize` lets a bit fall."""
        return any(each.is_falling and each.steps + 1 >= each.period for _, each in self._schedules.values())

    @torch.no_grad()
    def quantize(
        self,
        parameter_group: Iterable[Iterable[torch.Tensor]],
        overflow: bool,
        eigenvalue_enabled: bool,
        block_eigenvalue: Mapping[int, tuple[float, int]] | None = None,
    ) -> None:
        """Count a step, and round parameters in place. Local.

        Args:
            parameter_group: lists of parameters.
            overflow: the step was skipped; nothing is done, unless eigenvalues are enabled.
            eigenvalue_enabled: see there.
            block_eigenvalue: id of a parameter -> its eigenvalue from 0 to 1, and its layer, as of `Eigenvalue`.

        Raises:
            ConfigError: a parameter has a `start_bits` below its `target_bits`.
            UsageError: the quantizer cannot do so few bits so.
        """
        if overflow and not eigenvalue_enabled:
            return
        self.qsteps += 1
        given = block_eigenvalue or {}
        for param in (param for group in parameter_group for param in group):
            if param.dim() > 1 and vars(param).get("start_bits"):
                self._quantize(param, given[id(param)][0] if id(param) in given else None)

    def _quantize(self, param: torch.Tensor, curvature: float | None) -> None:
        own = vars(param)
        if param not in self._schedules:
            plan = BitPlan(own["start_bits"], own["target_bits"], own["q_period"], change=self._change)
            self._schedules[param] = len(self._schedules), BitSchedule(plan)
        number, schedule = self._schedules[param]
        schedule.advance(curvature)
        if self._verbose and schedule.bits != own["start_bits"]:
            log.info(
                "step %d: parameter %d of shape %s has %d bits", self.qsteps, number, list(param.shape), schedule.bits
            )
        own.update(start_bits=schedule.bits, q_period=schedule.period)
        found = quantizers.fake_quantize(param, schedule.bits, self._quantizer, key_of(0, self.qsteps, number, 0))
        param.copy_(param * schedule.mix + found * (1 - schedule.mix) if schedule.mix else found)
