"""Conflicts between settings that are legal one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from mpispeed.base.errors import ElasticityConfigError, UnimplementedOption
from mpispeed.base.unused_params import find_ineffective as unused
from mpispeed.config import optimizer as known
from mpispeed.config.batch import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from mpispeed.config.dtypes import master_dtype, train_dtype
from mpispeed.config.ineffective import find_ineffective
from mpispeed.config.invariant import check_invariant
from mpispeed.config.keywords import check_optimizer, check_schedule
from mpispeed.config.mixed import cast_dtype, check_mixed
from mpispeed.config.offload import OffloadParam
from mpispeed.config.problems import Problem, show
from mpispeed.config.root import Config
from mpispeed.config.zero import ZeroOptimization

_ZERO = "zero_optimization"
_SAMPLING = "data_efficiency.data_sampling"
_SAMPLED = f"{_SAMPLING}.curriculum_learning"


def find_conflicts(config: Config, autos: Collection[str] = ()) -> list[Problem]:
    """All conflicts, in the order of the file format's sections; `autos` are the paths that were "auto"."""
    found = [problem for check in _CHECKS for problem in check(config)]
    if config.optimizer is not None:
        found += check_optimizer(config.optimizer, _below("optimizer.params.", autos))
    if config.scheduler is not None:
        found += check_schedule(config.scheduler, _below("scheduler.params.", autos))
    return found


def _below(prefix: str, paths: Collection[str]) -> list[str]:
    return [path.removeprefix(prefix) for path in sorted(paths) if path.startswith(prefix)]


def _check_batch(config: Config) -> Iterator[Problem]:
    """Faults of batch sizes on any number of ranks; the rest is for `resolve_batch`."""
    tb, mb, gas = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    factors = [(key, value) for key, value in ((MICRO_BATCH, mb), (ACCUMULATION, gas)) if value is not None]
    unit = math.prod(value for _, value in factors)
    if tb is not None and factors and tb % unit and not config.elasticity.enabled:
        named = " * ".join(f"{key} {value}" for key, value in factors)
        near = " or ".join(str(n) for n in (tb // unit * unit, (tb // unit + 1) * unit) if n)
        what = f"{tb} is no multiple of {named}{f' = {unit}' if len(factors) > 1 else ''}"
        yield Problem(TRAIN_BATCH, what, f"set it to {near}, or leave one of the keys out")


def _check_precision(config: Config) -> Iterator[Problem]:
    fp16, bf16 = config.fp16, config.bf16
    if fp16.enabled and bf16.enabled:
        yield Problem("bf16.enabled", "fp16.enabled and bf16.enabled are both true", "choose one of them")
    yield from check_mixed(config)
    yield from _check_accumulation(config)
    yield from _check_state_dtypes(config)


def _check_state_dtypes(config: Config) -> Iterator[Problem]:
    """Masters and states of the optimizer that do not rest in fp32."""
    types, stage = config.data_types, config.zero_optimization.stage
    model = train_dtype(config)
    for name, section in (("fp16", config.fp16), ("bf16", config.bf16)):
        path = f"{name}.{name}_master_weights_and_grads"
        if not getattr(section, path.partition(".")[2]):
            continue
        if not section.enabled:
            yield Problem(path, f"needs {name}.enabled", "set that to true, or this to false")
        elif not stage:
            what = f"needs {_ZERO}.stage 1 to 3, found 0"
            yield Problem(path, what, f"use data_types.master_dtype {show(name)} instead, or stage 1")
        elif types.master_dtype not in (None, name):
            yield Problem("data_types.master_dtype", f"{show(types.master_dtype)}, and {path} is true", "choose one")
    if config.bf16.bf16_optimizer_states and not config.bf16.bf16_master_weights_and_grads:
        what = "needs bf16.bf16_master_weights_and_grads"
        cure = 'set that to true, or use data_types.optimizer_states "bf16" instead'
        yield Problem("bf16.bf16_optimizer_states", what, cure)
    if types.master_dtype not in (None, "fp32", model):
        what = f"{show(types.master_dtype)} masters of a {model} model"
        cure = f"use fp32, or set {types.master_dtype}.enabled to true"
        yield Problem("data_types.master_dtype", what, cure)
    if types.master_rounding != "nearest" and master_dtype(config) == "fp32":
        what = f"{show(types.master_rounding)}, and masters are fp32, which no update rounds"
        yield Problem("data_types.master_rounding", what, "set data_types.master_dtype, or leave the key out")


def _check_trace(config: Config) -> Iterator[Problem]:
    trace = config.trace
    if trace.end_step < trace.start_step:
        what = f"the last traced step, {trace.end_step}, comes before the first, {trace.start_step}"
        yield Problem("trace.end_step", what, "make it the same or larger")


def _check_accumulation(config: Config) -> Iterator[Problem]:
    dtype, path = config.data_types.grad_accum_dtype, "data_types.grad_accum_dtype"
    if dtype is None:
        return
    if dtype == "int8":
        yield Problem(path, "gradients cannot be accumulated in int8", "use fp32 or leave the key out")
    if config.zero_optimization.stage or dtype == "int8":
        return
    model = cast_dtype(config) or "fp32"
    is_staged = (config.pipeline.stages or 1) > 1
    allowed = {"fp32": ("fp32",), "fp16": ("fp16",), "bf16": ("fp32", "bf16") if is_staged else ("fp32",)}[model]
    if dtype not in allowed:
        what = f"a {model} model without ZeRO accumulates in {' or '.join(allowed)}, found {show(dtype)}"
        yield Problem(path, what, f"leave the key out, or set {_ZERO}.stage to 1", UnimplementedOption)


def _check_zero(config: Config) -> Iterator[Problem]:
    zero = config.zero_optimization
    if config.sparse_gradients and zero.stage:
        what = f"rows of embedding gradients cannot be cut over ranks, as {_ZERO}.stage {zero.stage} does"
        yield Problem("sparse_gradients", what, f"set it to false, or {_ZERO}.stage to 0")
    cure = f"set {_ZERO}.reduce_scatter to false, or use stage 1"
    if zero.stage >= 2 and zero.reduce_scatter:
        with_what = f"{_ZERO}.stage {zero.stage} with reduce_scatter"
        if config.prescale_gradients:
            yield Problem("prescale_gradients", f"true does not work with {with_what}", cure)
        if config.gradient_predivide_factor != 1:
            value = config.gradient_predivide_factor
            yield Problem("gradient_predivide_factor", f"{value} does not work with {with_what}", cure)
    if zero.zero_quantized_gradients and not zero.reduce_scatter:
        what = "quantized gradients need reduce_scatter, which is false"
        yield Problem(f"{_ZERO}.zero_quantized_gradients", what, f"set {_ZERO}.reduce_scatter to true")
    if zero.legacy_stage1:
        yield Problem(f"{_ZERO}.legacy_stage1", "the old stage 1 was removed", "remove the key")
    yield from _check_offload(config)


def _check_offload(config: Config) -> Iterator[Problem]:
    zero = config.zero_optimization
    optimizer = zero.offload_optimizer
    if optimizer is not None and optimizer.device != "none" and not zero.stage:
        what = f"{show(optimizer.device)} needs {_ZERO}.stage 1 to 3, found 0"
        yield Problem(f"{_ZERO}.offload_optimizer.device", what, "set stage to 1, or remove offload_optimizer")
    is_in_files = optimizer is not None and optimizer.device == "nvme"
    if not zero.sub_group_size and (zero.stage == 3 or is_in_files):
        what = "an update needs at least 1 element at once, found 0"
        yield Problem(f"{_ZERO}.sub_group_size", what, "leave the key out")
    if not zero.allgather_bucket_size and zero.stage:
        what = "a message needs at least 1 element, found 0"
        yield Problem(f"{_ZERO}.allgather_bucket_size", what, "leave the key out")
    if optimizer is not None and optimizer.ratio < 1 and zero.stage != 3:
        what = f"{optimizer.ratio} needs {_ZERO}.stage 3, found {zero.stage}"
        yield Problem(f"{_ZERO}.offload_optimizer.ratio", what, "set it to 1")
    yield from _check_files(config)


def _check_files(config: Config) -> Iterator[Problem]:
    """States in files (device nvme)."""
    zero = config.zero_optimization
    param, optimizer = zero.offload_param, zero.offload_optimizer
    for name, tier in (("offload_param", param), ("offload_optimizer", optimizer)):
        if tier is None or tier.device != "nvme":
            continue
        if not tier.nvme_path:
            yield Problem(f"{_ZERO}.{name}.nvme_path", "required for device nvme", "name a folder on a local disk")
        if not tier.buffer_count:
            cure = "use at least 1; more, and longer ones, wait less for the disk"
            yield Problem(f"{_ZERO}.{name}.buffer_count", "device nvme needs buffers, found 0", cure)
    if param is not None and param.device == "nvme":
        yield from _check_param_files(zero, param)
    if optimizer is not None and optimizer.device == "nvme":
        yield from _check_flat(config)


def _check_param_files(zero: ZeroOptimization, param: OffloadParam) -> Iterator[Problem]:
    if not param.buffer_size:
        cure = "use at least the elements of the longest part of a unit"
        yield Problem(f"{_ZERO}.offload_param.buffer_size", "device nvme needs buffers, found 0", cure)
    others = (("zero_hpz_partition_size", 1, "second copies"), ("mics_shard_size", 0, "copies in shard groups"))
    for key, most, copies in others:
        value = getattr(zero, key)
        if value > most:
            what = f"{value} keeps {copies} of parameters in memory, which offload_param.device nvme is to save"
            yield Problem(f"{_ZERO}.{key}", what, "remove it, or set offload_param.device to cpu")


def _check_flat(config: Config) -> Iterator[Problem]:
    """Optimizers in files: those that keep their states in flat pieces; what a script brings may do so too."""
    section = config.optimizer
    if section is None or section.type is None:
        return
    if section.type.lower() in known.FLAT:
        return
    what = f"{show(section.type)} cannot keep its states in files"
    own = ", ".join(known.FLAT.values())
    cure = f"use one of {own}, or set {_ZERO}.offload_optimizer.device to cpu"
    yield Problem("optimizer.type", what, cure)


def _check_features(config: Config) -> Iterator[Problem]:
    elastic, drop, tune = config.elasticity, config.progressive_layer_drop, config.autotuning
    if elastic.enabled:
        yield from _check_elasticity(config)
    if drop.enabled and not config.zero_optimization.ignore_unused_parameters:
        what = "false asks for gradients of all parameters; layers that progressive_layer_drop leaves out give none"
        yield Problem("zero_optimization.ignore_unused_parameters", what, "set it to true")
    comet = config.comet
    if comet.enabled and comet.mode == "get" and not comet.experiment_key:
        cure = "set comet.experiment_key, or the mode to get_or_create"
        yield Problem("comet.mode", "get continues an experiment and needs its key", cure)
    if tune.start_profile_step > tune.end_profile_step:
        what = f"{tune.start_profile_step} is after end_profile_step {tune.end_profile_step}"
        yield Problem("autotuning.start_profile_step", what, "make it the same or smaller")
    kept = config.activation_checkpointing
    if kept.contiguous_memory_optimization and not (kept.partition_activations and kept.number_checkpoints):
        yield Problem(
            "activation_checkpointing.contiguous_memory_optimization",
            "needs partition_activations and number_checkpoints",
        )


def _check_elasticity(config: Config) -> Iterator[Problem]:
    elastic = config.elasticity
    for key in ("max_train_batch_size", "micro_batch_sizes"):
        if key not in elastic.model_fields_set:
            yield Problem(f"elasticity.{key}", "required when enabled")
    if not elastic.micro_batch_sizes:
        yield Problem("elasticity.micro_batch_sizes", "expected at least one number, found []")
    if elastic.min_gpus > elastic.max_gpus:
        yield Problem("elasticity.min_gpus", f"{elastic.min_gpus} is more than max_gpus {elastic.max_gpus}")
    yield from _check_elastic_models(config)
    if elastic.ignore_non_elastic_batch_info:
        return
    for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION):
        if getattr(config, key) is not None:
            cure = "remove it, or set elasticity.ignore_non_elastic_batch_info to true"
            yield Problem(key, "elasticity chooses the batch sizes", cure, ElasticityConfigError)


def _check_elastic_models(config: Config) -> Iterator[Problem]:
    """Rules of the versions, and sizes that have to divide each other."""
    elastic = config.elasticity
    if elastic.model_parallel_size > 1 and elastic.version < 0.2:
        what = f"{elastic.model_parallel_size} needs version 0.2, found {elastic.version}"
        yield Problem("elasticity.model_parallel_size", what)
    if elastic.version not in (0.1, 0.2):
        yield Problem("elasticity.version", f"{elastic.version} is unknown", "use 0.1 or 0.2")
    large = [micro for micro in elastic.micro_batch_sizes if micro > elastic.max_train_batch_size]
    if large:
        what = f"{large[0]} is more than max_train_batch_size {elastic.max_train_batch_size}"
        yield Problem("elasticity.micro_batch_sizes", what, "leave it out")
    if elastic.num_gpus_per_node % elastic.model_parallel_size:
        what = f"{elastic.num_gpus_per_node} is no multiple of model_parallel_size {elastic.model_parallel_size}"
        yield Problem("elasticity.num_gpus_per_node", what, "a node has whole models")


def _check_curriculum(config: Config) -> Iterator[Problem]:
    old, sampled = config.curriculum_learning, config.data_efficiency.data_sampling.curriculum_learning
    if old.enabled:
        for key in ("curriculum_type", "min_difficulty", "max_difficulty", "schedule_type"):
            if getattr(old, key) is None:
                yield Problem(f"curriculum_learning.{key}", "required when enabled")
        if old.curriculum_type == "seqlen" and old.min_difficulty == 0:
            yield Problem("curriculum_learning.min_difficulty", "0 is no length", "begin with 8, for example")
        yield from _check_schedule("curriculum_learning", old)
    path = f"{_SAMPLED}.curriculum_metrics"
    if sampled.enabled and not sampled.curriculum_metrics:
        yield Problem(path, "required when enabled", "name at least one measure of difficulty")
    choosing = [name for name, each in sampled.curriculum_metrics.items() if each.clustering_type != "single_cluster"]
    if sampled.enabled and len(choosing) > 1 and not sampled.data_cluster_path:
        what = f"required for samples that several metrics choose ({', '.join(choosing)})"
        yield Problem(f"{_SAMPLED}.data_cluster_path", what, "give a folder that all nodes share")
    for name, metric in sampled.curriculum_metrics.items():
        yield from _check_schedule(f"{path}.{name}", metric)
        if sampled.enabled:
            yield from _check_metric(f"{path}.{name}", metric)


def _check_random_ltd(config: Config) -> Iterator[Problem]:
    section, path = config.data_efficiency.data_routing.random_ltd, "data_efficiency.data_routing.random_ltd"
    if section.layer_token_lr_schedule.enabled:
        what = "this schedule is not offered"
        yield Problem(f"{path}.layer_token_lr_schedule.enabled", what, "set it to false", UnimplementedOption)
    if not section.enabled:
        return
    schedule = section.random_ltd_schedule
    places = {
        path: (section, ("total_layer_num", "random_ltd_layer_num", "model_type", "hidden_state_order")),
        f"{path}.random_ltd_schedule": (schedule, ("min_value", "max_value", "schedule_type")),
        f"{path}.random_ltd_schedule.schedule_config": (schedule.schedule_config, ("require_steps", "seq_per_step")),
    }
    for place, (values, keys) in places.items():
        yield from (Problem(f"{place}.{key}", "required when enabled") for key in keys if getattr(values, key) is None)
    named, count, total = section.random_ltd_layer_id, section.random_ltd_layer_num, section.total_layer_num
    if count is not None and (len(named) != count or len(set(named)) != count):
        what = f"{len(set(named))} different numbers for random_ltd_layer_num {count}"
        yield Problem(f"{path}.random_ltd_layer_id", what, "name each layer once")
    if count is not None and total is not None and count > total:
        yield Problem(f"{path}.random_ltd_layer_num", f"{count} of total_layer_num {total} layers")
    least, most = schedule.min_value, schedule.max_value
    if least is not None and most is not None and least > most:
        yield Problem(f"{path}.random_ltd_schedule.min_value", f"{least} is more than max_value {most}")
    if section.model_type == "encoder" and not section.model_mask_name:
        yield Problem(f"{path}.model_mask_name", "required for an encoder", "name the layers' argument with the mask")
    if config.data_efficiency.routes_tokens and config.tensor_parallel.sequence_parallel:
        what = "layers have a part of each sample between them with tensor_parallel.sequence_parallel"
        yield Problem(f"{path}.enabled", what, "set one of the two to false")


def _check_metric(path: str, metric: Any) -> Iterator[Problem]:
    wanted = ["min_difficulty", "max_difficulty", "schedule_type"]
    if metric.clustering_type != "single_cluster":
        wanted += ["difficulty_type", "index_to_sample_path"]
        wanted += ["index_to_metric_path"] if metric.difficulty_type == "value" else []
    for key in wanted:
        if getattr(metric, key) in (None, ""):
            yield Problem(f"{path}.{key}", "required when curriculum_learning is enabled")


def _check_schedule(path: str, section: Any) -> Iterator[Problem]:
    """Bounds of a difficulty, and the numbers that its schedule needs."""
    kind, numbers, low, high = (
        section.schedule_type, section.schedule_config, section.min_difficulty, section.max_difficulty
    )  # fmt: skip
    if low is not None and high is not None and low > high:
        yield Problem(f"{path}.min_difficulty", f"{low} is more than max_difficulty {high}")
    wanted = {
        "fixed_linear": ("total_curriculum_step", "difficulty_step"),
        "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
        "fixed_discrete": ("difficulty", "max_step"),
    }.get(kind or "", ())
    for key in wanted:
        if getattr(numbers, key) is None:
            yield Problem(f"{path}.schedule_config.{key}", f"required by schedule_type {show(kind)}")
    if kind == "fixed_discrete" and numbers.difficulty is not None and numbers.max_step is not None:
        count, steps = len(numbers.difficulty), len(numbers.max_step)
        if count != steps + 1 or not steps:
            what = f"{steps} entries for {count} difficulties; expected one less than difficulties, and at least one"
            yield Problem(f"{path}.schedule_config.max_step", what)
        if numbers.max_step != sorted(numbers.max_step):
            yield Problem(f"{path}.schedule_config.max_step", f"{numbers.max_step} are not in their order")
        bounds = (low if low is not None else -math.inf), (high if high is not None else math.inf)
        outside = [each for each in numbers.difficulty if not bounds[0] <= each <= bounds[1]]
        if outside:
            what = f"{outside[0]} is outside of min_difficulty {show(low)} and max_difficulty {show(high)}"
            yield Problem(f"{path}.schedule_config.difficulty", what)


def _check_compression(config: Config) -> Iterator[Problem]:
    section = config.compression_training
    for name in type(section).model_fields:
        if name == "layer_reduction":
            continue
        technique = getattr(section, name)
        shared, path = technique.shared_parameters, f"compression_training.{name}"
        is_snip = name == "sparse_pruning" and shared.method == "snip_momentum"
        if shared.enabled and not technique.different_groups and not is_snip:
            yield Problem(f"{path}.different_groups", "required when enabled", "name at least one group of modules")
    sparse, heads = section.sparse_pruning.shared_parameters, section.head_pruning.shared_parameters
    if sparse.schedule_offset_end is not None and sparse.schedule_offset_end < sparse.schedule_offset:
        what = f"{sparse.schedule_offset_end} is before schedule_offset {sparse.schedule_offset}"
        yield Problem("compression_training.sparse_pruning.shared_parameters.schedule_offset_end", what)
    if heads.enabled and heads.num_heads is None:
        yield Problem("compression_training.head_pruning.shared_parameters.num_heads", "required when enabled")
    layers = section.layer_reduction
    if layers.enabled and layers.teacher_layer and layers.keep_number_layer not in (None, len(layers.teacher_layer)):
        what = f"{len(layers.teacher_layer)} layers are named, keep_number_layer is {show(layers.keep_number_layer)}"
        yield Problem("compression_training.layer_reduction.teacher_layer", what)


def _check_weight_bits(config: Config) -> Iterator[Problem]:
    new, old = "compression_training.weight_quantization", "quantize_training"
    techniques = {new: config.compression_training.weight_quantization, old: config.quantize_training.technique}
    enabled = {path: each for path, each in techniques.items() if each.shared_parameters.enabled}
    if len(enabled) > 1:
        yield Problem(old, f"{new} is enabled too", "both quantize weights: keep one of them")
    for path, technique in enabled.items():
        shared = technique.shared_parameters
        if path == new and not (shared.quantize_weight_in_forward or cast_dtype(config) in ("fp16", "bf16")):
            where = f"{path}.shared_parameters.quantize_weight_in_forward"
            yield Problem(where, "false needs fp16.enabled or bf16.enabled", "set it to true, or enable one")
        mixed = shared.fp16_mixed_quantize
        if mixed.enabled and not (mixed.quantize_change_ratio or shared.quantize_weight_in_forward):
            where = f"{path if path == old else f'{path}.shared_parameters'}.fp16_mixed_quantize.quantize_change_ratio"
            yield Problem(where, "0 never lets a weight be quantized", "give more than 0, or set enabled to false")
        for name, group in technique.different_groups.items():
            bits, where = (
                group.params,
                f"{old}.quantize_bits" if path == old else f"{path}.different_groups.{name}.params",
            )
            if bits.start_bits < bits.target_bits and not shared.quantize_weight_in_forward:
                yield Problem(f"{where}.start_bits", f"{bits.start_bits} is less than target_bits {bits.target_bits}")
            if bits.target_bits <= 2 and (shared.quantization_type, shared.rounding) != ("symmetric", "nearest"):
                what = f"{bits.target_bits} with {shared.quantization_type} values and {shared.rounding} rounding"
                yield Problem(f"{where}.target_bits", what, "1 and 2 bits are symmetric, and rounded to the nearest")


_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _check_batch,
    _check_precision,
    _check_zero,
    _check_features,
    _check_curriculum,
    _check_random_ltd,
    _check_compression,
    _check_weight_bits,
    _check_trace,
    check_invariant,
)


def _unrouted(config: Config, spell: Callable[[str], str]) -> list[str]:
    """A warning if random-LTD is enabled within sections that are not."""
    data = config.data_efficiency
    if data.routes_tokens or not data.data_routing.random_ltd.enabled:
        return []
    levels = [spell(path) for path in ("data_efficiency.enabled", "data_efficiency.data_routing.enabled")]
    found = spell("data_efficiency.data_routing.random_ltd")
    return [f"{found} has no effect here: {' and '.join(levels)} have to be true, too"]


def find_warnings(config: Config, spell: Callable[[str], str] = str) -> list[str]:
    """Warnings on legal settings without the expected effect; `spell` gives the path as the user wrote it."""
    found = find_ineffective(config, spell)
    found.extend(_warnings_of_data(config, spell))
    if config.nebula.enabled:
        found.append("nebula is ignored: it is a vendor's service; checkpoints go where save_checkpoint says")
    zero = config.zero_optimization
    if zero.zero_hpz_partition_size == zero.mics_shard_size > 1:
        key, group = (spell(f"{_ZERO}.{name}") for name in ("zero_hpz_partition_size", "mics_shard_size"))
        found.append(f"{key} has no effect here: {group} cuts parameters over the same {zero.mics_shard_size} ranks")
    if zero.elastic_checkpoint:
        found.append("zero_optimization.elastic_checkpoint is ignored: every checkpoint loads at any number of ranks")
    if config.vocabulary_size is not None and config.vocabulary_size % 8:
        found.append(f"vocabulary_size {config.vocabulary_size} is no multiple of 8; matrix products may be slower")
    if config.autotuning.enabled:
        found.append("autotuning.enabled: a run trains all the same; search with mpispeed tune, or run --autotuning")
    optimizer = config.optimizer
    if optimizer is not None and (optimizer.type or "").lower() in known.ONEBIT:
        spelled = (f"optimizer.params.{key} has no effect here: {why}" for key, why in unused(optimizer.params).items())
        found.extend(spelled)
    schedule = config.scheduler
    if schedule is not None and schedule.type in known.SCHEDULE_PARAMS:
        shape = schedule.params.get("warmup_type")
        if shape not in (None, "log", "linear"):
            found.append(f'scheduler.params.warmup_type {show(shape)} is unknown ("log" or "linear"); log is used')
    return found


def _warnings_of_data(config: Config, spell: Callable[[str], str]) -> Iterator[str]:
    growth = config.curriculum_learning
    multiple = growth.schedule_config.difficulty_step or 0
    if growth.enabled and growth.curriculum_type == "seqlen" and multiple % 8:
        key = spell("curriculum_learning.schedule_config.difficulty_step")
        yield f"{key} {multiple} is no multiple of 8; matrix products of these lengths may be slower on GPUs"
    yield from _unrouted(config, spell)
    efficiency = config.data_efficiency
    if efficiency.data_sampling.enabled and not efficiency.enabled:
        yield f"{spell(_SAMPLING)}.enabled has no effect here: data_efficiency.enabled is false"
    if efficiency.data_sampling.curriculum_learning.enabled and not efficiency.data_sampling.enabled:
        yield f"{spell(_SAMPLED)}.enabled has no effect here: {_SAMPLING}.enabled is false"
