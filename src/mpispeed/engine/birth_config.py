"""What `zero.Init` takes from a config, in plain values: the zero floor knows no config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpispeed.config.load import load
from mpispeed.engine.swapping import io_options


def resolve_init_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The dtype of fp16 or bf16 (None without them), whether `Module.apply` is replaced, and where parts rest.

    Raises:
        ConfigError: the config has mistakes.
    """
    config = load(source).config
    dtype = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
    param = config.zero_optimization.offload_param
    return {
        "dtype": dtype,
        "override_module_apply": config.zero_optimization.override_module_apply,
        "device": None if param is None else param.device,
        "nvme_path": None if param is None else param.nvme_path,
        "io_options": io_options(config.aio),
    }
