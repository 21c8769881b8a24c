"""A stage of a pipeline as simulated by `check`: the content of its buffers and the operations allowed on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from mpispeed.base.errors import ScheduleError
from mpispeed.pipe import instructions as do
from mpispeed.pipe.schedule_base import PipeSchedule

#: instructions after the passes of a batch, in this order
_ENDING: tuple[type[do.PipeInstruction], ...] = (do.ReduceTiedGrads, do.ReduceGrads, do.OptimizerStep)


@dataclass(frozen=True)
class StageProof:
    """Requirements of one stage.

    Attributes:
        stage: its place.
        buffers: the schedule's own table, `num_pipe_buffers()`.
        peak_live: most micro-batches (times chunks) between their forward and their gradient of the input.
        peak_weights: most weight passes that are queued.
        peak_held: most of both together.
        peak_messages: most messages sent and not received, for the slowest receivers.
    """

    stage: int
    buffers: int
    peak_live: int
    peak_weights: int
    peak_held: int
    peak_messages: int


class _Place(NamedTuple):
    """An instruction and its position."""

    stage: int
    step: int
    one: do.PipeInstruction

    def __str__(self) -> str:
        batch = getattr(self.one, "micro_batch", None)
        is_shown = batch is None or "micro_batch" in repr(self.one)
        return f"stage {self.stage}, step {self.step}, {self.one!r}" + ("" if is_shown else f" of micro-batch {batch}")


class _Message(NamedTuple):
    micro_batch: int
    origin: _Place


class Mail:
    """Messages under way, by their kind and the virtual stage that sent them."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int], deque[_Message]] = {}
        self.count = 0

    def post(self, kind: str, virtual: int, micro_batch: int, origin: _Place) -> None:
        """Send. `origin` is the instruction that does."""
        self.count += 1
        self._queues.setdefault((kind, virtual), deque()).append(_Message(micro_batch, origin))

    def take(self, kind: str, virtual: int) -> int | None:
        """The micro-batch of the oldest message; None if there is none."""
        queue = self._queues.get((kind, virtual))
        return queue.popleft().micro_batch if queue else None

    def refuse_leftovers(self) -> None:
        """Raises: ScheduleError: a message was never received."""
        for (kind, _), queue in self._queues.items():
            if queue:
                msg = f"{queue[0].origin}: the {kind} of micro-batch {queue[0].micro_batch} is never received"
                raise ScheduleError(msg)


class _Held:
    """Content of a buffer: a micro-batch of a chunk, and the operations done with it."""

    __slots__ = ("chunk", "done", "micro_batch")

    def __init__(self, chunk: int, micro_batch: int) -> None:
        self.chunk = chunk
        self.micro_batch = micro_batch
        self.done: set[str] = set()


class Stage:
    """One simulated stage."""

    def __init__(
        self, schedule: PipeSchedule, steps: Sequence[Sequence[do.PipeInstruction]], mail: Mail, *, is_training: bool
    ) -> None:
        self.schedule = schedule
        self.ending: list[type[do.PipeInstruction]] = []
        self._mail = mail
        self._is_training = is_training
        self._todo = [_Place(schedule.stage, step, one) for step, own in enumerate(steps) for one in own]
        self._at = 0
        self._buffers: list[_Held | None] = [None] * schedule.num_pipe_buffers()
        self._chunk_of: dict[int, int] = {}
        chunks = range(schedule.num_chunks)
        self._loaded = [0 for _ in chunks]
        self._passed: dict[str, list[set[int]]] = {
            what: [set() for _ in chunks] for what in ("forward", "backward", "weights")
        }
        self._owed: list[deque[tuple[int, int]]] = [deque() for _ in chunks]
        self._live = self._weights = 0
        self._peaks = [0, 0, 0]

    # -- playing -----------------------------------------------------------------------------------------------------

    def play(self) -> bool:
        """Run until a receive has to wait; True if anything ran."""
        began = self._at
        while self._at < len(self._todo):
            one = self.here().one
            if isinstance(one, do.BufferOpInstruction):
                self._look_at_buffer(one)
            action = _ACTIONS.get(type(one), Stage._unknown)
            if not action(self, one):
                break
            self._at += 1
        return self._at > began

    @property
    def is_waiting(self) -> bool:
        """True unless all instructions ran."""
        return self._at < len(self._todo)

    def here(self) -> _Place:
        """The instruction that is next."""
        return self._todo[self._at]

    def wanted(self) -> tuple[str, int]:
        """Kind and stage of the message this stage waits for."""
        one = self.here().one
        is_activation = isinstance(one, do.RecvActivation)
        virtual = self.schedule.virtual_stage(getattr(one, "chunk", 0)) + (-1 if is_activation else 1)
        return ("activation" if is_activation else "gradient"), virtual % self.schedule.num_stages

    def _refuse(self, why: str) -> NoReturn:
        msg = f"{self.here()}: {why}"
        raise ScheduleError(msg)

    def _look_at_buffer(self, one: do.BufferOpInstruction) -> None:
        if not 0 <= one.chunk < self.schedule.num_chunks:
            self._refuse(f"this stage has {self.schedule.num_chunks} chunks, from 0")
        if not 0 <= one.buffer_id < len(self._buffers):
            self._refuse(f"this stage has {len(self._buffers)} buffers (num_pipe_buffers), from 0")
        owner = self._chunk_of.setdefault(one.buffer_id, one.chunk)
        if owner != one.chunk:
            self._refuse(f"buffer {one.buffer_id} belongs to chunk {owner}; every chunk has buffers of its own")

    def _put(self, one: do.BufferOpInstruction, micro_batch: int, what: str) -> None:
        """Put a micro-batch's input or gradient into its buffer."""
        held = self._buffers[one.buffer_id]
        if held is None:
            held = self._buffers[one.buffer_id] = _Held(one.chunk, micro_batch)
        elif what in held.done or "forward" in held.done or held.micro_batch != micro_batch:
            self._refuse(
                f"it would put micro-batch {micro_batch} into a buffer that still holds micro-batch {held.micro_batch}"
            )
        self._same_batch(one, micro_batch)
        held.done.add(what)

    def _held(self, one: do.BufferOpInstruction, needs: Sequence[str], what: str) -> _Held:
        """The buffer's micro-batch; checks that `needs` is done and `what` is not, and marks `what` as done."""
        held = self._buffers[one.buffer_id]
        if held is None:
            self._refuse("the buffer is empty")
        missing = [need for need in needs if need not in held.done]
        if missing:
            self._refuse(f"micro-batch {held.micro_batch} in this buffer is not {_WORDS[missing[0]]} yet")
        if what in held.done:
            self._refuse(f"micro-batch {held.micro_batch} in this buffer is {_WORDS[what]} already")
        self._same_batch(one, held.micro_batch)
        held.done.add(what)
        return held

    def _same_batch(self, one: do.BufferOpInstruction, micro_batch: int) -> None:
        if one.micro_batch is not None and one.micro_batch != micro_batch:
            self._refuse(f"it says micro-batch {one.micro_batch}, but by its order it is about {micro_batch}")

    def _count(self, live: int, weights: int) -> None:
        self._live += live
        self._weights += weights
        now = (self._live, self._weights, self._live + self._weights)
        self._peaks = [max(pair) for pair in zip(self._peaks, now, strict=True)]

    def _pass(self, what: str, one: do.BufferOpInstruction, micro_batch: int) -> None:
        passed = self._passed[what][one.chunk]
        if micro_batch in passed:
            self._refuse(f"micro-batch {micro_batch} is {_WORDS[what]} a second time")
        passed.add(micro_batch)

    # -- instructions; False: it has to wait ---------------------------------------------------------------------------

    def _load(self, one: do.BufferOpInstruction) -> bool:
        if not (self.schedule.has_first_layers(one.chunk) or self.schedule.has_last_layers(one.chunk)):
            self._refuse("only the first and the last layers of the model load data")
        self._put(one, self._loaded[one.chunk], "loaded")
        self._loaded[one.chunk] += 1
        return True

    def _recv_activation(self, one: do.BufferOpInstruction) -> bool:
        if self.schedule.has_first_layers(one.chunk):
            self._refuse("nobody stands before the first layers of the model")
        micro_batch = self._mail.take("activation", self.schedule.virtual_stage(one.chunk) - 1)
        if micro_batch is None:
            return False
        self._put(one, micro_batch, "received")
        return True

    def _forward(self, one: do.BufferOpInstruction) -> bool:
        is_first, is_last = self.schedule.has_first_layers(one.chunk), self.schedule.has_last_layers(one.chunk)
        needs = ["loaded"] * (is_first or is_last) + ["received"] * (not is_first)
        held = self._held(one, needs, "forward")
        self._pass("forward", one, held.micro_batch)
        self._count(1, 0)
        if not self._is_training and is_last:
            self._free(one)
        return True

    def _send_activation(self, one: do.BufferOpInstruction) -> bool:
        if self.schedule.has_last_layers(one.chunk):
            self._refuse("nobody stands behind the last layers of the model")
        held = self._held(one, ["forward"], "sent")
        self._mail.post("activation", self.schedule.virtual_stage(one.chunk), held.micro_batch, self.here())
        if not self._is_training:
            self._free(one)
        return True

    def _recv_grad(self, one: do.BufferOpInstruction) -> bool:
        if self.schedule.has_last_layers(one.chunk):
            self._refuse("nobody stands behind the last layers of the model")
        micro_batch = self._mail.take("gradient", self.schedule.virtual_stage(one.chunk) + 1)
        if micro_batch is None:
            return False
        held = self._held(one, ["forward", "sent"], "graded")
        if held.micro_batch != micro_batch:
            self._refuse(f"the gradient of micro-batch {micro_batch} arrives for micro-batch {held.micro_batch}")
        return True

    def _backward_pass(self, one: do.BufferOpInstruction) -> bool:
        held = self._backward(one)
        self._pass("weights", one, held.micro_batch)
        self._count(-1, 0)
        return True

    def _backward_input(self, one: do.BufferOpInstruction) -> bool:
        held = self._backward(one)
        self._owed[one.chunk].append((one.buffer_id, held.micro_batch))
        self._count(-1, 1)
        return True

    def _backward(self, one: do.BufferOpInstruction) -> _Held:
        is_last = self.schedule.has_last_layers(one.chunk)
        held = self._held(one, ["forward"] if is_last else ["forward", "graded"], "backward")
        self._pass("backward", one, held.micro_batch)
        if self.schedule.has_first_layers(one.chunk):
            self._buffers[one.buffer_id] = None
        return held

    def _backward_weight(self, one: do.BufferOpInstruction) -> bool:
        if not self._owed[one.chunk]:
            self._refuse("no gradient of an input waits for that of its weights")
        buffer_id, micro_batch = self._owed[one.chunk].popleft()
        if buffer_id != one.buffer_id:
            self._refuse(f"the oldest weight pass of this chunk is of micro-batch {micro_batch} in buffer {buffer_id}")
        self._same_batch(one, micro_batch)
        self._pass("weights", one, micro_batch)
        self._count(0, -1)
        return True

    def _send_grad(self, one: do.BufferOpInstruction) -> bool:
        if self.schedule.has_first_layers(one.chunk):
            self._refuse("nobody stands before the first layers of the model")
        held = self._held(one, ["backward"], "returned")
        self._mail.post("gradient", self.schedule.virtual_stage(one.chunk), held.micro_batch, self.here())
        self._buffers[one.buffer_id] = None
        return True

    def _end(self, one: do.PipeInstruction) -> bool:
        if any(len(own) < self.schedule.num_micro_batches for own in self._passed["weights"]):
            self._refuse("not all backward passes are done")
        if self.ending and _ENDING.index(type(one)) <= _ENDING.index(self.ending[-1]):
            self._refuse(f"it comes after {self.ending[-1].__name__}")
        self.ending.append(type(one))
        return True

    def _unknown(self, one: do.PipeInstruction) -> bool:
        self._refuse("its kind is unknown, so nothing can be proved")

    def _free(self, one: do.BufferOpInstruction) -> None:
        self._buffers[one.buffer_id] = None
        self._count(-1, 0)

    # -- the end -----------------------------------------------------------------------------------------------------

    def refuse_unfinished(self) -> None:
        """Raises: ScheduleError: a pass is missing, or a buffer still holds something."""
        for what, chunk, missing in self._missing():
            msg = f"stage {self.schedule.stage}: micro-batch {missing} of chunk {chunk} is never {_WORDS[what]}"
            raise ScheduleError(msg)
        for buffer_id, held in enumerate(self._buffers):
            if held is not None:
                msg = (
                    f"{self._todo[-1]}, the last: buffer {buffer_id} still holds "
                    f"micro-batch {held.micro_batch}, which was {', '.join(sorted(_WORDS[what] for what in held.done))}"
                )
                raise ScheduleError(msg)

    def _missing(self) -> Iterator[tuple[str, int, int]]:
        every = set(range(self.schedule.num_micro_batches))
        for what in ("forward", "backward", "weights") if self._is_training else ("forward",):
            for chunk, passed in enumerate(self._passed[what]):
                if passed != every:
                    yield what, chunk, min(every ^ passed)

    def proof(self, peak_messages: int) -> StageProof:
        """The requirements of this stage."""
        live, weights, held = self._peaks
        return StageProof(self.schedule.stage, len(self._buffers), live, weights, held, peak_messages)


_WORDS = {
    "loaded": "loaded",
    "received": "received",
    "forward": "run forward",
    "sent": "sent on",
    "graded": "given its gradient",
    "backward": "run backward",
    "weights": "taken into the gradients of the weights",
    "returned": "returned as a gradient",
}
_ACTIONS: dict[type, Callable[..., bool]] = {
    do.LoadMicroBatch: Stage._load,
    do.RecvActivation: Stage._recv_activation,
    do.ForwardPass: Stage._forward,
    do.SendActivation: Stage._send_activation,
    do.RecvGrad: Stage._recv_grad,
    do.BackwardPass: Stage._backward_pass,
    do.BackwardInput: Stage._backward_input,
    do.BackwardWeight: Stage._backward_weight,
    do.SendGrad: Stage._send_grad,
    **dict.fromkeys(_ENDING, Stage._end),
}
