"""Pipeline schedules written down: short texts of lists of instructions, and schedules made from such lists."""

from __future__ import annotations

from mpispeed.pipe import instructions as do
from mpispeed.pipe.schedule_base import PipeSchedule

SHORT = {
    "L": do.LoadMicroBatch,
    "F": do.ForwardPass,
    "B": do.BackwardPass,
    "I": do.BackwardInput,
    "W": do.BackwardWeight,
    "SA": do.SendActivation,
    "RA": do.RecvActivation,
    "SG": do.SendGrad,
    "RG": do.RecvGrad,
    "RT": do.ReduceTiedGrads,
    "R": do.ReduceGrads,
    "O": do.OptimizerStep,
}
_LETTERS = {kind: short for short, kind in SHORT.items()}


def short(schedule):
    """'L0 F0 | SA0 | -': instructions with their buffers, steps apart."""
    words = [[_LETTERS[type(one)] + str(getattr(one, "buffer_id", "")) for one in step] for step in schedule.steps()]
    return " | ".join(" ".join(step) or "-" for step in words)


class Written(PipeSchedule):
    """A schedule from lists of instructions, as a user may write one."""

    def __init__(self, micro_batches, stages, stage_id, lists, buffers=None, chunks=1):
        super().__init__(micro_batches, stages, stage_id, chunks)
        self.lists = [list(step) for step in lists]
        self._buffers = buffers

    def steps(self):
        return iter(self.lists)

    def num_pipe_buffers(self):
        return self._buffers if self._buffers is not None else super().num_pipe_buffers()


def copied(schedule):
    """The same instructions, to be changed."""
    shape = (schedule.micro_batches, schedule.stages, schedule.stage_id)
    return Written(*shape, schedule.steps(), schedule.num_pipe_buffers(), schedule.num_chunks)


def written(micro_batches, *texts, buffers=None):
    """One schedule per text, such as 'L0 F0 SA0 | RG0 B0 R O'."""
    return [
        Written(micro_batches, len(texts), stage, _parse(text), buffers or micro_batches)
        for stage, text in enumerate(texts)
    ]


def _parse(text):
    for step in text.split("|"):
        yield [_instruction(word) for word in step.split() if word != "-"]


def _instruction(word):
    letters = word.rstrip("0123456789")
    return SHORT[letters](int(word[len(letters) :])) if letters != word else SHORT[letters]()
