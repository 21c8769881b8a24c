"""`flops_profiler`: one step of a run is counted on every rank, summed, and reported by rank 0."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpispeed.base.distinct import distinct_over
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.events import Event
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.step import Place
from mpispeed.flops.peak import measure_peak
from mpispeed.flops.profiler import FlopsProfiler, prepare_file
from mpispeed.flops.tables import Facts, Times, Totals
from mpispeed.flops.totals import SlicedWork, counted_work, own_elements, summed
from mpispeed.nn.expert import RoutedExperts
from mpispeed.optim.expert_groups import is_moe_param
from mpispeed.pipe.module import PipelineModule
from mpispeed.plan.units import PLAIN, kinds_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpispeed.config.monitor import FlopsProfiler as Section
    from mpispeed.engine.step import StepContext

log = logging.getLogger(__name__)

FLOPS_SERIES = "Train/Samples/tflops_per_gpu"
MFU_SERIES = "Train/Samples/mfu"


def attach(context: Context) -> Hooks | None:
    """Count the step of the config; None where it is off.

    Raises:
        ConfigError: the report cannot be written to the file of the config.
    """
    section = context.plan.config.flops_profiler
    if not section.enabled:
        return None
    if section.output_file and context.mesh.rank == 0:
        try:
            prepare_file(section.output_file)
        except UsageError as error:
            msg = f"flops_profiler: {error}"
            raise ConfigError(msg) from error
    profile = StepProfile(section, context)
    for event, listener in (
        (Event.BATCH_START, profile.on_forward), (Event.FORWARD_END, profile.on_forward_end),
        (Event.BACKWARD_END, profile.on_backward_end), (Event.STEP_END, profile.on_step_end),
        (Event.CLOSE, profile.on_close),
    ):  # fmt: skip
        context.bus.subscribe(event, listener)
    return Hooks(
        [(Place.START, profile.stop)], after_step=profile.report, published={"flops_profiler": profile.profiler}
    )


class StepProfile:
    """The profile of one step.

    Attributes:
        profiler: what counts on this rank; `engine.flops_profiler`.
    """

    def __init__(self, section: Section, context: Context) -> None:
        self._section, self._context = section, context
        self.profiler = FlopsProfiler(context.module, recompute_fwd_factor=section.recompute_fwd_factor)
        self._sliced: SlicedWork | None = None
        self._is_counting = self._has_stopped = self._is_due = self._is_done = False
        self._forwards = 0
        self._times, self._before = Times(), 0.0
        self._flops = 0
        self._peak: float | None = None

    # -- events --------------------------------------------------------------------------------------------------------

    def on_forward(self, event: Mapping[str, Any]) -> None:
        """Count from the first training pass of the step; evaluation in between is left out."""
        counter = self.profiler.counter
        if self._is_done or event["global_step"] != self._section.profile_step:
            return
        if not event["is_training"]:
            if counter is not None:
                counter.stop()
            self._is_counting = False
            return
        if counter is None or self._has_stopped:  # a batch that failed before its update begins again
            self._begin()
        elif not self._is_counting:
            counter.start()
        self._is_counting = True
        self._forwards += 1
        if self._runs_in_parts and self.profiler.counter is not None:
            self.profiler.counter.begin_pass()

    def _begin(self) -> None:
        self._forwards, self._times, self._has_stopped = 0, Times(), False
        self.profiler.start_profile()
        counter = self.profiler.counter
        if self._context.mesh["model"].size > 1 and counter is not None:
            self._sliced = SlicedWork(self._context.module, counter)
            self._sliced.start()

    def on_forward_end(self, event: Mapping[str, Any]) -> None:
        """Add the time of a pass."""
        if self._is_counting:
            if self._runs_in_parts and self.profiler.counter is not None:
                self.profiler.counter.end_pass()
            self._times = replace(self._times, forward=self._times.forward + float(event["seconds"]))
            if self._sliced is not None:
                self._sliced.end_pass()

    def on_backward_end(self, event: Mapping[str, Any]) -> None:
        """Add the time of a pass."""
        if self._is_counting:
            self._times = replace(self._times, backward=self._times.backward + float(event["seconds"]))

    def stop(self, ctx: StepContext) -> None:
        """Part of a step, before the update: count no more. Local."""
        if self._is_counting:
            self.profiler.stop_profile()
            if self._sliced is not None:
                self._sliced.stop()
            self._is_counting, self._has_stopped = False, True

    def on_step_end(self, event: Mapping[str, Any]) -> None:
        """Note the times of a step; later steps are points of series."""
        if event["global_step"] == self._section.profile_step + 1 and not self._is_done:
            self._is_due = True  # on all ranks, also on one whose counter has failed
            self._times = replace(self._times, step=event["update_seconds"], before=self._before)
        elif self._flops and self._context.mesh.rank == 0:
            self._write(event["seconds"])
        self._before = event["seconds"]

    def on_close(self, _: Mapping[str, Any]) -> None:
        """Leave nothing in the model."""
        if self._sliced is not None:
            self._sliced.stop()
        self.profiler.end_profile()

    @property
    def _runs_in_parts(self) -> bool:
        """True for a pipeline, whose chunks run without a call of the model."""
        return isinstance(self._context.module, PipelineModule)

    # -- the end of the step -------------------------------------------------------------------------------------------

    def report(self) -> None:
        """After a step that was counted: sum over all ranks, and print on rank 0.

        Collective over: all ranks, after that step.
        """
        if not self._is_due:
            return
        self._is_due, self._is_done = False, True
        context = self._context
        found = context.mesh.world.comm.gather_objects((self._totals(), *self._peak_of_rank()))
        parts, peaks = [each for each, _, _ in found if each is not None], [rate for _, rate, _ in found if rate]
        problem = next((text for _, _, text in found if text), "")
        if len(parts) < len(found):
            if context.mesh.rank == 0:
                log.warning(
                    "flops_profiler: %d of %d ranks counted no forward pass of engine(...) in step %d: no report",
                    len(found) - len(parts), len(found), context.counters.global_steps,
                )  # fmt: skip
            self.profiler.end_profile()
            return
        totals = summed(parts)
        self._peak = sum(peaks) if len(peaks) == len(found) else None
        self._flops = totals.forward + totals.backward
        self.profiler.passes = self._micro_batches
        self.profiler.facts = self._facts(totals)
        self.profiler.end_profile()
        self._sliced = None
        if context.mesh.rank == 0:
            if problem:
                log.warning(
                    "flops_profiler: the peak of a rank could not be measured (%s), so the report has no utilisation; "
                    "set flops_profiler.peak_flops to a number", problem,
                )  # fmt: skip
            self._print()

    @property
    def _micro_batches(self) -> int:
        chunks = self._context.module.num_chunks if isinstance(self._context.module, PipelineModule) else 1
        return max(1, self._forwards // chunks)

    def _totals(self) -> Totals | None:
        """What this rank adds to the sums over all ranks; None if it has counted nothing."""
        context, counter = self._context, self.profiler.counter
        if counter is None or not self._forwards:
            return None
        mesh, model = context.mesh, context.module
        slices, sharing, place = mesh["model"], context.parts.sharing, mesh["data"].rank
        kinds = kinds_of(model, slices.size)

        def counts(param: Any) -> bool:
            copies = kinds.get(id(param), PLAIN).copies
            is_first = all(sharing.ranks_of(each).rank == 0 for each in copies) if sharing else True
            return is_first and place < distinct_over(param)

        routed = [layer.experts for layer in model.modules() if isinstance(layer, RoutedExperts)]
        experts = {id(param) for layer in routed for param in layer.parameters()}

        def is_of_expert(param: Any) -> bool:
            return id(param) in experts or is_moe_param(param)

        params, of_experts = own_elements(model, slices.rank, slices.size, counts, is_of_expert)
        work = counted_work(counter, self._sliced, is_first=slices.rank == 0)
        return replace(work, params=params, expert_params=of_experts)

    def _peak_of_rank(self) -> tuple[float | None, str]:
        """Operations per second, None if unknown; and why they could not be measured, as without memory."""
        wanted, plan = self._section.peak_flops, self._context.plan
        if wanted != "measure":
            return wanted, ""
        try:
            return measure_peak(plan.policy.compute, plan.device), ""
        except RuntimeError as error:  # the other ranks are on their way to the sum
            return None, str(error).partition("\n")[0]

    def _facts(self, totals: Totals) -> Facts:
        context, counter = self._context, self.profiler.counter
        return Facts(
            world_size=context.mesh.size,
            data_size=context.mesh["batch"].size,
            sequence_size=context.mesh["sequence"].size,
            model_size=context.mesh["model"].size,
            stages=context.mesh["pipe"].size,
            micro_batch=context.parts.plan.batch.micro_batch_size,
            micro_batches=self._micro_batches,
            recompute_factor=self._section.recompute_fwd_factor,
            times=self._times,
            totals=totals,
            peak=self._peak,
            unknown={} if counter is None else dict(counter.unknown),
        )

    def _print(self) -> None:
        section, step = self._section, self._context.counters.global_steps
        arguments = (step, section.module_depth, section.top_modules, section.detailed)
        try:
            self.profiler.print_model_profile(*arguments, section.output_file)
        except UsageError as error:  # a report is not worth a run
            log.warning("%s", error)
            self.profiler.print_model_profile(*arguments)

    def _write(self, seconds: float) -> None:
        """Points of a step that computes what the counted one did. Local, on rank 0."""
        context = self._context
        if seconds > 0 and context.published["monitor"].enabled:
            context.write(FLOPS_SERIES, self._flops / seconds / context.mesh.size / 1e12)
            if self._peak:
                context.write(MFU_SERIES, self._flops / seconds / self._peak)
