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
from mpispeed.compat.as_deepspeed import activate
from mpispeed.launch.torch_env import torch_variables

log = logging.getLogger(__name__)

_TOO_EARLY = (
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


if IS_SERVED and "deepspeed" not in sys.modules and (known := [name for name in _TOO_EARLY if name in sys.modules]):
    log.warning(
        "%s was imported before mpispeed.as_deepspeed and has found no deepspeed; import it first (a line that sorters "
        "of imports leave alone, as with `# isort: split`), or start with mpispeed run --as-deepspeed", known[0],
    )  # fmt: skip
if IS_SERVED:
    _set_place()
