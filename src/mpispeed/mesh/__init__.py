"""Floor 2, ranks: named axes, groups of ranks and the verbs over them. All communication over MPI is here.

Offers `start` (join the job), `Topology` (arithmetic), `Mesh` (groups by axes), `Comm` (verbs),
`Work` (started verbs) and `CommTrace` (records of calls). It must not know the meaning of a tensor.
"""

from mpispeed.mesh import launcher
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.mesh.collectives.group import CommTrace, Entry
from mpispeed.mesh.collectives.work import Work
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.mesh import Factor, Mesh, Topology
from mpispeed.mesh.world import World, current, start

# Here and not only in start(): a script may import mpi4py itself in between, and MPI reads this when it is joined.
launcher.prepare()

__all__ = [
    "Comm",
    "CommTrace",
    "Entry",
    "Factor",
    "Mesh",
    "Topology",
    "Work",
    "World",
    "current",
    "solo_comm",
    "start",
]
