"""The zero-bubble schedule ZB-H1: weight gradients fill the time that stages wait (arXiv 2401.10241)."""

from __future__ import annotations

from collections.abc import Iterator

from mpispeed.pipe.instructions import BackwardInput, BackwardWeight, ForwardPass
from mpispeed.pipe.schedule_base import OrderedSchedule, Pass


class ZeroBubbleSchedule(OrderedSchedule):
    """1F1B whose backward pass is split: the gradient of the input goes back at once, that of the weights later.

    Stage s keeps up to s weight passes back. Activations of at most P - s micro-batches are alive, as with 1F1B; with
    what the weight passes still need it is P on every stage.
    """

    def passes(self, stage: int) -> Iterator[Pass]:
        """The passes of one stage."""
        total = self.micro_batches
        forwards = min(self.stages - 1 - stage, total)
        yield from (Pass(ForwardPass, 0, batch) for batch in range(forwards))
        weights = 0
        for batch in range(total):
            if forwards < total:
                yield Pass(ForwardPass, 0, forwards)
                forwards += 1
            yield Pass(BackwardInput, 0, batch)
            if batch + 1 - weights > stage:
                yield Pass(BackwardWeight, 0, weights)
                weights += 1
        yield from (Pass(BackwardWeight, 0, batch) for batch in range(weights, total))
