"""Floor 10: turns "run this script on N ranks" into the command line of the available MPI or SLURM.

Knows mpirun and srun from the outside only. Must not know what the script does, nor import MPI: a parent
that has joined MPI cannot start ranks.
"""

from mpispeed.launch.command import Launch, plan_launch, run_launch

__all__ = ["Launch", "plan_launch", "run_launch"]
