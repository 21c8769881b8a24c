"""`init_compression` and `compression_scheduler`, as DeepSpeed documents them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.compression.student import copy_layers
from mpispeed.config.compress import CompressionTraining, LayerReduction
from mpispeed.config.load import load
from mpispeed.engine.agreement import configuring
from mpispeed.engine.compression import values_of
from mpispeed.nn.compression.model import Compression, compress, compression_of
from mpispeed.nn.compression.techniques import read_groups
from mpispeed.pipe.module import PipelineModule


def init_compression(
    model: nn.Module,
    deepspeed_config: str | Path | Mapping[str, Any],
    teacher_model: nn.Module | None = None,
    mpu: Any = None,
) -> nn.Module:
    """Let a model be compressed as the section `compression_training` says; returns it.

    Layers that a technique is for stay the modules that they are, with their parameters; pruning adds masks, or scores
    that learn. Call it before `initialize`, and before the optimizer is made if the script makes it. `initialize` does
    the same by itself.

    Args:
        model: any module; of a wrapper with an attribute `module`, that module.
        deepspeed_config: the settings of the run: a dict, or the path of a JSON file.
        teacher_model: where layers of a student come from (`layer_reduction`), as for `student_initialization`.
        mpu: not needed: sliced layers know their slices.

    Collective over: all ranks, if there are several: each does the same. Ranks of a pipeline tell each other what
    layers they have.

    Raises:
        ConfigError: the settings do not fit to the model; of a pipeline, on every rank.
    """
    section = read_section(deepspeed_config)
    copy_layers(model, teacher_model, LayerReduction(**section["layer_reduction"]))
    inner, groups = _inner(model), read_groups(section)
    if isinstance(inner, PipelineModule):
        own, mesh = [name for name, _ in inner.named_modules()], inner.grid.mesh
        everywhere = {name for names in mesh["pipe"].gather_objects(own) for name in names}
        with configuring(mesh.world.comm):
            compress(inner, groups, elsewhere=everywhere.difference(own))
    else:
        compress(inner, groups)
    return model


def compression_scheduler(
    model: nn.Module, compression_config: str | Path | Mapping[str, Any] | None = None
) -> CompressionScheduler:
    """The scheduler of a model that is trained without an engine. Its `step` belongs behind that of the optimizer.

    Args:
        model: of `init_compression`.
        compression_config: the same settings; None: those that the model has.

    Raises:
        UsageError: the model is not compressed.
    """
    return CompressionScheduler(model, compression_config)


class CompressionScheduler:
    """Switches techniques on as steps are made.

    Attributes:
        training_steps: steps that were made.
    """

    def __init__(self, model: nn.Module, config: str | Path | Mapping[str, Any] | None = None) -> None:
        found = compression_of(_inner(model))
        if found is None:
            msg = "compression_scheduler: the model is not compressed; call init_compression(model, config) first"
            raise UsageError(msg)
        if config is not None and read_groups(read_section(config)) != found.groups:
            msg = "compression_scheduler: the config differs from that of init_compression; give the same one"
            raise ConfigError(msg)
        self.compression: Compression = found

    @property
    def training_steps(self) -> int:
        """Steps that were made."""
        return self.compression.progress.step

    def step(self, step_zero_check: bool = False) -> None:
        """Count a step, or, with `step_zero_check`, look only for what is active now. Local."""
        self.compression.set_step(self.training_steps + (0 if step_zero_check else 1))


def read_section(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """`compression_training` of a config, as plain values with all defaults.

    A mapping may be that section alone.

    Raises:
        ConfigError: all mistakes of the config in one message.
    """
    if isinstance(config, Mapping) and config and config.keys() <= CompressionTraining.model_fields.keys():
        config = {"compression_training": config}
    return values_of(load(config).config)


def _inner(model: nn.Module) -> nn.Module:
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model
