"""torch.distributed over MPI; importing this registers the backend "mpi4py".

`torch.distributed.init_process_group("mpi4py")` then works in every job of srun or mpirun, without an address, a port
or a store; so does `mpispeed.init_distributed()`.
"""

from mpispeed.engine.distributed import join_world
from mpispeed.process_group.group import BACKEND, MpiProcessGroup
from mpispeed.process_group.options import Options
from mpispeed.process_group.registration import register
from mpispeed.process_group.store import MpiStore

__all__ = ["BACKEND", "MpiProcessGroup", "MpiStore", "Options"]

register(join_world)
