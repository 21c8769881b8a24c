"""DeepSpeed's plain getters of an engine: one table, from a name to how its value is read, its type and what it is.

`install` puts them on the class of engines. `getters.pyi` has the same names for type checkers;
`tools/getter_stub.py` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from mpispeed.base.slot_scope import refuse_rank
from mpispeed.config.derive import measures_wall_clock
from mpispeed.config.monitor import MonitorConfig
from mpispeed.config.zero import ZeroOptimization
from mpispeed.engine.config_view import ConfigView
from mpispeed.engine.facade import EngineOptimizer
from mpispeed.sharding.gathered import empty_partition_cache
from mpispeed.store.placement import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mpispeed.config.root import Config
    from mpispeed.engine.build.parts import Parts


@dataclass(frozen=True, slots=True)
class Getter:
    """One name.

    Attributes:
        read: finds the value.
        returns: its type, as in an annotation.
        doc: a line on what it is.
    """

    read: Callable[[Parts], Any]
    returns: str
    doc: str


HOMES = {
    "Bus": "mpispeed.base.events",
    "Comm": "mpispeed.mesh.comm",
    "ConfigView": "mpispeed.engine.config_view",
    "Counters": "mpispeed.engine.backward",
    "Mesh": "mpispeed.mesh.mesh",
    "MonitorConfig": "mpispeed.config.monitor",
    "Monitors": "mpispeed.monitor.by_hand",
    "Plan": "mpispeed.plan.plan",
    "Throughput": "mpispeed.monitor.by_hand",
}
"""Types that the tables name -> their modules."""

METHODS: dict[str, Getter] = {
    # -- batches and steps
    "train_batch_size": Getter(lambda p: p.plan.batch.train_batch_size, "int", "Samples of a global batch."),
    "train_micro_batch_size_per_gpu": Getter(
        lambda p: p.plan.batch.micro_batch_size, "int", "Samples of a micro-batch of one rank."
    ),
    "gradient_accumulation_steps": Getter(
        lambda p: p.plan.batch.gradient_accumulation_steps, "int", "Micro-batches of a global batch on each rank."
    ),
    "get_batch_info": Getter(
        lambda p: p.plan.batch.triple,
        "tuple[int, int, int]",
        "Samples of a global batch, samples of a micro-batch, micro-batches of a global batch.",
    ),
    "was_step_applied": Getter(
        lambda p: p.updates.was_applied, "bool", "True if the last `step()` changed parameters."
    ),
    "get_global_grad_norm": Getter(
        lambda p: p.updates.norm,
        "float | None",
        "L2 norm of the gradients at the last applied step, before clipping, unscaled; None before the first.",
    ),
    "get_lr": Getter(
        lambda p: p.updates.rates(),
        "list[float]",
        "Learning rate of each parameter group; empty without an optimizer.",
    ),
    "get_mom": Getter(lambda p: momenta(p), "list[Any]", "Momentum or betas of each parameter group."),
    "get_type": Getter(lambda p: _types(p), "list[Any]", 'The entry "type" of each parameter group, or None.'),
    "gradient_clipping": Getter(
        lambda p: p.plan.gradient_clipping, "float", "Norm above which gradients are clipped; 0: none."
    ),
    "steps_per_print": Getter(lambda p: p.plan.steps_per_print, "int | None", "Steps between lines of progress."),
    "optimizer_name": Getter(
        lambda p: _optimizer_name(p),
        "str | None",
        "Class of an optimizer given in code, else the type that the config names.",
    ),
    "optimizer_params": Getter(
        lambda p: dict(p.plan.optimizer_params), "dict[str, Any]", "The config's parameters of the optimizer."
    ),
    "scheduler_name": Getter(lambda p: p.plan.scheduler_name, "str | None", "The scheduler that the config names."),
    "scheduler_params": Getter(
        lambda p: dict(p.plan.scheduler_params), "dict[str, Any]", "The config's parameters of the scheduler."
    ),
    # -- ZeRO
    "zero_optimization": Getter(lambda p: p.plan.stage > 0, "bool", "True from stage 1 on."),
    "zero_optimization_stage": Getter(lambda p: p.plan.stage, "int", "The stage of ZeRO."),
    "zero_optimization_partition_gradients": Getter(
        lambda p: not p.plan.states.grad.is_replicated, "bool", "True if gradients are sharded over ranks."
    ),
    "zero_optimization_partition_weights": Getter(
        lambda p: not p.plan.states.param.is_replicated, "bool", "True if parameters are sharded over ranks."
    ),
    "zero_overlap_comm": Getter(
        lambda p: p.plan.is_overlapped, "bool", "True if communication runs beside computation."
    ),
    "zero_cpu_offload": Getter(
        lambda p: p.plan.states.master.tier is Tier.HOST,
        "bool",
        "True if a device's optimizer states are in host memory.",
    ),
    "zero_use_cpu_optimizer": Getter(
        lambda p: p.plan.states.master.tier is not Tier.DEVICE, "bool", "True if the host updates."
    ),
    "zero_partial_offload": Getter(
        lambda p: _ratio(p),
        "float",
        "Fraction of the trained elements whose optimizer states are offloaded; 1 without offloading.",
    ),
    "zero_nvme_offload_optimizer": Getter(
        lambda p: p.plan.states.master.tier is Tier.NVME, "bool", "True if optimizer states are in swap files."
    ),
    "empty_partition_cache": Getter(
        lambda p: empty_partition_cache(p.module), "None", "Reshard parameters that are gathered ahead of their use."
    ),
    # -- precision
    "fp16_enabled": Getter(lambda p: p.plan.config.fp16.enabled, "bool", "True if the model computes in fp16."),
    "bfloat16_enabled": Getter(lambda p: p.plan.config.bf16.enabled, "bool", "True if the model computes in bf16."),
    "amp_enabled": Getter(lambda p: p.plan.config.amp.enabled, "bool", "True if the section amp is on."),
    "torch_autocast_enabled": Getter(
        lambda p: p.plan.config.torch_autocast.enabled, "bool", "True if the section torch_autocast is on."
    ),
    "torch_autocast_dtype": Getter(
        lambda p: p.plan.mixed.autocast, "torch.dtype | None", "Dtype of autocast around forward passes."
    ),
    "torch_autocast_lower_precision_safe_modules": Getter(
        lambda p: list(p.plan.mixed.lowers), "list[str]", "Classes that are summed in the dtype of autocast."
    ),
    "loss_scale": Getter(
        lambda p: p.plan.config.fp16.loss_scale, "float", "The config's static loss scale; 0: dynamic."
    ),
    "dynamic_loss_scale": Getter(lambda p: p.scaler.dynamic, "bool", "True if the loss scale follows overflows."),
    "initial_dynamic_scale": Getter(
        lambda p: 2.0**p.plan.config.fp16.initial_scale_power, "float", "The first dynamic loss scale."
    ),
    "get_data_types": Getter(
        lambda p: (p.plan.policy.compute, p.plan.policy.accumulate),
        "tuple[torch.dtype, torch.dtype]",
        "Dtypes of the model and of accumulated gradients.",
    ),
    "postscale_gradients": Getter(
        lambda p: not p.plan.config.prescale_gradients,
        "bool",
        "True if gradients are divided after their sum over ranks.",
    ),
    "gradient_predivide_factor": Getter(
        lambda p: p.plan.config.gradient_predivide_factor, "float", "Divisor of gradients before their sum over ranks."
    ),
    "sparse_gradients_enabled": Getter(
        lambda p: p.plan.config.sparse_gradients, "bool", "True if only touched rows of embeddings are sent."
    ),
    # -- other settings
    "wall_clock_breakdown": Getter(
        lambda p: measures_wall_clock(p.plan.config), "bool", "True if times of the passes are logged."
    ),
    "memory_breakdown": Getter(lambda p: p.plan.config.memory_breakdown, "bool", "True if memory is logged."),
    "dump_state": Getter(lambda p: p.plan.config.dump_state, "bool", "True if the settings are logged at the start."),
    "elasticity_enabled": Getter(
        lambda p: p.plan.config.elasticity.enabled, "bool", "True if the number of ranks may change."
    ),
    "get_pld_theta": Getter(
        lambda p: None if (drop := p.features.published.get("progressive_layer_drop")) is None else drop.get_theta(),
        "float | None",
        "Theta of progressive layer drop now; None without it.",
    ),
    "random_ltd_enabled": Getter(
        lambda p: p.plan.config.data_efficiency.routes_tokens,
        "bool",
        "True if random-LTD is enabled at all its levels.",
    ),
    "get_sequence_parallel_group": Getter(
        lambda p: p.mesh["sequence"], "Comm", "The ranks that share each sequence of this rank; itself if none do."
    ),
    "checkpoint_tag_validation_enabled": Getter(
        lambda p: p.plan.config.checkpoint.tag_validation != "Ignore",
        "bool",
        "True if tags are compared between ranks.",
    ),
    "checkpoint_tag_validation_fail": Getter(
        lambda p: p.plan.config.checkpoint.tag_validation == "Fail", "bool", "True if tags that differ are an error."
    ),
    "aio_config": Getter(
        lambda p: p.plan.config.aio.model_dump(), "dict[str, Any]", "The section `aio` of the config."
    ),
}
"""Methods without arguments."""

COMPONENTS: dict[str, Getter] = {
    "optimizer": Getter(
        lambda p: p.optimization.facade if p.optimization else None,
        "torch.optim.Optimizer | None",
        "The optimizer that `initialize` returned, or None.",
    ),
    "is_compiled": Getter(lambda p: p.is_compiled, "bool", "True once `compile` was called."),
    "training_dataloader": Getter(
        lambda p: p.features.published.get("training_dataloader"),
        "Any",
        "The loader made from `training_data`, or None.",
    ),
    "must_stop": Getter(
        lambda p: bool(getattr(_run_end(p), "must_stop", False)),
        "bool",
        "True once the run was saved because it has to end; for loops where `walltime.ends_program` is false.",
    ),
    "resumed_from": Getter(
        lambda p: getattr(_run_end(p), "resumed_from", None),
        "str | None",
        "The checkpoint from which this run resumed by itself (its client state is in `client_state`), or None.",
    ),
}
"""Values that a script cannot set."""

OWN: dict[str, Getter] = {
    "plan": Getter(lambda p: p.plan, "Plan", "The resolved settings of the run."),
    "mesh": Getter(lambda p: p.mesh, "Mesh", "The ranks as named axes."),
    "bus": Getter(lambda p: p.bus, "Bus", "The event bus, to which observers subscribe."),
    "counters": Getter(lambda p: p.counters, "Counters", "Counters of steps, samples and updates."),
    "slots": Getter(
        lambda p: _own_slots(p),
        "list[int] | None",
        "The micro-batches of a global batch that this rank computes in an update, in order, by their numbers among "
        'all, with reduction "invariant"; else None.',
    ),
}
"""Values that DeepSpeed's engines do not have; a script cannot set them, and an attribute of the model comes first."""

PROPERTIES: dict[str, Getter] = {
    "global_steps": Getter(lambda p: p.counters.global_steps, "int", "Steps of the run."),
    "global_samples": Getter(lambda p: p.counters.global_samples, "int", "Samples of the run, of all ranks."),
    "micro_steps": Getter(lambda p: p.counters.micro_steps, "int", "Micro-batches of the run, of one rank."),
    "skipped_steps": Getter(lambda p: p.counters.skipped_steps, "int", "Steps without an update, after overflows."),
    "world_size": Getter(lambda p: p.mesh.size, "int", "Number of ranks."),
    "global_rank": Getter(lambda p: _asked("engine.global_rank", p.mesh.rank), "int", "This rank."),
    # Scripts call `batch.to(engine.local_rank)`.
    "local_rank": Getter(
        lambda p: p.mesh.world.local_rank if p.plan.device.index is None else p.plan.device.index,
        "int",
        "The number of this rank's device; without devices this rank's number on its node.",
    ),
    "dp_world_size": Getter(lambda p: p.mesh["batch"].size, "int", "Ranks, or groups of them, with own samples."),
    "mp_world_size": Getter(lambda p: p.mesh["model"].size, "int", "Ranks over which layers are sliced."),
    "sequence_parallel_size": Getter(lambda p: p.mesh["sequence"].size, "int", "Ranks that share each sequence."),
    "data_parallel_group": Getter(
        lambda p: p.mesh["batch"], "Comm", "Ranks with the same part of the model and of the sequence, and own samples."
    ),
    "seq_data_parallel_group": Getter(
        lambda p: p.mesh["data"], "Comm", "Ranks with the same part of the model; ZeRO shards over them."
    ),
    "seq_dp_world_size": Getter(lambda p: p.mesh["data"].size, "int", "Ranks with the same part of the model."),
    "device": Getter(lambda p: p.plan.device, "torch.device", "Where the model computes."),
    "basic_optimizer": Getter(
        lambda p: _inner_optimizer(p),
        "torch.optim.Optimizer | None",
        "The optimizer given in code, or what shows groups and states of that of the config.",
    ),
    "communication_data_type": Getter(
        lambda p: p.plan.policy.communicate, "torch.dtype", "Dtype of gradients on their way."
    ),
    "config": Getter(
        lambda p: ConfigView(p.plan.config), "ConfigView", "All settings with their defaults, as a mapping."
    ),
    "monitor_config": Getter(
        lambda p: MonitorConfig.of(p.plan.config), "MonitorConfig", "The sections of all monitors."
    ),
    "monitor": Getter(
        lambda p: p.features.published["monitor"],
        "Monitors",
        "The monitors, for points of series of the script's own.",
    ),
    "tput_timer": Getter(lambda p: p.features.published["tput_timer"], "Throughput", "Average throughput of the run."),
}
"""Values that a script may set on an engine; it reads what it has set then, and nothing else changes."""


# -- settings that are repeated as they are ------------------------------------------------------------------------

_FLOPS = ("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file")
_TUNING = ("enabled", "start_profile_step", "end_profile_step", "metric", "metric_path", "model_info_path")
_EIGENVALUE = (
    "enabled", "verbose", "max_iter", "tol", "stability", "gas_boundary_resolution", "layer_name", "layer_num",
)  # fmt: skip

PATHS: dict[str, str] = {
    "dataloader_drop_last": "dataloader_drop_last",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "graph_harvesting": "graph_harvesting",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_params": "progressive_layer_drop",
    "pld_theta": "progressive_layer_drop.theta",
    "pld_gamma": "progressive_layer_drop.gamma",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_params_legacy": "curriculum_learning",
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "curriculum_learning_config": "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_efficiency_config": "data_efficiency",
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "data_sampling_config": "data_efficiency.data_sampling",
    "random_ltd_config": "data_efficiency.data_routing.random_ltd",
    "quantize_training": "quantize_training",
    "amp_params": "amp",
    **{f"flops_profiler_{key}": f"flops_profiler.{key}" for key in _FLOPS},
    **{f"autotuning_{key}": f"autotuning.{key}" for key in _TUNING},
    "autotuning_profile_model_info": "autotuning.model_info.profile",
    **{f"eigenvalue_{key}": f"eigenvalue.{key}" for key in _EIGENVALUE},
}
"""Method -> setting; a section is returned as a plain dict. A section that is absent: False for a switch, else None."""

ZERO: dict[str, str] = {key if key.startswith("zero_") else f"zero_{key}": key for key in ZeroOptimization.model_fields}
"""Method -> key of the section `zero_optimization`, whose value is returned as it is."""


def all_methods() -> dict[str, Getter]:
    """All methods without arguments, of all tables."""
    found = {name: Getter(_of_zero(key), "Any", f"`zero_optimization.{key}`.") for name, key in ZERO.items()}
    found |= {name: Getter(_of_config(path), "Any", f"The setting `{path}`.") for name, path in PATHS.items()}
    return {**found, **METHODS}


def _of_zero(key: str) -> Callable[[Parts], Any]:
    return lambda parts: getattr(parts.plan.config.zero_optimization, key)


def _of_config(path: str) -> Callable[[Parts], Any]:
    return lambda parts: _at(parts.plan.config, path)


def install(cls: Any) -> None:
    """Give a class of engines all names of the tables that it does not define itself."""
    for name, getter in all_methods().items():
        if name not in vars(cls):
            setattr(cls, name, _method(cls, name, getter))
    for name, getter in COMPONENTS.items():
        setattr(cls, name, property(_method(cls, name, getter), doc=getter.doc))
    for name, getter in OWN.items():
        setattr(cls, name, Yielding(name, getter))
    for name, getter in PROPERTIES.items():
        setattr(cls, name, Value(getter))


class Value:
    """A name that is read like an attribute, and may be set on an engine."""

    def __init__(self, getter: Getter) -> None:
        self._read, self.__doc__ = getter.read, getter.doc

    def __get__(self, engine: Any, owner: type) -> Any:
        return self if engine is None else self._read(engine.mpispeed.parts)


class Yielding(Value):
    """A name that is read like an attribute; one of the model with that name comes first, and nobody may set it."""

    def __init__(self, name: str, getter: Getter) -> None:
        super().__init__(getter)
        self._name = name

    def __get__(self, engine: Any, owner: type) -> Any:
        if engine is not None and hasattr(engine.module, self._name):
            return getattr(engine.module, self._name)
        return super().__get__(engine, owner)

    def __set__(self, engine: Any, value: Any) -> None:
        msg = f"engine.{self._name} cannot be set"
        raise AttributeError(msg)


def _method(cls: type, name: str, getter: Getter) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return getter.read(self.mpispeed.parts)

    return _named(method, cls, name, getter.doc, getter.returns)


def _named(method: Any, cls: type, name: str, doc: str, returns: str) -> Any:
    """`method` with what `help` shows."""
    method.__name__, method.__qualname__, method.__module__ = name, f"{cls.__qualname__}.{name}", cls.__module__
    method.__doc__, method.__annotations__ = doc, {"return": returns}
    return method


# -- reading ---------------------------------------------------------------------------------------------------------


def _at(config: Config, path: str) -> Any:
    """The setting at a path."""
    steps = path.split(".")
    found: Any = reduce(lambda section, key: None if section is None else getattr(section, key), steps, config)
    if found is None and path.endswith(".profile"):
        return False
    return found.model_dump() if hasattr(found, "model_dump") else found


def _asked(question: str, rank: int) -> int:
    refuse_rank(question)
    return rank


def _own_slots(parts: Parts) -> list[int] | None:
    slots, rank = parts.plan.slots, parts.mesh.index("batch")
    return None if slots is None else [slots.slot(rank, micro_step) for micro_step in range(slots.per_rank)]


def _run_end(parts: Parts) -> Any:
    return parts.features.published.get("run_end")


def _inner_optimizer(parts: Parts) -> torch.optim.Optimizer | None:
    basic = parts.optimization.basic if parts.optimization else None
    return basic.optimizer if isinstance(basic, EngineOptimizer) else basic


def _optimizer_name(parts: Parts) -> str | None:
    basic = parts.optimization.basic if parts.optimization else None
    is_given = basic is not None and not isinstance(basic, EngineOptimizer)
    return type(basic).__name__ if is_given else parts.plan.optimizer_name


def _ratio(parts: Parts) -> float:
    offload = parts.plan.config.zero_optimization.offload_optimizer
    return 1.0 if offload is None else offload.ratio


def _types(parts: Parts) -> list[Any]:
    return [group.get("type") for group in parts.optimization.groups] if parts.optimization else []


def momenta(parts: Parts) -> list[Any]:
    """`momentum` of groups that have it and no betas, else `betas`."""
    parts.updates.settle()
    groups = parts.optimization.groups if parts.optimization else []
    return [group["betas"] if "betas" in group else group.get("momentum") for group in groups]
