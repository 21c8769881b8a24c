"""Messages of a schedule alone: the number in flight, and whether stricter rules of sending would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mpispeed.pipe import instructions as do
from mpispeed.pipe.schedule_base import PipeSchedule


class _Channel(NamedTuple):
    """Messages that arrive in order: of one kind, from one virtual stage."""

    is_activation: bool
    virtual: int
    sender: int
    receiver: int


class _Act(NamedTuple):
    is_send: bool
    channel: _Channel


class Traffic:
    """Sends and receives of all stages. The schedules are proved already: posted sends do not deadlock."""

    def __init__(
        self, schedules: Sequence[PipeSchedule], steps: Sequence[Sequence[Sequence[do.PipeInstruction]]]
    ) -> None:
        """Args: `schedules`, `steps`: of each stage."""
        self._steps = [
            [[act for one in step if (act := _act(schedule, one)) is not None] for step in own]
            for schedule, own in zip(schedules, steps, strict=True)
        ]
        self._acts = [[act for step in own for act in step] for own in self._steps]

    def peaks(self) -> list[int]:
        """For each stage, the most messages of it in flight if the others do only what it waits for."""
        return [self._peak(stage) for stage in range(len(self._acts))]

    def _peak(self, stage: int) -> int:
        at = [0] * len(self._acts)
        flow: Counter[_Channel] = Counter()  # sent and not received
        mine = peak = 0
        for is_send, channel in self._acts[stage]:
            if is_send:
                flow[channel] += 1
                mine += 1
                peak = max(peak, mine)
                continue
            # The fewest acts of others that bring the message; each may need a message itself.
            wanted = [channel] if not flow[channel] else []
            while wanted:
                other = wanted[-1].sender
                act = self._acts[other][at[other]]
                if not act.is_send and not flow[act.channel]:
                    wanted.append(act.channel)
                    continue
                at[other] += 1
                flow[act.channel] += 1 if act.is_send else -1
                mine -= not act.is_send and act.channel.sender == stage
                if act.is_send and act.channel == wanted[-1]:
                    wanted.pop()
            flow[channel] -= 1
        return peak

    def survives_blocking_sends(self) -> bool:
        """True if there is no deadlock when a send and its receive end together."""
        at = [0] * len(self._acts)

        def head(stage: int) -> _Act | None:
            own = self._acts[stage]
            return own[at[stage]] if at[stage] < len(own) else None

        has_moved = True
        while has_moved:
            has_moved = False
            for stage in range(len(at)):
                while (act := head(stage)) is not None:
                    other = act.channel.receiver if act.is_send else act.channel.sender
                    if head(other) != _Act(not act.is_send, act.channel):
                        break
                    at[stage] += 1
                    at[other] += 1
                    has_moved = True
        return all(head(stage) is None for stage in range(len(at)))

    def survives_barriers(self) -> bool:
        """True if there is no deadlock when all stages meet in a barrier after every list of instructions."""
        if len({len(own) for own in self._steps}) != 1:
            return False
        flow: Counter[_Channel] = Counter()
        for lists in zip(*self._steps, strict=True):
            at = [0] * len(lists)
            has_moved = True
            while has_moved:
                has_moved = False
                for stage, acts in enumerate(lists):
                    while at[stage] < len(acts) and (acts[at[stage]].is_send or flow[acts[at[stage]].channel]):
                        act = acts[at[stage]]
                        flow[act.channel] += 1 if act.is_send else -1
                        at[stage] += 1
                        has_moved = True
            if any(place < len(acts) for place, acts in zip(at, lists, strict=True)):
                return False
        return True


def _act(schedule: PipeSchedule, one: do.PipeInstruction) -> _Act | None:
    if not isinstance(one, do.SendActivation | do.RecvActivation | do.SendGrad | do.RecvGrad):
        return None
    is_send = isinstance(one, do.SendActivation | do.SendGrad)
    is_activation = isinstance(one, do.SendActivation | do.RecvActivation)
    here = schedule.virtual_stage(one.chunk)
    other = here + (1 if is_activation is is_send else -1)
    sender, receiver = (here, other) if is_send else (other, here)
    stages = schedule.num_stages
    return _Act(is_send, _Channel(is_activation, sender, sender % stages, receiver % stages))
