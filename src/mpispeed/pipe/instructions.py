"""Instructions of a pipeline schedule: plain frozen data, executed by a table."""

from __future__ import annotations

from typing import Any, NoReturn

#: shown only for chunks other than 0, so that plain schedules print like DeepSpeed's
_QUIET = ("chunk", "micro_batch")


class PipeInstruction:
    """One thing a rank does. Keyword arguments become attributes; equal by type and arguments; frozen.

    Users derive their own kinds from it and give the executor a function for them.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Args: `kwargs`: the attributes; hashable values, if the instruction is to be hashable."""
        self.__dict__.update(kwargs)

    @property
    def name(self) -> str:
        """The kind, as it is printed."""
        return type(self).__name__

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments, as a copy."""
        return dict(self.__dict__)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        msg = f"{self!r} is frozen: {name} cannot be set"
        raise AttributeError(msg)

    def __delattr__(self, name: str) -> NoReturn:
        msg = f"{self!r} is frozen: {name} cannot be deleted"
        raise AttributeError(msg)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PipeInstruction):
            return NotImplemented
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(self.__dict__.items()))))

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self._shown().items())
        return f"{self.name}({shown})"

    def _shown(self) -> dict[str, Any]:
        return self.__dict__


class OptimizerStep(PipeInstruction):
    """Update the parameters, then clear the gradients. All ranks run it together."""


class ReduceGrads(PipeInstruction):
    """Sum the gradients of this stage over the data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of parameters that several stages share, over these stages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on one pipeline buffer of this rank."""

    buffer_id: int
    chunk: int
    micro_batch: int | None

    def __init__(self, buffer_id: int, chunk: int = 0, micro_batch: int | None = None, **kwargs: Any) -> None:
        """An instruction on a buffer.

        Args:
            buffer_id: number of the buffer on this rank, over all chunks.
            chunk: which of this rank's virtual stages it is about.
            micro_batch: which micro-batch of the batch; None leaves it to the order of the instructions.
            kwargs: further attributes.
        """
        super().__init__(buffer_id=buffer_id, chunk=chunk, micro_batch=micro_batch, **kwargs)

    def __hash__(self) -> int:
        return hash((type(self), self.buffer_id, self.chunk, self.micro_batch))

    def _shown(self) -> dict[str, Any]:
        if self.chunk:
            return self.__dict__
        return {key: value for key, value in self.__dict__.items() if key not in _QUIET}


class LoadMicroBatch(BufferOpInstruction):
    """Take the next item of the data: inputs on the first virtual stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Run the layers of a chunk."""


class BackwardPass(BufferOpInstruction):
    """Gradients of a chunk's inputs and weights. The buffer is free after it."""


class BackwardInput(BufferOpInstruction):
    """Gradients of a chunk's inputs only. The buffer is free after it; the weight pass is queued.

    Zero-bubble schedules split the backward pass so (arXiv 2401.10241).
    """


class BackwardWeight(BufferOpInstruction):
    """Gradients of a chunk's weights, of the oldest `BackwardInput` of that chunk that still waits for it."""


class SendActivation(BufferOpInstruction):
    """Send the output of a chunk to the next virtual stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the input of a chunk from the virtual stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of a chunk's input to the virtual stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of a chunk's output from the next virtual stage."""
