"""A schedule of a user's own, from the instructions of the library."""

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    OptimizerStep,
    PipeSchedule,
    ReduceGrads,
    TrainSchedule,
)


class DataParallelSchedule(PipeSchedule):
    def steps(self):
        for step_id in range(self.micro_batches):
            cmd = [LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0), BackwardPass(buffer_id=0)]
            if step_id == self.micro_batches - 1:
                cmd.extend([ReduceGrads(), OptimizerStep()])
            yield cmd

    def num_pipe_buffers(self):
        return 1


schedule = DataParallelSchedule(micro_batches=3, stages=1, stage_id=0)
steps = list(schedule)
assert [len(cmd) for cmd in steps] == [3, 3, 5]
assert steps[2][4] == OptimizerStep()
assert steps[0][1].buffer_id == 0
assert (schedule.num_stages, schedule.num_micro_batches, schedule.stage) == (1, 3, 0)
assert schedule.is_first_stage
assert schedule.is_last_stage
assert InferenceSchedule(4, 2, 0).num_pipe_buffers() == 2
forwards = [cmd for step in TrainSchedule(4, 2, 1) for cmd in step if isinstance(cmd, ForwardPass)]
assert len(forwards) == 4
