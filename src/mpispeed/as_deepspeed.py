"""`import mpispeed.as_deepspeed` at the top of a script: from there on `import deepspeed` finds the names of mpispeed.

Processes that the script starts find them too. RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set to the
launcher's numbers, because transformers and accelerate read them before anything joins MPI. Where DeepSpeed itself is
installed nothing changes but a warning.
"""

from __future__ import annotations

import logging
import os
import sys

from mpispeed.base.errors import UsageError
from mpispeed.base.launched import launched_rank
from mpispeed.compat.as_deepspeed import activate
from mpispeed.launch.torch_env import torch_variables

log = logging.getLogger(__name__)

_LOOK_FOR_DEEPSPEED = (
    "transformers.integrations.deepspeed",
    "accelerate.utils.deepspeed",
    "lightning.fabric.strategies.deepspeed",
)
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

IS_SERVED = activate()
"""True unless DeepSpeed itself is installed."""

__all__ = ["IS_SERVED"]


def _set_place() -> None:
    try:
        found = torch_variables()
    except UsageError:  # the launcher does not tell; MPI will, in time for everything but accelerate
        return
    for name in _PLACE:
        os.environ.setdefault(name, found[name])


def _warn_late() -> None:
    """Tell rank 0 of libraries that have looked for deepspeed before it could be found."""
    early = [name for name in _LOOK_FOR_DEEPSPEED if name in sys.modules]
    if early and "deepspeed" not in sys.modules and launched_rank() == 0:
        log.warning(
            "%s was imported before mpispeed.as_deepspeed and found no deepspeed; import that first, where sorters of "
            "imports leave it alone (`# isort: split`), or start with mpispeed run --as-deepspeed", early[0],
        )  # fmt: skip


if IS_SERVED:
    _warn_late()
    _set_place()
