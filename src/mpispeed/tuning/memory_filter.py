"""Candidates that cannot fit: predicted states and measured activations against the memory of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpispeed.base.units import format_bytes

if TYPE_CHECKING:
    from mpispeed.tuning.forecast import Forecast, Survey
    from mpispeed.tuning.time_model import Point

SAFE_SHARE = 0.95
"""Part of a limit that candidates may need: the kernel, files and MPI need some too."""


class Memory:
    """Need of candidates, and what there is. What is measured of activations sharpens it.

    Args:
        survey: limits and ranks of the node.
        limit_bytes: of a node, in place of those of the survey.
    """

    def __init__(self, survey: Survey, limit_bytes: int | None = None) -> None:
        self._survey = survey
        limits = survey.limits if limit_bytes is None else {"--memory": limit_bytes}
        self._source, self._limit = min(limits.items(), key=lambda item: item[1]) if limits else ("", 0)
        self._activations: dict[str, dict[int, float]] = {}
        self._lost: list[tuple[str, int, int]] = []

    def measured(self, point: Point, micro_batch: int, activation_bytes: float) -> None:
        """Note the activations of a micro-batch under the settings of a point."""
        known = self._activations.setdefault(_kept_as(point), {})
        known[micro_batch] = max(activation_bytes, known.get(micro_batch, 0.0))

    def failed(self, name: str, forecast: Forecast) -> None:
        """Note a trial that ran out of memory: nothing that needs as much is tried."""
        self._lost.append((name, forecast.memory_bytes, forecast.micro_batch))

    def activation_bytes(self, point: Point, micro_batch: int) -> int:
        """Predicted bytes of one micro-batch: on the line through the smallest and the largest that were measured.

        0 as long as nothing was measured of such settings.
        """
        known = sorted(self._activations.get(_kept_as(point), {}).items())
        if not known:
            return 0
        (small, low), (large, high) = known[0], known[-1]
        slope = max((high - low) / (large - small), 0.0) if large > small else high / large
        return max(0, int(high + slope * (micro_batch - large)))

    def need(self, point: Point, forecast: Forecast) -> int:
        """Predicted bytes of one rank on its device, at its peak: while the engine is built, or while it trains."""
        on_device = forecast.memory_bytes if self._survey.device == "cpu" else forecast.held.get("device", 0)
        return max(forecast.build_bytes, on_device + self.activation_bytes(point, forecast.micro_batch))

    def refusal(self, point: Point, forecast: Forecast) -> str:
        """Why a candidate is not tried, as far as is known by now; "" if it may fit."""
        for name, states, micro in self._lost:
            if forecast.micro_batch >= micro and forecast.memory_bytes >= states:
                return f"needs at least as much memory as {name}, which ran out of it"
        need, ranks = self.need(point, forecast), self._survey.ranks_per_node
        if self._survey.device != "cpu":
            if need > SAFE_SHARE * self._survey.device_bytes:
                return f"needs {format_bytes(need)} of {format_bytes(self._survey.device_bytes)} on the accelerator"
            need = forecast.held.get("host", 0)
        if self._limit and need * ranks > SAFE_SHARE * self._limit:
            what = f"{ranks} rank{'s' * (ranks > 1)} x {format_bytes(need)}"
            return f"needs {what} on a node, more than {format_bytes(self._limit)} ({self._source})"
        return ""


def _kept_as(point: Point) -> str:
    """The settings on which activations of a sample depend: slices, parts, recomputed blocks, where these are kept."""
    kinds = ("activation_checkpointing", "tensor_parallel", "pipeline", "sequence_parallel_size")
    return repr(sorted((key, repr(value)) for key, value in point.items() if key.split(".")[0] in kinds))


def of_metrics(metrics: Mapping[str, float]) -> float:
    """Bytes of activations that a trial has measured; 0 for none."""
    return max(0.0, float(metrics.get("activation_bytes", 0.0)))
