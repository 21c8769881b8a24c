"""Floor 2, ranks: named axes, groups of ranks and the verbs over them. The only package that names MPI.

Offers `start` (join the job), `Topology` (arithmetic), `Mesh` (groups by axes), `Comm` (verbs),
`Work` (started verbs) and `Journal` (what was sent). It must not know what a tensor means.
"""

from mpispeed.mesh import launcher
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.journal import Entry, Journal
from mpispeed.mesh.mesh import Mesh
from mpispeed.mesh.solo import SoloComm
from mpispeed.mesh.topology import Factor, Topology
from mpispeed.mesh.work import Work
from mpispeed.mesh.world import World, current, start

# Here and not only in start(): a script may import mpi4py itself in between, and MPI reads this when it is joined.
launcher.prepare()

__all__ = [
    "Comm",
    "Entry",
    "Factor",
    "Journal",
    "Mesh",
    "SoloComm",
    "Topology",
    "Work",
    "World",
    "current",
    "start",
]
