"""The memory and traffic that an exchange adds to those of sums in full precision, for predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh, Topology
    from mpispeed.store.layout import Table, Unit
    from mpispeed.store.placement import Placement


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that one rank sends in one optimizer step, by the ring formula of the trace, and calls of the verb.

    Rows are equal by their bytes: calls are 0 where they are not counted.
    """

    what: str
    verb: str
    axes: tuple[str, ...]
    bytes: int
    messages: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps with the same traffic: their name, the updates they are, and the bytes of one rank in one of them."""

    name: str
    when: str
    sent: tuple[Sent, ...]

    @property
    def bytes(self) -> int:
        """Bytes that one rank sends in such a step."""
        return sum(row.bytes for row in self.sent)


class Facts(Protocol):
    """Inputs of a prediction: units, ranks, placement of masters, and bytes of states by element."""

    @property
    def table(self) -> Table:
        """The units."""

    @property
    def topology(self) -> Topology:
        """The ranks."""

    @property
    def master(self) -> Placement:
        """The placement of masters."""

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer states for each element."""

    def dry_mesh(self) -> Mesh:
        """The ranks, seen from one of them, with a trace of their own; nothing moves."""

    def span(self, unit: Unit, placement: Placement) -> int:
        """Elements of a unit's flat buffer that one rank holds."""


class ExchangeCost:
    """Costs of sums in full precision: nothing is added.

    Attributes:
        own_masters: masters have their own memory even if parameters are fp32.
    """

    own_masters = False

    def held(self, facts: Facts, unit: Unit) -> Iterator[tuple[str, int]]:
        """Kinds of state of a unit that is held between steps, with their bytes; the same kinds for all units."""
        return iter(())

    def buffer_bytes(self, facts: Facts, buffers: int) -> int:
        """Bytes in memory for states in files during a step, where `buffers` serve windows."""
        return buffers

    def saved_bytes(self, facts: Facts, unit: Unit) -> int:
        """Additional bytes of a unit that a rank writes into a checkpoint."""
        return 0

    def phases(
        self, facts: Facts, full: Sequence[Sent], updates: Iterable[Sent], every: Iterable[Sent]
    ) -> Iterator[Phase]:
        """Kinds of steps with their traffic, if there are several; the first has `full`.

        Args:
            facts: the run.
            full: the rows of a step in full precision.
            updates: those of updated parameters.
            every: others that all kinds of steps have.
        """
        return iter(())


SUMS_ALONE = ExchangeCost()
