"""Values that follow from other settings when the user leaves them open."""

from __future__ import annotations

from typing import Any

from mpispeed.config.batch import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, require_slots, resolve_batch
from mpispeed.config.dtypes import (
    AMP_KEY,
    accumulation_dtype,
    amp_masters,
    communication_dtype,
    master_dtype,
    masters_and_grads,
    masters_key,
    optimizer_dtypes,
    train_dtype,
)
from mpispeed.config.elastic_batch import elastic_triple
from mpispeed.config.root import Config


def overlaps_communication(config: Config) -> bool:
    """True if gradients are reduced during the backward pass."""
    given = config.zero_optimization.overlap_comm
    return config.zero_optimization.stage == 3 if given is None else given


def measures_wall_clock(config: Config) -> bool:
    """True if forward, backward and step are timed; counting operations needs the times too."""
    return config.wall_clock_breakdown or config.flops_profiler.enabled


def batch_sizes(config: Config, world_size: int, ranks: int | None = None) -> tuple[int, int, int]:
    """The complete batch triangle for `world_size` data-parallel ranks; `ranks` is the total, None if it is the same.

    Raises:
        ConfigError: see `resolve_batch`; with the section elasticity, see `elastic_triple`.
    """
    if config.elasticity.enabled:
        return elastic_triple(config.elasticity, world_size if ranks is None else ranks, world_size)
    if config.reduction == "invariant":
        require_slots(config.train_batch_size, config.train_micro_batch_size_per_gpu, world_size)
    return resolve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        world_size,
    )


def ranks_per_model(config: Config) -> int:
    """Ranks that share each model, by the config alone: pipeline stages x slices of layers."""
    section = config.tensor_parallel
    return (config.pipeline.stages or 1) * max(section.autotp_size, section.tensor_parallel.tp_size, 1)


def derive(config: Config, world_size: int) -> dict[str, tuple[Any, str]]:
    """Path -> (value, reason) for everything that was left open.

    Raises:
        ConfigError: the batch sizes do not fit `world_size` data-parallel ranks.
    """
    model, stage = train_dtype(config), config.zero_optimization.stage
    found: dict[str, tuple[Any, str]] = {}
    if config.communication_data_type is None:
        found["communication_data_type"] = (communication_dtype(config), f"derived: the model is {model}")
    if config.data_types.grad_accum_dtype is None:
        reason = "derived: gradients add up in fp32 unless this key says otherwise"
        if masters_and_grads(config):
            reason = f"derived: {masters_key(config)} is true"
        found["data_types.grad_accum_dtype"] = (accumulation_dtype(config), reason)
    if config.data_types.master_dtype is None:
        reason = f"derived: {masters_key(config)} is true" if masters_and_grads(config) else "default"
        if amp_masters(config):
            reason = f"derived: {AMP_KEY} is false" if config.amp.opt_level != "O3" else "derived: amp.opt_level is O3"
        found["data_types.master_dtype"] = (master_dtype(config), reason)
    if config.data_types.optimizer_states is None:
        is_bf16 = optimizer_dtypes(config) == "bf16"
        reason = "derived: bf16.bf16_optimizer_states is true" if is_bf16 else "default"
        found["data_types.optimizer_states"] = (optimizer_dtypes(config), reason)
    if config.zero_optimization.overlap_comm is None:
        reason = f"derived: zero_optimization.stage is {stage}"
        found["zero_optimization.overlap_comm"] = (overlaps_communication(config), reason)
    if measures_wall_clock(config) and not config.wall_clock_breakdown:
        found["wall_clock_breakdown"] = (True, "derived: flops_profiler.enabled is true")
    found.update(_derive_batch(config, world_size))
    return found


def _derive_batch(config: Config, world_size: int) -> dict[str, tuple[Any, str]]:
    if config.elasticity.enabled:
        reason = f"derived: elasticity, on {world_size} rank{'s' if world_size > 1 else ''}"
        sizes = batch_sizes(config, world_size, world_size * config.elasticity.model_parallel_size)
        return {key: (size, reason) for key, size in zip((TRAIN_BATCH, MICRO_BATCH, ACCUMULATION), sizes, strict=True)}
    if config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None:
        needed = f"missing: give {TRAIN_BATCH} or {MICRO_BATCH}"
        return {TRAIN_BATCH: (None, needed), MICRO_BATCH: (None, needed)}
    values = dict(zip((TRAIN_BATCH, MICRO_BATCH, ACCUMULATION), batch_sizes(config, world_size), strict=True))
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    has_batch = config.train_batch_size is not None
    reasons = {
        TRAIN_BATCH: f"derived: {MICRO_BATCH} * {ACCUMULATION} * {ranks}",
        MICRO_BATCH: f"derived: {TRAIN_BATCH} / {ACCUMULATION} / {ranks}",
        ACCUMULATION: f"derived: {TRAIN_BATCH} / {MICRO_BATCH} / {ranks}"
        if has_batch and config.train_micro_batch_size_per_gpu is not None
        else "default",
    }
    return {key: (value, reasons[key]) for key, value in values.items() if getattr(config, key) is None}
