"""MPI-native training of large models, driven by DeepSpeed-style JSON.

The public names, and nothing else. They are imported when first used, because the command line
starts without torch. Modules inside the package never import from here: they name the floor they mean.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpispeed.base import late

if TYPE_CHECKING:
    from mpispeed import checkpointing, comm, elasticity, pipe, zero
    from mpispeed.ckpt.fp32 import (
        clone_tensors_for_torch_save,
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from mpispeed.data.loader import RepeatingLoader
    from mpispeed.engine import Engine, add_config_arguments, init_distributed, initialize
    from mpispeed.guard.walltime import RunEnded
    from mpispeed.nn.block import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
    from mpispeed.optim import FusedAdam, FusedLamb

__version__: str

# public name -> module that has it; a module stands for itself
_HOME = {
    "initialize": "mpispeed.engine",
    "init_distributed": "mpispeed.engine",
    "add_config_arguments": "mpispeed.engine",
    "Engine": "mpispeed.engine",
    "checkpointing": "mpispeed.checkpointing",
    "comm": "mpispeed.comm",
    "elasticity": "mpispeed.elasticity",
    "RepeatingLoader": "mpispeed.data.loader",
    "RunEnded": "mpispeed.guard.walltime",
    "FusedAdam": "mpispeed.optim",
    "FusedLamb": "mpispeed.optim",
    "DeepSpeedTransformerConfig": "mpispeed.nn.block",
    "DeepSpeedTransformerLayer": "mpispeed.nn.block",
    "pipe": "mpispeed.pipe",
    "zero": "mpispeed.zero",
    "get_fp32_state_dict_from_zero_checkpoint": "mpispeed.ckpt.fp32",
    "load_state_dict_from_zero_checkpoint": "mpispeed.ckpt.fp32",
    "convert_zero_checkpoint_to_fp32_state_dict": "mpispeed.ckpt.fp32",
    "clone_tensors_for_torch_save": "mpispeed.ckpt.fp32",
}

__all__ = [
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "Engine",
    "FusedAdam",
    "FusedLamb",
    "RepeatingLoader",
    "RunEnded",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "clone_tensors_for_torch_save",
    "comm",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "elasticity",
    "get_fp32_state_dict_from_zero_checkpoint",
    "init_distributed",
    "initialize",
    "load_state_dict_from_zero_checkpoint",
    "pipe",
    "zero",
]


late.provide("TiledLinear", "mpispeed.engine.tiling:TiledLinear")
late.provide("TiledLinearReturnBias", "mpispeed.engine.tiling:TiledLinearReturnBias")
late.provide("resolve_init_config", "mpispeed.engine.birth_config:resolve_init_config")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # read only when asked for: it searches the installed files

        return version("mpispeed")
    if name not in _HOME:
        msg = f"module 'mpispeed' has no attribute {name!r}; its public names are {', '.join(__all__)}"
        raise AttributeError(msg)
    module = importlib.import_module(_HOME[name])
    found = module if _HOME[name] == f"mpispeed.{name}" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
