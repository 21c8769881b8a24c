"""Floor 2, ranks: named axes, groups of ranks and the verbs over them. All communication over MPI is here.

Offers `start` (join the job), `Topology` (arithmetic), `Mesh` (groups by axes), `Comm` (verbs),
`Work` (started verbs) and `CommTrace` (records of calls). It must not know the meaning of a tensor.
"""

from mpispeed.mesh import launcher
from mpispeed.mesh.backends.solo import SoloComm
from mpispeed.mesh.collectives.work import Work
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.mesh import Mesh
from mpispeed.mesh.topology import Factor, Topology
from mpispeed.mesh.trace.comm_trace import CommTrace, Entry
from mpispeed.mesh.world import World, current, start

# Here and not only in start(): a script may import mpi4py itself in between, and MPI reads this when it is joined.
launcher.prepare()

__all__ = [
    "Comm",
    "CommTrace",
    "Entry",
    "Factor",
    "Mesh",
    "SoloComm",
    "Topology",
    "Work",
    "World",
    "current",
    "start",
]
