"""The part of a checkpoint that an exchange adds: tensors beside those of parameters, and entries of the state tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from mpispeed.ckpt.format.logical import Deferred, LogicalTensor, Piece
    from mpispeed.ckpt.read.reader import Checkpoint
    from mpispeed.mesh.comm import Comm
    from mpispeed.store.layout import Place, Unit

NAMES_SHOWN = 20
"""Names of parameters in one message about a checkpoint."""


class Layout(Protocol):
    """This rank's part of the whole model: where flat ranges of its parameters are in logical tensors."""

    def pieces(
        self, unit: Unit, name: str, start: int, values: torch.Tensor | Deferred, *, before: int = 0
    ) -> tuple[Piece, ...]:
        """The pieces to save for a flat range; `before` elements are in earlier rows of the tensor."""

    def read(
        self, source: Checkpoint, name: str, slot: str, start: int, out: torch.Tensor, *, row: int | None = None
    ) -> None:
        """Fill `out` with a flat range, of one row where the tensor has one for each of several ranks."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that is saved or goes on from a checkpoint, as exchanges see it.

    Attributes:
        layout: this rank's part of the whole model.
        pending_backwards: backward passes since the last update.
        loss_scale: the factor of losses.
        copies: groups of ranks with copies of a unit whose gradients add up.
    """

    layout: Layout
    pending_backwards: int
    loss_scale: float
    copies: Callable[[Unit], Iterable[Comm]]


@dataclass(frozen=True, slots=True)
class Loading:
    """A checkpoint that is loaded.

    Attributes:
        run: the run that goes on from it.
        source: the checkpoint.
        optimizer: the optimizer's part of its state tree; empty if it has none.
        seen: updates that its optimizer state includes; 0 if the optimizer starts afresh.
    """

    run: Run
    source: Checkpoint
    optimizer: Mapping[str, Any]
    seen: int


class Saved(Protocol):
    """Additional content of one checkpoint."""

    def mean(self, place: Place, slot: str) -> tuple[Piece, ...] | None:
        """This rank's pieces of the mean of a slot that differs between ranks; None for others."""

    def tensors(self, place: Place, shape: tuple[int, ...]) -> Iterator[LogicalTensor]:
        """Additional tensors of one parameter, whose logical shape is `shape`."""

    def state(self) -> dict[str, Any]:
        """Entries of the optimizer's part of the state tree."""
