"""`zero.Init` with DeepSpeed's arguments, which become plain settings of the sharded init."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from mpispeed.base import log as logs
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.config.load import load
from mpispeed.engine.build.nvme_tiers import io_options
from mpispeed.mesh.comm import Comm
from mpispeed.plan.mixed import mixed_precision
from mpispeed.sharding import init
from mpispeed.sharding.init import InitSettings

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = (None, "none", "cpu", "nvme")


class Init(init.Init):
    """Context in which modules are sharded over the ranks as soon as their constructors have returned.

    Each constructor, those of parent classes included, sees its own parameters in full. Afterwards they are cast,
    take the values of the first rank, and each rank keeps its shard. Inside the context, parameters of finished modules
    can be read and changed in place: they are gathered for that, and sharded again with the first rank's values.
    `initialize` takes the shards over, at any stage; no more than one unit is full on the way.

    Contexts can be nested; the innermost one counts. Ranks have to construct the same modules in the same order.

    Collective over: the group, whenever a module is constructed or a finished parameter is read.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Comm | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: str | Path | Mapping[str, Any] | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Comm | None = None,
        param_swapper: Any = None,
    ) -> None:
        """Prepare the context; starts MPI if that was not done.

        Args:
            module: its parameters are sharded at once; the context need not be entered for that.
            data_parallel_group: ranks over which parameters are sharded; all ranks by default.
            mem_efficient_linear: accepted; no module keeps its weights for backward in any case.
            remote_device: tier of shards until `initialize`. "cpu" or "none": memory. "nvme": swap files below
                `zero_optimization.offload_param.nvme_path` of the config. None: as `offload_param.device` of the
                config says; memory without one.
            pin_memory: no effect, with a warning: shards are copied once, by `initialize`.
            config_dict_or_path: as for `initialize`; gives the dtype and `override_module_apply`.
            config: the older name of `config_dict_or_path`.
            enabled: False: the context has no effect.
            dtype: dtype of floating-point parameters except fp64; by default that of the config, and without a config
                (or with neither fp16 nor bf16 in it) each keeps its own.
            mpu: its `get_data_parallel_group()` is used if no group is given.
            zero_param_parallel_group: no effect, with a warning: the engine's config decides about second copies.
            zero_quantized_weights: as `zero_param_parallel_group`, about codes.
            zero_quantized_nontrainable_weights: as `zero_quantized_weights`.
            sequence_data_parallel_group: the older name of `data_parallel_group`.
            param_swapper: must be None.

        Collective over: the group, if `module` is given or shards are in swap files.

        Raises:
            ConfigError: (a ValueError) two groups or two configs are given, the config has mistakes, or the folder for
                swap files is not given or cannot be used on some rank.
            UsageError: an argument has a wrong type or is not supported.
        """
        if not enabled:
            super().__init__(enabled=False)
            return
        _refuse_unavailable(remote_device, param_swapper)
        _require_own_rank(type(self))
        group_of_copies = zero_param_parallel_group is not None
        _tell_ineffective(pin_memory, group_of_copies, zero_quantized_weights, zero_quantized_nontrainable_weights)
        settings = _settings(config_dict_or_path, config)
        dtype = _checked(dtype if dtype is not None else settings.dtype)
        device = remote_device if remote_device is not None else settings.device
        group = _group(data_parallel_group, sequence_data_parallel_group, mpu)
        super().__init__(module, group, dataclasses.replace(settings, dtype=dtype, device=device))

    def get_partition_rank(self) -> int:
        """This rank's number in the group over which parameters are sharded.

        Raises:
            UsageError: the context is not enabled.
        """
        return self._comm("get_partition_rank").rank

    def get_dp_process_group(self) -> Comm:
        """The group over which parameters are sharded.

        Raises:
            UsageError: the context is not enabled.
        """
        return self._comm("get_dp_process_group")

    def _comm(self, reader: str) -> Comm:
        if not self.enabled:
            msg = f"zero.Init(enabled=False).{reader}(): nothing is sharded, so there is no group; leave enabled out"
            raise UsageError(msg)
        return self.sharded_init.comm


class MiCS_Init(Init):  # DeepSpeed's name
    """`Init` for a config with `zero_optimization.mics_shard_size`.

    Until `initialize` parameters are sharded over all ranks of the group, then over those of a MiCS group.

    Collective over: the group, whenever a module is constructed or a finished parameter is read.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Comm | None = None,
        sequence_data_parallel_group: Comm | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: str | Path | Mapping[str, Any] | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        """As `Init`, whose arguments these are.

        Collective over: the group, if `module` is given or shards are in swap files.

        Raises:
            ConfigError: (a ValueError) as for `Init`; or there is no config, or no `mics_shard_size` in it.
            UsageError: as for `Init`.
        """
        if enabled:
            _require_mics(config_dict_or_path if config_dict_or_path is not None else config)
        super().__init__(
            module,
            data_parallel_group,
            mem_efficient_linear,
            remote_device,
            pin_memory,
            config_dict_or_path,
            config,
            enabled,
            dtype,
            mpu,
            sequence_data_parallel_group=sequence_data_parallel_group,
        )


def _require_mics(source: Any) -> None:
    if source is None or load(source).config.zero_optimization.mics_shard_size <= 0:
        msg = (
            "zero.MiCS_Init: needs a config (config_dict_or_path) with zero_optimization.mics_shard_size above 0, the "
            "ranks that share one copy of the model; set it, or use zero.Init"
        )
        raise ConfigError(msg)


def _require_own_rank(cls: type) -> None:
    if getattr(cls, "get_partition_rank") is not Init.get_partition_rank:  # noqa: B009 # of any subclass
        msg = (
            f"zero.Init: {cls.__name__}.get_partition_rank() is overridden, and shards follow the ranks of the group; "
            "pass data_parallel_group with the ranks in the order that is wanted"
        )
        raise UsageError(msg)


_DECIDED_LATER = (
    "pin_memory",
    "zero_param_parallel_group",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
)


def _tell_ineffective(*is_given: bool) -> None:
    names = [name for name, is_here in zip(_DECIDED_LATER, is_given, strict=True) if is_here]
    if names:
        text = (
            f"zero.Init: {', '.join(names)} without effect; between zero.Init and initialize shards are plain, and the "
            "config given to initialize decides the rest"
        )
        logs.once(log, logging.WARNING, text)


def _refuse_unavailable(device: Any, swapper: Any) -> None:
    if device not in DEVICES or swapper is not None:
        what = "param_swapper" if swapper is not None else f"remote_device={device!r}"
        msg = f'zero.Init: {what} is not available; remote_device can be None, "cpu" or "nvme"'
        raise UsageError(msg)


def _checked(dtype: Any) -> torch.dtype | None:
    if dtype is not None and dtype not in DTYPES:
        msg = f"zero.Init: dtype {dtype!r} is not possible; choose torch.float32, torch.float16 or torch.bfloat16"
        raise UsageError(msg)
    return cast("torch.dtype | None", dtype)


def _settings(source: Any, older: Any) -> InitSettings:
    if older is not None:
        if source is not None:
            msg = "zero.Init: config_dict_or_path and its older name config are both given; keep the first"
            raise ConfigError(msg)
        logs.once(log, logging.WARNING, "zero.Init: config is the older name of config_dict_or_path")
        source = older
    return InitSettings() if source is None else settings_of(source)


def settings_of(source: str | Path | Mapping[str, Any]) -> InitSettings:
    """Settings of the sharded init from a config: dtype (None: that of the parameter), `apply`, and tier of shards.

    Raises:
        ConfigError: the config has mistakes.
    """
    config = load(source).config
    mixed = mixed_precision(config)
    dtype = None if mixed.keeps_norms else mixed.model  # the engine casts what is not a norm
    param = config.zero_optimization.offload_param
    return InitSettings(
        dtype=dtype,
        override_module_apply=config.zero_optimization.override_module_apply,
        device=None if param is None else param.device,
        nvme_path=None if param is None else param.nvme_path,
        io_options=io_options(config.aio),
    )


def _group(group: Any, older: Any, mpu: Any) -> Comm | None:
    if group is not None and older is not None:
        msg = "zero.Init: data_parallel_group and its older name sequence_data_parallel_group are both given"
        raise ConfigError(msg)
    group = older if group is None else group
    if group is None and mpu is not None:
        group = mpu.get_data_parallel_group()
    if group is None:
        return None
    if not isinstance(group, Comm):
        msg = f"zero.Init: the group of ranks is a {type(group).__name__}; make one with mpispeed.comm.new_group(ranks)"
        raise UsageError(msg)
    return group
