"""Proof of a schedule by simulating all its stages without tensors.

The model is that of the executor: instructions run strictly in order, sends are posted and go on, receives wait, and
messages of one sender, receiver, kind and chunk arrive in order. Nothing in it depends on timing: receives name their
sender, so every run ends in the same state, and one run proves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpispeed.base.errors import ScheduleError
from mpispeed.pipe import instructions as do
from mpispeed.pipe.check_stage import Mail, Stage, StageProof
from mpispeed.pipe.check_traffic import Traffic
from mpispeed.pipe.schedule_base import PipeSchedule

__all__ = ["Proof", "check"]


@dataclass(frozen=True)
class Proof:
    """Result of `check`: the schedule ends, and every buffer held the data read from it.

    Attributes:
        stages: per stage.
        is_training: there are backward passes.
        messages: of a batch, over all stages.
        survives_blocking_sends: no deadlock even if every send waits for its receive.
        survives_barriers: no deadlock if all ranks meet in a barrier after every list of instructions.
    """

    stages: tuple[StageProof, ...]
    is_training: bool
    messages: int
    survives_blocking_sends: bool
    survives_barriers: bool


def check(schedules: Sequence[PipeSchedule]) -> Proof:
    """Play the schedules of all stages.

    Args:
        schedules: one per stage, in order.

    Raises:
        ScheduleError: they do not belong together; a message has no receive or a receive no message; a buffer is
            written while it still holds something needed, or read without it; a buffer id is not in the schedule's own
            table; a pass is missing or repeated; reductions and the optimizer's step are missing, too early or not the
            same on all stages; or stages wait for each other for ever. Names stage, step and instruction.
    """
    _belong_together(schedules)
    steps = [[list(step) for step in schedule.steps()] for schedule in schedules]
    is_training = any(
        isinstance(one, do.BackwardPass | do.BackwardInput) for stage in steps for step in stage for one in step
    )
    mail = Mail()
    stages = [
        Stage(schedule, own, mail, is_training=is_training) for schedule, own in zip(schedules, steps, strict=True)
    ]
    while any([stage.play() for stage in stages]):
        pass
    _refuse_deadlock(stages)
    mail.refuse_leftovers()
    for stage in stages:
        stage.refuse_unfinished()
    _same_ending(stages, is_training=is_training)
    traffic = Traffic(schedules, steps)
    peaks = traffic.peaks()
    return Proof(
        stages=tuple(stage.proof(peak) for stage, peak in zip(stages, peaks, strict=True)),
        is_training=is_training,
        messages=mail.count,
        survives_blocking_sends=traffic.survives_blocking_sends(),
        survives_barriers=traffic.survives_barriers(),
    )


def _belong_together(schedules: Sequence[PipeSchedule]) -> None:
    if not schedules:
        msg = "check: no schedules were given; expected one per stage"
        raise ScheduleError(msg)
    first = schedules[0]
    for place, one in enumerate(schedules):
        given = (one.stage, one.num_stages, one.num_micro_batches, one.num_chunks)
        wanted = (place, len(schedules), first.num_micro_batches, first.num_chunks)
        if given != wanted:
            msg = (
                f"check: schedule {place} of {len(schedules)} has (stage, stages, micro-batches, chunks) = {given}; "
                f"expected {wanted}: one schedule per stage, in order, of one batch"
            )
            raise ScheduleError(msg)


def _refuse_deadlock(stages: Sequence[Stage]) -> None:
    reasons = []
    for stage in stages:
        if stage.is_waiting:
            kind, other = stage.wanted()
            state = "waits too" if stages[other].is_waiting else "has come to its end"
            reasons.append(
                f"{stage.here()}: waits for ever for a message, the {kind} from stage {other}, which {state}"
            )
    if reasons:
        raise ScheduleError("; ".join(reasons))


def _same_ending(stages: Sequence[Stage], *, is_training: bool) -> None:
    """Reductions and steps are collective: all stages have the same, and training has them."""
    needed = {do.ReduceGrads, do.OptimizerStep} if is_training else set()
    for stage in stages:
        names = [kind.__name__ for kind in stage.ending]
        missing = sorted(kind.__name__ for kind in needed - set(stage.ending))
        if missing:
            msg = f"stage {stage.schedule.stage}: it ends with {names}, without {', '.join(missing)}"
            raise ScheduleError(msg)
        if stage.ending != stages[0].ending:
            first = [kind.__name__ for kind in stages[0].ending]
            msg = f"stage {stage.schedule.stage}: it ends with {names}, stage 0 with {first}; all have to take part"
            raise ScheduleError(msg)
