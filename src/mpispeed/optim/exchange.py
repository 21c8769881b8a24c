"""Exchanges between ranks for an update: by default the mean of the gradients in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from mpispeed.optim.rule import Window


class Exchange(Enum):
    """The quantity averaged over data-parallel ranks for one update, and its precision."""

    GRADIENT = auto()
    """Gradients, in full precision, before the update: every rule that does not say otherwise."""
    CODED_GRADIENT = auto()
    """Gradients, through one bit per element, before the update."""
    MOMENTUM = auto()
    """Momenta, through one bit per element: each rank first mixes its own gradient into the common one."""
    NOTHING = auto()
    """Gradients stay local, and so does the update."""
    DRIFT = auto()
    """After a local update: the sum of updates since the last common point, through one bit per element."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Demands of an optimizer's exchange on a plan; none by default.

    Attributes:
        divides_nodes: the data axis is divided into nodes, between which it exchanges, where gradients are replicated.
        whole_states: full states on every rank, even if the plan would shard those of the optimizer alone.
    """

    divides_nodes: bool = False
    whole_states: bool = False


@runtime_checkable
class Exchanges(Protocol):
    """A rule that chooses the exchange of each update."""

    def exchanges(self, step: int, group: Mapping[str, Any] | None = None) -> Exchange:
        """For update number `step`, from 1. It depends on the step and hyper-parameters alone, equal on all ranks.

        With `group` the answer is for that parameter group, which may differ.
        """


@runtime_checkable
class MixesMomentum(Protocol):
    """A rule with steps of `Exchange.MOMENTUM`.

    Before such an update, for every window: m_i = a * exp_avg + b * grad with (a, b) of `mix`; the mean of m_i over
    ranks, divided by `coefficient`, becomes `exp_avg`.
    """

    def mix(self, group: Mapping[str, Any], grad_scale: float, key: tuple[Any, ...] = ()) -> tuple[float, float]:
        """The factors of the common momentum and of this rank's gradient for the window `key`."""

    def coefficient(self, key: tuple[Any, ...]) -> float:
        """Divisor of the agreed momentum of a window, above 0."""


@runtime_checkable
class Drifts(Protocol):
    """A rule with local updates (`Exchange.NOTHING`, `Exchange.DRIFT`), after which parameters of ranks differ.

    Masters are then the parameters of the last common point; local ones go to `Window.out`, which is never missing:
    master + the slot `drift_name`.
    """

    drift_name: str
    local_names: tuple[str, ...]  # slots that differ between ranks until they meet, that of the drift among them

    def drift(self, window: Window, buffer: Tensor, *, threads: int = 1) -> None:
        """Fill `buffer` with the values to be averaged. Shapes: as the master of the window."""

    def settle(self, window: Window, agreed: Tensor, *, threads: int = 1) -> None:
        """Meet at the mean of `drift`."""
