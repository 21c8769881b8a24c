"""MPI-native training of large models, driven by DeepSpeed-style JSON.

Holds the public names only. They are imported on first use, because the command line starts without torch. Modules of
the package do not import from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpispeed.base.version import VERSION as __version__
from mpispeed.compat import modules as _deepspeed_modules

if TYPE_CHECKING:
    from mpispeed import (
        aio as aio,
        checkpointing as checkpointing,
        checkpoints as checkpoints,
        comm as comm,
        compression as compression,
        curriculum as curriculum,
        data as data,
        elasticity as elasticity,
        features as features,
        flops as flops,
        inference as inference,
        kernels as kernels,
        moe as moe,
        monitor as monitor,
        nn as nn,
        optim as optim,
        pipe as pipe,
        sequence as sequence,
        token_stores as token_stores,
        torch_backend as torch_backend,
        zero as zero,
    )
    from mpispeed.compat.fp32 import (
        clone_tensors_for_torch_save as clone_tensors_for_torch_save,
        convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
    )
    from mpispeed.compat.on_device import OnDevice as OnDevice
    from mpispeed.data.loader import RepeatingLoader as RepeatingLoader
    from mpispeed.engine import (
        Engine as Engine,
        add_config_arguments as add_config_arguments,
        init_distributed as init_distributed,
        initialize as initialize,
    )
    from mpispeed.inference import (
        InferenceEngine as InferenceEngine,
        init_inference as init_inference,
    )
    from mpispeed.walltime.last_safe_step import RunEnded as RunEnded
    from mpispeed.nn.block import (
        DeepSpeedTransformerConfig as DeepSpeedTransformerConfig,
        DeepSpeedTransformerLayer as DeepSpeedTransformerLayer,
    )
    from mpispeed.optim import (
        CPUAdam as CPUAdam,
        FusedAdam as FusedAdam,
        FusedLamb as FusedLamb,
    )

# Module -> its names that are public here. `tools/api_reference.py` builds the reference from this and PUBLIC_MODULES.
PUBLIC_NAMES = {
    "mpispeed.engine": ("Engine", "add_config_arguments", "init_distributed", "initialize"),
    "mpispeed.inference": ("InferenceEngine", "init_inference"),
    "mpispeed.walltime.last_safe_step": ("RunEnded",),
    "mpispeed.data.loader": ("RepeatingLoader",),
    "mpispeed.optim": ("CPUAdam", "FusedAdam", "FusedLamb"),
    "mpispeed.nn.block": ("DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
    "mpispeed.compat.on_device": ("OnDevice",),
    "mpispeed.compat.fp32": (
        "clone_tensors_for_torch_save",
        "convert_zero_checkpoint_to_fp32_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
    ),
}
# Public modules, whose public names are their `__all__`; each stands before its submodules.
PUBLIC_MODULES = (
    "aio",
    "checkpointing",
    "checkpoints",
    "comm",
    "compression",
    "curriculum",
    "data",
    "elasticity",
    "features",
    "flops",
    "inference",
    "kernels",
    "lightning",
    "moe",
    "moe.layer",
    "monitor",
    "nn",
    "nn.block",
    "nn.expert",
    "nn.layer_drop",
    "nn.routing",
    "nn.sparse",
    "nn.tensor",
    "optim",
    "pipe",
    "pipe.check",
    "pipe.schedule",
    "sequence",
    "token_stores",
    "torch_backend",
    "zero",
)

_HOME = {name: module for module, names in PUBLIC_NAMES.items() for name in names}

__all__ = [
    "__version__",
    *_HOME,
    # `import *` works without PyTorch Lightning
    *(name for name in PUBLIC_MODULES if "." not in name and name != "lightning"),
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = getattr(importlib.import_module(_HOME[name]), name)
    elif name in PUBLIC_MODULES:
        found = importlib.import_module(f"{__name__}.{name}")
        for inner in PUBLIC_MODULES:
            if inner.startswith(f"{name}."):
                importlib.import_module(f"{__name__}.{inner}")
    else:  # one of DeepSpeed's names, or an error that says what is known of it
        found = _deepspeed_modules.lookup(__name__, "", name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


_deepspeed_modules.install()
