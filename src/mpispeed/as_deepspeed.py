"""`import mpispeed.as_deepspeed` at the top of a script: from there on `import deepspeed` finds the names of mpispeed.

Processes that the script starts find them too. Where DeepSpeed itself is installed nothing changes but a warning.
"""

from mpispeed.compat.as_deepspeed import activate

IS_SERVED = activate()
"""True unless DeepSpeed itself is installed."""

__all__ = ["IS_SERVED"]
