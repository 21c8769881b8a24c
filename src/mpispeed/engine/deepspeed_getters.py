"""DeepSpeed's getters of an engine: tables from method or property name to a value of the plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from mpispeed.base.errors import UsageError
from mpispeed.config.monitor import MonitorConfig
from mpispeed.engine.config_getters import PATHS, REFUSED, read
from mpispeed.engine.config_view import ConfigView
from mpispeed.engine.facade import EngineOptimizer
from mpispeed.sharding.gathered import empty_partition_cache
from mpispeed.store.placement import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mpispeed.config.root import Config
    from mpispeed.engine.build.parts import Optimization, Parts

METHODS: dict[str, Callable[[Parts], Any]] = {
    "train_batch_size": lambda p: p.plan.batch.train_batch_size,
    "train_micro_batch_size_per_gpu": lambda p: p.plan.batch.micro_batch_size,
    "gradient_accumulation_steps": lambda p: p.plan.batch.gradient_accumulation_steps,
    "get_batch_info": lambda p: p.plan.batch.triple,
    "gradient_clipping": lambda p: p.plan.gradient_clipping,
    "steps_per_print": lambda p: p.plan.steps_per_print,
    "zero_optimization": lambda p: p.plan.stage > 0,
    "zero_optimization_stage": lambda p: p.plan.stage,
    "zero_optimization_partition_gradients": lambda p: not p.plan.states.grad.is_replicated,
    "zero_optimization_partition_weights": lambda p: not p.plan.states.param.is_replicated,
    "zero_overlap_comm": lambda p: p.plan.is_overlapped,
    "fp16_enabled": lambda p: p.plan.config.fp16.enabled,
    "bfloat16_enabled": lambda p: p.plan.config.bf16.enabled,
    "amp_enabled": lambda p: False,
    "loss_scale": lambda p: p.plan.config.fp16.loss_scale,
    "dynamic_loss_scale": lambda p: p.scaler.dynamic,
    "initial_dynamic_scale": lambda p: 2.0**p.plan.config.fp16.initial_scale_power,
    "wall_clock_breakdown": lambda p: p.plan.config.wall_clock_breakdown,
    "memory_breakdown": lambda p: p.plan.config.memory_breakdown,
    "dump_state": lambda p: p.plan.config.dump_state,
    "sparse_gradients_enabled": lambda p: p.plan.config.sparse_gradients,
    "postscale_gradients": lambda p: not p.plan.config.prescale_gradients,
    "gradient_predivide_factor": lambda p: p.plan.config.gradient_predivide_factor,
    "elasticity_enabled": lambda p: p.plan.config.elasticity.enabled,
    "optimizer_name": lambda p: _optimizer_name(p),
    "optimizer_params": lambda p: dict(p.plan.optimizer_params),
    "scheduler_name": lambda p: p.plan.scheduler_name,
    "scheduler_params": lambda p: dict(p.plan.scheduler_params),
    "get_data_types": lambda p: (p.plan.policy.compute, p.plan.policy.accumulate),
    "get_pld_theta": lambda p: None,
    "get_type": lambda p: group_values(p.optimization, "type", None),
    "get_sequence_parallel_group": lambda p: p.mesh[()],
    "zero_cpu_offload": lambda p: p.plan.states.master.tier is Tier.HOST,
    "zero_use_cpu_optimizer": lambda p: p.plan.states.master.tier is not Tier.DEVICE,
    "zero_partial_offload": lambda p: _ratio(p),
    "zero_nvme_offload_optimizer": lambda p: p.plan.states.master.tier is Tier.NVME,
    "checkpoint_tag_validation_enabled": lambda p: p.plan.config.checkpoint.tag_validation != "Ignore",
    "checkpoint_tag_validation_fail": lambda p: p.plan.config.checkpoint.tag_validation == "Fail",
    "empty_partition_cache": lambda p: empty_partition_cache(p.module),
    "aio_config": lambda p: p.plan.config.aio.model_dump(),
}

PROPERTIES: dict[str, Callable[[Parts], Any]] = {
    "global_steps": lambda p: p.counters.global_steps,
    "global_samples": lambda p: p.counters.global_samples,
    "micro_steps": lambda p: p.counters.micro_steps,
    "skipped_steps": lambda p: p.counters.skipped_steps,
    "world_size": lambda p: p.mesh.size,
    "global_rank": lambda p: p.mesh.rank,
    # The device's number, where there is one: scripts call `batch.to(engine.local_rank)`.
    "local_rank": lambda p: p.mesh.world.local_rank if p.plan.device.index is None else p.plan.device.index,
    "dp_world_size": lambda p: p.mesh["data"].size,
    "mp_world_size": lambda p: p.mesh["model"].size,
    "data_parallel_group": lambda p: p.mesh["data"],
    "seq_data_parallel_group": lambda p: p.mesh["data"],
    "seq_dp_world_size": lambda p: p.mesh["data"].size,
    "device": lambda p: p.plan.device,
    "basic_optimizer": lambda p: _inner_optimizer(p),
    "communication_data_type": lambda p: p.plan.policy.communicate,
    "config": lambda p: ConfigView(p.plan.config),
    "monitor": lambda p: p.monitors,
    "monitor_config": lambda p: _monitor_config(p.plan.config),
    "tput_timer": lambda p: p.throughput,
}


def find(parts: Parts | None, name: str) -> tuple[bool, Any]:
    """(True, value) if `name` is a known setting, else (False, None); methods are callables without arguments."""
    if parts is not None:
        if name in PROPERTIES:
            return True, PROPERTIES[name](parts)
        if name in METHODS:
            return True, lambda: METHODS[name](parts)
        if name in PATHS:
            return True, lambda: read(parts.plan.config, PATHS[name])
        if name in REFUSED:
            return True, lambda *_, **__: _refuse(name)
        section = parts.plan.config.zero_optimization
        for key in (name.removeprefix("zero_"), name) if name.startswith("zero_") else ():
            if key in type(section).model_fields:
                return True, partial(getattr, section, key)
    return False, None


def _refuse(name: str) -> NoReturn:
    msg = f"engine.{name}(): {REFUSED[name]} not available; leave the call out"
    raise UsageError(msg)


def _inner_optimizer(parts: Parts) -> torch.optim.Optimizer | None:
    """The client's optimizer, or what shows groups and states of that of the config."""
    basic = parts.optimization.basic if parts.optimization else None
    return basic.optimizer if isinstance(basic, EngineOptimizer) else basic


def _optimizer_name(parts: Parts) -> str | None:
    """Class name of a client's optimizer, else the config's optimizer type."""
    basic = parts.optimization.basic if parts.optimization else None
    is_given = basic is not None and not isinstance(basic, EngineOptimizer)
    return type(basic).__name__ if is_given else parts.plan.optimizer_name


def _ratio(parts: Parts) -> float:
    """Fraction of the trained elements whose masters and optimizer states are offloaded; 1 without offloading."""
    offload = parts.plan.config.zero_optimization.offload_optimizer
    return 1.0 if offload is None else offload.ratio


def _monitor_config(config: Config) -> MonitorConfig:
    return MonitorConfig(config.tensorboard, config.csv_monitor, config.wandb, config.comet)


def group_values(optimization: Optimization | None, key: str, default: Any) -> list[Any]:
    """`key` of every parameter group."""
    return [group.get(key, default) for group in optimization.groups] if optimization else []


def momenta(optimization: Optimization | None) -> list[Any]:
    """`momentum` of groups that have it and no betas, else `betas`."""
    if optimization is None:
        return []
    return [group["betas"] if "betas" in group else group.get("momentum") for group in optimization.groups]
