"""The feature that a trial adds to a run: it measures some steps, and then ends the script."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import device as devices
from mpispeed.base.events import Bus, Event
from mpispeed.base.tensor_tree import map_tensors
from mpispeed.config.overlay import laid_over
from mpispeed.engine.attached import Feature
from mpispeed.engine.hooks import Context, Hooks, Setup
from mpispeed.flops.by_module import ModuleCounter
from mpispeed.mesh.comms_log import trimmed_mean
from mpispeed.pipe.module import PipelineModule
from mpispeed.sharding.sharded_param import ShardedParam
from mpispeed.tuning import resident

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.collectives.group import CommTrace
    from mpispeed.mesh.comm import Comm
    from mpispeed.tuning.protocol import Task

NAME = "tuning_trial"

Survey = Callable[..., Mapping[str, Any]]
"""Called on rank 0 as `forecast.survey(candidates, model, ranks=, ranks_per_node=, device=)`."""


class TrialOver(BaseException):
    """The trial has what it wants of the script. No Exception, so that handlers of errors let it pass.

    Raised on all ranks at the same place, where no communication is under way.
    """


@dataclass(slots=True)
class StepTimes:
    """One global step of this rank. Units: seconds; `fwd` and `bwd` of all micro-batches."""

    latency: float = 0.0
    fwd: float = 0.0
    bwd: float = 0.0
    step: float = 0.0


@dataclass(slots=True)
class RankTimes:
    """All that one rank has measured. Units: seconds, bytes; `sent_bytes` in one measured step by the engine.

    `mismatch` tells of sizes other than the trial's.
    """

    steps: list[StepTimes] = field(default_factory=list)
    peak_bytes: int = 0
    base_bytes: int = 0
    activation_bytes: int = 0
    micro_batches: int = 1
    train_batch_size: int = 0
    operations: int = 0
    mismatch: str = ""
    sent_bytes: float = 0.0


_MAPPING = "let autotuning.arg_mappings name the script's word for it, or take it from the engine"


class Measurement:
    """Times and memory of the first engine of a script that trains.

    The clock of a step runs on the host from the end of the step before. Barriers stand before the first measured step
    and behind the last one. What is held from forward to backward is the growth of memory over one forward pass of the
    step before the measured ones, apart from parameters that are gathered in it; on a host that is what is resident
    when the allocator has given free memory back. With the metric "flops" all operations of one step before that one
    are counted, forward and backward.
    """

    def __init__(self, task: Task, comm: Comm, on_swallowed: Callable[[Measurement], None]) -> None:
        """`comm` is a group of all ranks; `on_swallowed` is called where the script goes on after `TrialOver`."""
        self._task, self._comm, self._on_swallowed = task, comm, on_swallowed
        self.own = RankTimes(base_bytes=resident.resident_bytes())
        self.metrics: dict[str, float] = {}
        self.mismatch = ""
        self.is_over = self.has_engine = False
        self._device = devices.HOST
        self._module: nn.Module | None = None
        self._counter: ModuleCounter | None = None
        self._now = StepTimes()
        self._began = self._held = 0.0
        self._trace: CommTrace | None = None
        self._sent = 0
        self._is_new = self._is_probing = False
        self._fed = 0

    @property
    def feature(self) -> Feature:
        """The row for the table of features."""
        return Feature(NAME, self._attach)

    def _attach(self, context: Context) -> Hooks | None:
        if self.has_engine or context.parts.optimization is None:
            return None
        self._trace = context.mesh.comm_trace
        self.has_engine, self._module, self._device = True, context.module, context.plan.device
        self._batch = context.plan.batch
        self._subscribe(context.bus)
        resident.forget_peak()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        is_pipeline = isinstance(context.module, PipelineModule)  # takes its micro-batches by itself
        batch = None if is_pipeline else self._look_at_batch
        return Hooks(batch=batch, begun=self._begun, after_step=self._after_step)

    def _subscribe(self, bus: Bus) -> None:
        bus.subscribe(Event.BATCH_START, self._on_batch)
        bus.subscribe(Event.FORWARD_END, self._on_forward)
        bus.subscribe(Event.BACKWARD_END, self._on_backward)
        bus.subscribe(Event.STEP_END, self._on_step)

    def _begun(self, engine: Any) -> None:
        """Keep what the script saves out of its folders, and start the clock of warm-up steps."""
        engine.save_checkpoint = engine.save_16bit_model = engine.save_fp16_model = _save_nothing
        if self._task.metric == "flops" and self._module is not None:
            self._counter = ModuleCounter(self._module, deepspeed=False)
        self._count()
        self._began = time.perf_counter()
        self._begin_measured_steps()

    def _begin_measured_steps(self) -> None:
        """Begin with them if the next step is the first one. Collective over: all ranks, then."""
        if len(self.own.steps) == self._task.first_step - 1:
            self._comm.barrier()
            self._sent = self._sent_bytes()
            self._began = time.perf_counter()

    def _count(self) -> None:
        """Count one step, the second before the measured ones, or the first one."""
        if self._counter is None:
            return
        at = max(0, self._task.first_step - 3)
        if len(self.own.steps) == at:
            self._counter.start()
        elif len(self.own.steps) > at:
            self.close()

    def close(self) -> None:
        """Stop to count."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.stop()
            found = counter.total()
            self.own.operations = found.forward + found.backward

    def _look_at_batch(self, inputs: Any, is_training: bool) -> Any:
        """Count micro-batches of training; the first one has to be as large as the trial says."""
        if is_training:
            self._fed += 1
            if self._fed == 1 and not self.own.steps:
                tensors: list[torch.Tensor] = []
                map_tensors(inputs, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
                wanted = self._batch.micro_batch_size
                shapes = [tuple(tensor.shape) for tensor in tensors if tensor.ndim]
                if shapes and not any(wanted in shape[:2] for shape in shapes):
                    self.own.mismatch = (
                        f"the script feeds batches of {shapes[0][0]} samples where the trial has "
                        f"train_micro_batch_size_per_gpu {wanted}; {_MAPPING}"
                    )
        return inputs

    # -- events of a step --------------------------------------------------------------------------------------------

    def _on_batch(self, event: Mapping[str, Any]) -> None:
        self._is_probing = (
            bool(event["is_training"])
            and not self.own.activation_bytes
            and len(self.own.steps) == max(0, self._task.first_step - 2)
        )
        if self._is_probing:
            self._held = self._used() - self._gathered()

    def _on_forward(self, event: Mapping[str, Any]) -> None:
        if self._is_probing:
            self._is_probing = False
            self.own.activation_bytes = max(0, int(self._used() - self._gathered() - self._held))
        self._now.fwd += event["seconds"]

    def _on_backward(self, event: Mapping[str, Any]) -> None:
        self._now.bwd += event["seconds"]

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self._wait_for_device()
        wanted, fed, self._fed = self._batch.gradient_accumulation_steps, self._fed, 0
        if fed not in (0, wanted) and not self.own.mismatch:
            self.own.mismatch = (
                f"the script makes a step of {fed} micro-batches where the trial has gradient_accumulation_steps "
                f"{wanted}; {_MAPPING}"
            )
        now = time.perf_counter()
        self._now.latency, self._now.step = now - self._began, event["update_seconds"]
        self.own.steps.append(self._now)
        self._now, self._began, self._is_new = StepTimes(), now, True

    def _after_step(self) -> None:
        """At the end of each micro-batch. Collective over: all ranks, before the first and after the last step."""
        if self.is_over:
            self._on_swallowed(self)
            raise TrialOver
        if not self._is_new:
            return
        self._is_new = False
        self._count()
        self._begin_measured_steps()
        if len(self.own.steps) >= self._task.last_step:
            self.is_over = True
            self.finish()
            raise TrialOver

    # -- result ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Make the metrics of all ranks' steps. Collective over: all ranks."""
        own = self.own
        if self.has_engine:
            own.micro_batches, own.train_batch_size = (
                self._batch.gradient_accumulation_steps,
                self._batch.train_batch_size,
            )
        own.sent_bytes = (self._sent_bytes() - self._sent) / max(1, len(own.steps) - self._task.first_step + 1)
        own.peak_bytes = (
            torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else resident.peak_bytes()
        )
        found = self._comm.gather_objects(asdict(own))
        ranks = [_rank_times(values) for values in found]
        self.mismatch = next((rank.mismatch for rank in ranks if rank.mismatch), "")
        self.metrics = summary(ranks, self._task.first_step)

    def _sent_bytes(self) -> int:
        """Bytes that the engine's verbs have sent to other ranks, by the ring formula."""
        return 0 if self._trace is None else sum(entry.bytes for entry in self._trace.entries().values())

    def _used(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        resident.give_back()
        return resident.resident_bytes()

    def _gathered(self) -> int:
        """Bytes that parameters of the model have here now: whole ones while they are gathered."""
        storages = {}
        for param in self._module.parameters() if self._module is not None else ():
            if param.device.type != "meta" and not isinstance(param, ShardedParam):
                storage = param.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def _wait_for_device(self) -> None:
        if self._device.type != "cpu":
            devices.module_of(self._device).synchronize(self._device)


def _rank_times(values: Mapping[str, Any]) -> RankTimes:
    return RankTimes(**{**values, "steps": [StepTimes(**step) for step in values["steps"]]})


def _save_nothing(*_: Any, **__: Any) -> bool:
    """Stand in for saves of the script: a trial leaves its checkpoints alone."""
    return True


def summary(ranks: Sequence[RankTimes], first_step: int) -> dict[str, float]:
    """Metrics of an outcome, for the slowest rank in each step; {} if no step from `first_step` on was made by all."""
    rows = list(zip(*(rank.steps[first_step - 1 :] for rank in ranks), strict=False))
    if not rows:
        return {}
    micro_batches = max(rank.micro_batches for rank in ranks)
    latency = trimmed_mean(max(each.latency for each in row) for row in rows)
    size, operations = ranks[0].train_batch_size, sum(rank.operations for rank in ranks)
    flops = {"FLOPS_per_gpu": operations / len(ranks) / latency} if operations and latency else {}
    return {
        "latency": latency,
        "throughput": size / latency if latency else 0.0,
        "fwd": trimmed_mean(max(each.fwd for each in row) / micro_batches for row in rows),
        "bwd": trimmed_mean(max(each.bwd for each in row) / micro_batches for row in rows),
        "step": trimmed_mean(max(each.step for each in row) for row in rows),
        "peak_bytes": float(max(rank.peak_bytes for rank in ranks)),
        "base_bytes": float(max(rank.base_bytes for rank in ranks)),
        "activation_bytes": float(max(rank.activation_bytes for rank in ranks)),
        "sent_bytes": float(max(rank.sent_bytes for rank in ranks)),
        "steps": float(len(rows)),
        "train_batch_size": float(size),
        **flops,
    }


class Surveying:
    """Lets a script run to `initialize`, and asks `survey` there."""

    def __init__(self, task: Task, comm: Comm, survey: Survey) -> None:
        """`comm` is a group of all ranks."""
        self._task, self._comm, self._survey = task, comm, survey
        self.found: Mapping[str, Any] = {}
        self.failure = ""
        self.is_over = False

    @property
    def feature(self) -> Feature:
        """The row for the table of features."""
        return Feature(NAME, transform=self._transform)

    def close(self) -> None:
        """Nothing is under way."""

    def _transform(self, model: nn.Module, setup: Setup) -> None:
        """Survey, and end the script. Collective over: all ranks."""
        answer: tuple[Mapping[str, Any], str] = ({}, "")
        if self._comm.rank == 0:
            try:
                with laid_over({}):  # candidates are whole configs
                    answer = (
                        self._survey(
                            self._task.payload, model, ranks=setup.mesh.size,
                            ranks_per_node=setup.mesh.world.local_size, device=setup.plan.device,
                        ),
                        "",
                    )  # fmt: skip
            except Exception as error:  # the other ranks wait for the answer
                answer = {}, f"{type(error).__name__}: {error}"
        self.found, self.failure = self._comm.share(answer)
        setup.mesh.close()
        self.is_over = True
        raise TrialOver
