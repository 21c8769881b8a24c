"""Prediction of updates of matrices as wholes (Muon's): owners' shares, messages and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpispeed.engine.matrices import find_groups
from mpispeed.engine.matrix_update import RoundTrip
from mpispeed.mesh.comm import Failures
from mpispeed.optim.muon import USE
from mpispeed.optim.rule import Matrixwise
from mpispeed.store.dry import META

if TYPE_CHECKING:
    from mpispeed.engine.estimate.inputs import EstimateInputs
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.param_shards import ParamShards


@dataclass(frozen=True, slots=True)
class Owners:
    """Matrices of which the same ranks have parts.

    Attributes:
        ranks: that own them.
        matrices: how many.
        elements: of all of them.
        largest_share: the largest owner's part of the work, of 1.
        idle: ranks that own none.
        dtype: in which they travel and are made orthogonal.
    """

    ranks: int
    matrices: int
    elements: int
    largest_share: float
    idle: int
    dtype: str

    def __str__(self) -> str:
        """In words."""
        idle = f", {self.idle} of them have none" if self.idle else ""
        return (
            f"{self.matrices} matrices of {self.elements:,} elements in {self.dtype}, owned by {self.ranks} "
            f"rank{'s' * (self.ranks > 1)}{idle}; the largest share of the work is {100 * self.largest_share:.1f} %, "
            f"{self.largest_share * self.ranks:.2f} of an equal one"
        )


class MatrixRounds:
    """The rounds of one update, on torch's meta device.

    Attributes:
        owners: of each group of matrices.
        peak_bytes: most bytes of messages under way and of the matrix that is worked on.
    """

    def __init__(self, facts: EstimateInputs, mesh: Mesh, params: ParamShards) -> None:
        rule, self.peak_bytes = facts.rule, 0
        self._trips: list[RoundTrip] = []
        self.owners: tuple[Owners, ...] = ()
        if not isinstance(rule, Matrixwise):
            return
        hyper = rule.group_of({}, is_matrix=True)
        slots = rule.slots_of({USE: True})
        units = [unit for unit in facts.table.units if unit.states.slots_among(facts.slots) == slots]
        dtypes = {unit.index: rule.dtype_of(hyper, unit.states.full, facts.plan.device) for unit in units}
        found = find_groups(mesh, facts.model, params, units, dtypes)
        most = max((entry.group for unit in units for entry in unit.layout.entries), default=0)
        groups = [hyper] * (most + 1)
        self._trips = [RoundTrip(rule, groups, group, each, META) for group in found for each in group.rounds]
        self.owners = tuple(
            Owners(
                len(group.members),
                len(group.matrices),
                sum(matrix.numel for matrix in group.matrices),
                max(group.ownership.loads) / sum(group.ownership.loads),
                sum(load == 0 for load in group.ownership.loads),
                str(group.dtype).removeprefix("torch."),
            )
            for group in found
        )
        for at, trip in enumerate(self._trips):  # the one before is awaited then, and the one after under way
            near = self._trips[max(at - 1, 0) : at + 2]
            self.peak_bytes = max(self.peak_bytes, trip.work_bytes + sum(other.message_bytes for other in near))

    def run(self) -> None:
        """Send what an update sends. Collective over: the ranks of the mesh."""
        failures = Failures()
        for trip in self._trips:
            trip.open()
            trip.send()
            trip.work(failures)
            trip.receive()
            trip.drop()
        failures.raise_first()
