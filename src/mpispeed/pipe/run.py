"""Executor of schedules on one stage. Its owner defines batches, losses and steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base.errors import CommError, MessageError, ScheduleError
from mpispeed.base.split_grads import Backlog, put_off
from mpispeed.pipe import instructions as do
from mpispeed.pipe.exchange import MISSING, tensors_with_grad

if TYPE_CHECKING:
    from mpispeed.pipe.exchange import Exchange
    from mpispeed.pipe.instructions import PipeInstruction
    from mpispeed.pipe.schedule import PipeSchedule

log = logging.getLogger(__name__)


class Duties(Protocol):
    """Callbacks of the executor to its owner."""

    def load(self) -> tuple[Any, Any]:
        """The next micro-batch: the input of the first layer, and the labels for the loss."""

    def stand_in(self) -> tuple[Any, Any]:
        """What to go on with after `load` has failed: another pair, or `MISSING` twice."""

    def forward(self, chunk: int, inputs: Any) -> Any:
        """Run the layers of a chunk of this stage."""

    def leave_out(self, chunk: int, *, is_loss: bool = False) -> None:
        """Take the place of a forward pass of a chunk, or of a loss, that has no input."""

    def loss(self, outputs: Any, labels: Any) -> Any:
        """The value kept of a micro-batch at the end of the pipe; a scalar tensor when training."""

    def backward(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None, *, is_last: bool) -> None:
        """Go back from `tensors`; without `grads` they are a loss.

        Without `tensors` nothing is computed. `is_last`: all gradients of the batch are there then. Never so in a batch
        that puts weight gradients off.
        """

    def deliver(self, backlog: Backlog) -> None:
        """Work off the weight gradients that were put off."""

    def reduce_tied(self) -> None:
        """Sum gradients of tied weights over their stages."""

    def reduce(self) -> None:
        """Sum gradients over the data axis."""

    def step(self) -> None:
        """Update the parameters."""

    def can_go_on(self) -> bool:
        """True if no rank waits in a layer for this one, whose layers have just failed."""

    def give_up(self) -> None:
        """Note that this batch has failed: there must be no update."""


@dataclass(slots=True)
class _Slot:
    """Content of a buffer of the schedule."""

    inputs: Any = None
    labels: Any = None
    outputs: Any = None
    grads: list[torch.Tensor] | None = None
    is_loaded: bool = False
    is_live: bool = False  # forward is done, backward is not


@dataclass(slots=True)
class Place:
    """Position of a rank: virtual stage `chunk * stages + stage` of `chunks * stages`."""

    stage: int
    stages: int
    chunks: int = 1

    def number(self, chunk: int) -> int:
        """The virtual stage of a chunk of this rank."""
        return chunk * self.stages + self.stage

    def is_first(self, chunk: int) -> bool:
        """True if the chunk begins the model."""
        return self.number(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """True if the chunk ends the model."""
        return self.number(chunk) == self.stages * self.chunks - 1


@dataclass(slots=True)
class Executor:
    """Runs schedules on one stage.

    A failure of the owner's callbacks does not end a batch at once, because other stages wait for messages: it is kept,
    the passes that depend on it are left out, and all others run, with every message and every sum over ranks.

    Attributes:
        place: of this rank.
        exchange: messages to the neighbours; of no use with one stage.
        duties: of the owner.
        losses: results of `Duties.loss` for each micro-batch of the last run, in order; on the last stage.
        peak_live: most micro-batches whose activations were held at once in the last run.
        failure: the first that was kept in the last run.
    """

    place: Place
    exchange: Exchange
    duties: Duties
    losses: list[Any] = field(default_factory=list)
    peak_live: int = 0
    failure: Exception | None = None
    _slots: list[_Slot] = field(default_factory=list)
    _owed: list[deque[Backlog]] = field(default_factory=list)
    _is_training: bool = False
    _backwards_left: int | None = None

    def run(self, schedule: PipeSchedule, *, is_training: bool) -> None:
        """Carry out all instructions in order.

        Collective over: the pipe axis, with schedules of one kind.

        Raises:
            ScheduleError: the schedule uses a buffer that it does not have, or that is not free or not filled.
            Exception: a failure of the owner with which this rank cannot go on.
        """
        steps = [list(step) for step in schedule.steps()]
        self._slots = [_Slot() for _ in range(schedule.num_pipe_buffers())]
        self._owed = [deque() for _ in range(self.place.chunks)]
        self._is_training, self.peak_live = is_training, 0
        self.losses.clear()
        self.failure = None
        each = [type(one) for step in steps for one in step]
        # None: the last gradients come behind the backward passes, with the weights that these put off.
        self._backwards_left = None if do.BackwardInput in each else each.count(do.BackwardPass)
        try:
            for step in steps:
                self._carry_out(_sends_first(step))
            self.exchange.settle()
        finally:
            self._slots.clear()
            self._owed.clear()

    def _carry_out(self, instructions: Iterable[PipeInstruction]) -> None:
        for one in instructions:
            if isinstance(one, do.BufferOpInstruction):
                action = _BUFFER_ACTIONS.get(type(one))
                if action is None:
                    raise ScheduleError(_unknown(one))
                action(self, one.chunk, self._slot(one))
            elif isinstance(one, do.ReduceTiedGrads):
                self.duties.reduce_tied()
            elif isinstance(one, do.ReduceGrads):
                self._reduce()
            elif isinstance(one, do.OptimizerStep):
                self.duties.step()
            else:
                raise ScheduleError(_unknown(one))

    def _slot(self, one: do.BufferOpInstruction) -> _Slot:
        if not 0 <= one.buffer_id < len(self._slots):
            msg = f"{one!r} names a buffer that does not exist: the schedule has {len(self._slots)} (num_pipe_buffers)"
            raise ScheduleError(msg)
        if not 0 <= one.chunk < self.place.chunks:
            msg = f"{one!r} names chunk {one.chunk}; this stage has {self.place.chunks}"
            raise ScheduleError(msg)
        return self._slots[one.buffer_id]

    def _keep(self, failure: Exception, *, is_in_layers: bool = False) -> None:
        """Note a failure; raises it, or the first, if the other ranks cannot be served any more."""
        first = failure if self.failure is None else self.failure
        is_of_messages = isinstance(failure, CommError) and not isinstance(failure, MessageError)
        if is_of_messages or (is_in_layers and not self.duties.can_go_on()):
            raise first
        if self.failure is None:
            self.failure = failure
            log.warning(  # without its text, which the error itself shows
                "stage %d: %s; the batch is given up, on all ranks when each has come to its end",
                self.place.stage,
                type(failure).__name__,
            )
        self.duties.give_up()

    # -- instructions ------------------------------------------------------------------------------------------------

    def _load(self, chunk: int, slot: _Slot) -> None:
        try:
            inputs, labels = self.duties.load()
        except Exception as failure:
            inputs, labels = self.duties.stand_in()
            self._keep(failure, is_in_layers=inputs is MISSING and self.place.is_first(chunk))
        if self.place.is_first(chunk):
            _require_free(slot, "LoadMicroBatch")
            slot.inputs, slot.is_loaded = inputs, True
        if self.place.is_last(chunk):
            slot.labels = labels

    def _recv_activation(self, chunk: int, slot: _Slot) -> None:
        _require_free(slot, "RecvActivation")
        number = self.place.number(chunk)
        slot.inputs = self.exchange.recv_tree((number - 1) % self.place.stages, number - 1)
        slot.is_loaded = True
        if slot.inputs is MISSING:
            self.duties.give_up()

    def _forward(self, chunk: int, slot: _Slot) -> None:
        if not slot.is_loaded:
            msg = f"a forward pass of chunk {chunk} has no input: its buffer was neither loaded nor received"
            raise ScheduleError(msg)
        slot.outputs = self._outputs(chunk, slot)
        slot.labels = None
        if self._is_training:
            slot.is_live = True
            self.peak_live = max(self.peak_live, sum(other.is_live for other in self._slots))
        else:
            slot.inputs, slot.is_loaded = None, False

    def _outputs(self, chunk: int, slot: _Slot) -> Any:
        """What the layers, and at the end of the pipe the loss, make of the inputs; `MISSING` after a failure."""
        outputs = MISSING
        if slot.inputs is MISSING:
            self.duties.leave_out(chunk)
        else:
            try:
                outputs = self.duties.forward(chunk, slot.inputs)
            except Exception as failure:
                self._keep(failure, is_in_layers=True)
        if not self.place.is_last(chunk):
            return outputs
        if outputs is MISSING or slot.labels is MISSING:
            self.duties.leave_out(chunk, is_loss=True)
            return _nothing_of(outputs)
        try:
            loss = self.duties.loss(outputs, slot.labels)
        except Exception as failure:
            self._keep(failure)
            return _nothing_of(outputs)
        self.losses.append(_detached(loss))
        return loss

    def _send_activation(self, chunk: int, slot: _Slot) -> None:
        number = self.place.number(chunk)
        after = (number + 1) % self.place.stages
        try:
            self.exchange.send_tree(slot.outputs, after, number)
        except MessageError as failure:
            self._keep(failure)
            slot.outputs = MISSING
            self.exchange.send_tree(MISSING, after, number)
        if not self._is_training:
            slot.outputs = None

    def _recv_grad(self, chunk: int, slot: _Slot) -> None:
        number = self.place.number(chunk)
        slot.grads = self.exchange.recv_grads(slot.outputs, (number + 1) % self.place.stages, number)

    def _backward(self, chunk: int, slot: _Slot) -> None:
        if not slot.is_live:
            msg = f"a backward pass of chunk {chunk} has no forward pass before it in its buffer"
            raise ScheduleError(msg)
        if self._backwards_left is not None:
            self._backwards_left -= 1
        is_last = self._backwards_left == 0
        if slot.grads is None and not self.place.is_last(chunk):
            msg = f"a backward pass of chunk {chunk} has no gradient: none was received into its buffer"
            raise ScheduleError(msg)
        try:
            if slot.outputs is MISSING:
                self.duties.backward([], [], is_last=is_last)
            elif self.place.is_last(chunk):
                self.duties.backward([slot.outputs], None, is_last=is_last)
            else:
                self.duties.backward(tensors_with_grad(slot.outputs), slot.grads, is_last=is_last)
        except Exception as failure:
            self._keep(failure, is_in_layers=True)
        slot.outputs = slot.grads = None
        slot.is_live = False
        if self.place.is_first(chunk):
            slot.inputs, slot.is_loaded = None, False

    def _backward_input(self, chunk: int, slot: _Slot) -> None:
        backlog = Backlog()
        self._owed[chunk].append(backlog)
        with put_off(backlog):
            self._backward(chunk, slot)

    def _backward_weight(self, chunk: int, _: _Slot) -> None:
        # In the order of micro-batches: the buffer may hold another one by now.
        if not self._owed[chunk]:
            msg = f"weight gradients of chunk {chunk} are asked for before the gradients of its inputs"
            raise ScheduleError(msg)
        try:
            self.duties.deliver(self._owed[chunk].popleft())
        except Exception as failure:
            self._keep(failure)

    def _reduce(self) -> None:
        try:
            self.duties.reduce()
        except Exception as failure:
            self._keep(failure)

    def _send_grad(self, chunk: int, slot: _Slot) -> None:
        number = self.place.number(chunk)
        self.exchange.send_grads(slot.inputs, (number - 1) % self.place.stages, number - 1)
        slot.inputs, slot.is_loaded = None, False


_BUFFER_ACTIONS: dict[type, Callable[[Executor, int, _Slot], None]] = {
    do.LoadMicroBatch: Executor._load,
    do.RecvActivation: Executor._recv_activation,
    do.ForwardPass: Executor._forward,
    do.SendActivation: Executor._send_activation,
    do.RecvGrad: Executor._recv_grad,
    do.BackwardPass: Executor._backward,
    do.BackwardInput: Executor._backward_input,
    do.BackwardWeight: Executor._backward_weight,
    do.SendGrad: Executor._send_grad,
}


def _unknown(one: Any) -> str:
    return (
        f"the schedule has the instruction {one!r}, which this engine cannot carry out; use those of mpispeed.pipe: "
        f"{', '.join(sorted(kind.__name__ for kind in _BUFFER_ACTIONS))}, ReduceTiedGrads, ReduceGrads, OptimizerStep"
    )


def _sends_first(step: Sequence[PipeInstruction]) -> list[PipeInstruction]:
    """The instructions of a step with sends before the loads and receives that stand right in front of them.

    A send only posts an earlier result; behind a receive it would wait for a neighbour that may itself wait for this
    message.
    """
    order: list[PipeInstruction] = []
    for one in step:
        at = len(order)
        if isinstance(one, do.SendActivation | do.SendGrad):
            while at and isinstance(order[at - 1], do.LoadMicroBatch | do.RecvActivation | do.RecvGrad):
                at -= 1
        order.insert(at, one)
    return order


def _require_free(slot: _Slot, verb: str) -> None:
    if slot.is_live or slot.is_loaded:
        msg = f"{verb} into a buffer that still holds another micro-batch; the schedule needs more buffers"
        raise ScheduleError(msg)


def _nothing_of(outputs: Any) -> Any:
    """A loss that is zero and reaches all of `outputs`: their backward passes may meet other ranks.

    `MISSING` where no gradient is wanted.
    """
    taking = [tensor for tensor in tensors_with_grad(outputs) if tensor.is_floating_point()]
    return sum(((tensor.float() * 0).sum() for tensor in taking), torch.zeros(())) if taking else MISSING


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return type(value)(_detached(item) for item in value)
    return value
