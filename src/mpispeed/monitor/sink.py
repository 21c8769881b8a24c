"""Base of sinks, and the translation of events to points of series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mpispeed.base.events import Bus, Event

TRAIN_LOSS = "Train/Samples/train_loss"
LR = "Train/Samples/lr"
LOSS_SCALE = "Train/Samples/loss_scale"
EVAL_LOSS = "Train/Samples/eval_loss"
ELAPSED_MS = "Train/Samples/elapsed_time_ms_"
"""What the names of series of times begin with."""
CODED = "Train/Samples/"
"""What the names of series of compressed exchanges begin with."""
EXPERTS = "Train/Samples/"
"""What the names of series of layers of experts begin with; the name of the layer follows."""
MOST_SINGLE_EXPERTS = 256
"""With more experts in all layers, single ones have no series: each is an open file of the CSV monitor."""


class Sink(Protocol):
    """Writes the numbers of named series; `x` counts samples of the whole run."""

    def write(self, series: str, value: float, x: int) -> None:
        """Add one point to a series."""

    def flush(self) -> None:
        """Make written points visible to readers."""

    def close(self) -> None:
        """Flush and let go of files."""


def folder_of(section: Mapping[str, Any]) -> Path:
    """Folder of a sink: `output_path`/`job_name`."""
    return Path(section.get("output_path") or "") / section.get("job_name", "DeepSpeedJobName")


class Watcher:
    """Turns events into points of series for a sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._last_step, self._last_samples = 0, 0
        self._is_scaled = False

    def attach(self, bus: Bus) -> None:
        """Listen to steps, evaluations and the end of the run."""
        bus.subscribe(Event.STEP_KNOWN, self._on_step)
        bus.subscribe(Event.EVAL_END, self._on_eval)
        bus.subscribe(Event.CODED, self._on_coded)
        bus.subscribe(Event.TIMES, self._on_times)
        bus.subscribe(Event.EXPERT_LOADS, self._on_expert_loads)
        bus.subscribe(Event.CLOSE, self._on_close)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        step, samples = event["global_step"], event["samples"]
        # The loss was measured before the step's samples counted; the first step after a load has
        # no predecessor here and is taken to be as large as the average one.
        before = self._last_samples if step == self._last_step + 1 else samples - samples // max(1, step)
        self._last_step, self._last_samples = step, samples
        if event["loss"] is not None:
            self._sink.write(TRAIN_LOSS, event["loss"], before)
        self._sink.write(LR, event["lr"], samples)
        scale = event.get("loss_scale")
        # A scale of 1 from the start means that losses are not scaled.
        self._is_scaled = self._is_scaled or scale not in (None, 1.0)
        if self._is_scaled and scale is not None:
            self._sink.write(LOSS_SCALE, scale, samples)
        self._sink.flush()

    def _on_times(self, event: Mapping[str, Any]) -> None:
        for name, seconds in event["series"].items():
            self._sink.write(ELAPSED_MS + name, 1000 * seconds, event["samples"])
        self._sink.flush()

    def _on_coded(self, event: Mapping[str, Any]) -> None:
        for name, value in event["series"].items():
            self._sink.write(CODED + name, float(value), event["samples"])

    def _on_expert_loads(self, event: Mapping[str, Any]) -> None:
        loads = {name: (chosen.tolist(), dropped.tolist()) for name, (chosen, dropped) in event["layers"].items()}
        has_single = sum(len(chosen) for chosen, _ in loads.values()) <= MOST_SINGLE_EXPERTS
        for name, (chosen, dropped) in loads.items():
            for series, value in expert_series(chosen, dropped, has_single=has_single):
                self._sink.write(f"{EXPERTS}{name}/{series}", value, event["samples"])
        self._sink.flush()

    def _on_eval(self, event: Mapping[str, Any]) -> None:
        self._sink.write(EVAL_LOSS, event["loss"], event["samples"])
        self._sink.flush()

    def _on_close(self, event: Mapping[str, Any]) -> None:
        self._sink.close()


def expert_series(chosen: Sequence[int], dropped: Sequence[int], *, has_single: bool) -> Iterator[tuple[str, float]]:
    """Names and values of the series of one layer of experts.

    Loads are choices divided by their mean over experts: 1 where they are balanced. The highest is 1 + MaxVio of Wang
    et al., arXiv 2408.15664. Without tokens all are 0.

    Args:
        chosen: choices of each expert.
        dropped: those of them that were dropped.
        has_single: give the load of each expert, too.
    """
    total = max(sum(chosen), 1)
    loads = [count * len(chosen) / total for count in chosen]
    yield "expert_max_load", max(loads)
    yield "expert_min_load", min(loads)
    yield "expert_dropped", sum(dropped) / total
    if has_single:
        yield from ((f"expert_load_{number}", load) for number, load in enumerate(loads))


def attach(bus: Bus, sinks: Iterable[Sink]) -> None:
    """Write the series of a run to `sinks`; each has its own watcher, so a broken one does not stop the others."""
    for sink in sinks:
        Watcher(sink).attach(bus)
