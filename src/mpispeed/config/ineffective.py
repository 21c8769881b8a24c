"""Keys that are accepted and do nothing, always or without others: one warning for each that is set.

Delete a row when its key gets an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpispeed.config.root import Config

_ZERO = "zero_optimization"
_BUILT = "a PipelineModule is built before the config is read; give it to the constructor"
_GROUP = "groups of ranks are made for tensor_parallel.autotp_size; or pass an mpu to initialize"
_PINNED = "page-locked memory is for transfers to a GPU"
_UNSYNCHRONIZED = "there is no device to wait for"
OF_DEVICES = (_PINNED, _UNSYNCHRONIZED)
"""Reasons that are true only if training runs on the host; callers that know the device drop such sentences."""

_STAGE_0 = "every rank updates all parameters at stage 0"
_NO_MOMENTUM = "it is for optimizer Muon with states in files (offload_optimizer.device nvme)"
_WHOLE = "parameters are whole on every rank below stage 3"
_NOT_CUT = "updates go in parts at stage 3, and for states in files (device nvme)"
_PLAIN = "it is for zero_quantized_weights and zero_quantized_gradients, which are false"
_FILES = "it is for states in files (device nvme), and none are"


def _is_in_files(*names: str) -> Callable[[Config], bool]:
    """True if a section of `zero_optimization` puts states in files."""

    def asks(config: Config) -> bool:
        sections = (getattr(config.zero_optimization, name) for name in names)
        return any(section is not None and section.device == "nvme" for section in sections)

    return asks


def _cuts_updates(config: Config) -> bool:
    return config.zero_optimization.stage == 3 or _is_in_files("offload_optimizer")(config)


def _is_collected(config: Config) -> bool:
    return config.zero_optimization.stage > 0


def _is_fetched(config: Config) -> bool:
    return config.zero_optimization.stage == 3


def _is_coded(config: Config) -> bool:
    zero = config.zero_optimization
    return zero.zero_quantized_weights or zero.zero_quantized_gradients


def _is_outside(config: Config) -> bool:
    section = config.zero_optimization.offload_optimizer
    return section is not None and section.device != "none"


def _has_momentum_in_files(config: Config) -> bool:
    name = config.optimizer.type if config.optimizer is not None else ""
    return (name or "").lower() == "muon" and _is_in_files("offload_optimizer")(config)


def _is_invariant(config: Config) -> bool:
    return config.reduction == "invariant"


def _cuts_sequences(config: Config) -> bool:
    return (config.sequence_parallel_size or 1) > 1


_QUANTIZER = "all bits have the same quantizer"
_DEEPEP = "rows travel by MPI, which needs no such resources"
_EXPERTS = {
    "validate_folding_routing": "ranks that slice a model compute the same routing from the same input",
    "async_split_plan": "counts of rows are in host memory when they are exchanged",
    "disable_triton_grouped_mm": "there are no products by Triton",
    "combine_impl": "outputs of experts are always weighted and added in fp32, in the order of a token's choices",
    "row_weighting_impl": "outputs of experts are weighted where they are added",
    "gate_up_impl": "gates and up projections are one product where they are one tensor",
    "comm_num_sm": _DEEPEP,
    "comm_qp_margin": _DEEPEP,
    "comm_max_tokens_per_rank": "any number of rows may travel",
}

# Path -> why. Keys below a section that has its own `enabled` and is off or refused need no row.
NO_EFFECT: dict[str, str] = {
    "disable_allgather": "updated parameters always have to be gathered",
    "graph_harvesting": "there are no device graphs to replay",
    "use_data_before_expert_parallelism": "ranks that share experts are always neighbours on the data axis",
    "zero_force_ds_cpu_optimizer": "any optimizer updates states in host memory, only the own those in files",
    "optimizer.legacy_fusion": "there is one fused optimizer step",
    "amp.num_losses": "one loss scale serves all losses",
    "amp.verbosity": "what is cast is in the plan that is logged",
    "bf16.immediate_grad_update": "gradients are always added as soon as they are there",
    f"{_ZERO}.contiguous_gradients": "gradients always have buffers of their own",
    f"{_ZERO}.use_multi_rank_bucket_allreduce": "each rank has an equal part of every bucket: one message serves all",
    f"{_ZERO}.round_robin_gradients": "each rank has an equal part of every bucket already",
    f"{_ZERO}.use_all_reduce_for_fetch_params": "parameters are fetched by all-gather, which sends half as much",
    f"{_ZERO}.memory_efficient_linear": "no module keeps its weights for the backward pass; they are fetched again",
    f"{_ZERO}.pipeline_loading_checkpoint": "no rank reads more of a checkpoint than its own part",
    "elasticity.min_time": "nothing is scheduled by it",
    "autotuning.model_info.profile": "a search always reads the facts that are left out off the model",
    "aio.use_gds": "files are read into host memory, not into that of a GPU",
    "checkpoint.load_universal": "every checkpoint loads at any number of ranks",
    "checkpoint.parallel_write.pipeline_stage": "all ranks of all stages write their parts",
    "pipeline.partition": _BUILT,
    "pipeline.seed_layers": _BUILT,
    "pipeline.use_reentrant": "recomputation needs no reentrant backward pass",
    "tensor_parallel.dtype": "slices have the dtype of the model",
    "tensor_parallel.tensor_parallel.mpu": _GROUP,
    "tensor_parallel.tensor_parallel.tp_group": _GROUP,
    "tensor_parallel.keep_module_on_host": "modules are cut in host memory",
    "tensor_parallel.replace_with_kernel_inject": "there are no fused modules to put in their place",
    "compression_training.weight_quantization.shared_parameters.quantizer_kernel": _QUANTIZER,
    "quantize_training.quantizer_kernel": _QUANTIZER,
    **{f"expert_parallel.{key}": why for key, why in _EXPERTS.items()},
}

# As NO_EFFECT where the model is on the host.
ON_HOST = {
    f"{_ZERO}.offload_param.pin_memory": _PINNED,
    f"{_ZERO}.offload_optimizer.pin_memory": _PINNED,
    "timers.throughput.synchronized": _UNSYNCHRONIZED,
}

# Path -> whether the settings give the key its effect, and why it has none without them.
_IN_FILES = (
    "offload_param.nvme_path", "offload_param.buffer_count", "offload_param.buffer_size", "offload_param.max_in_cpu",
    "offload_optimizer.nvme_path", "offload_optimizer.buffer_count", "offload_optimizer.pipeline_read",
    "offload_optimizer.pipeline_write", "offload_optimizer.fast_init",
)  # fmt: skip
_SEQUENCES = ("seq_parallel_comm_data_type", "sequence_parallel.cuts_batches")
_CODED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
_IO = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "backend")
DEPENDENT: dict[str, tuple[Callable[[Config], bool], str]] = {
    **{f"{_ZERO}.{key}": (_is_in_files(key.partition(".")[0]), _FILES) for key in _IN_FILES},
    f"{_ZERO}.sub_group_size": (_cuts_updates, _NOT_CUT),
    **{f"{_ZERO}.{key}": (_is_collected, _STAGE_0) for key in ("allgather_partitions", "allgather_bucket_size")},
    **{f"{_ZERO}.{key}": (_is_fetched, _WHOLE) for key in _CODED},
    f"{_ZERO}.zero_quantized_in_node": (_is_coded, _PLAIN),
    **{f"aio.{key}": (_is_in_files("offload_param", "offload_optimizer"), _FILES) for key in _IO},
    **dict.fromkeys(_SEQUENCES, (_cuts_sequences, "sequence_parallel_size is not more than 1")),
    "reproducibility.threads": (_is_invariant, 'reduction is not "invariant"'),
    f"{_ZERO}.save_muon_momentum_buffer_in_memory": (_has_momentum_in_files, _NO_MOMENTUM),
    f"{_ZERO}.offload_optimizer.ratio": (_is_outside, "no optimizer states are outside the device"),
}


def _falls(config: Config) -> bool:
    shared = config.compression_training.weight_quantization.shared_parameters
    return not (shared.enabled and shared.quantize_weight_in_forward)


def _prunes_blocks(config: Config) -> bool:
    shared = config.compression_training.sparse_pruning.shared_parameters
    return not shared.enabled or shared.method == "snip_momentum"


_FALLING = "weights have target_bits from the first step on, as quantize_weight_in_forward is true"
_BLOCKS = "it is for the method snip_momentum"
DEPENDENT |= {
    **{
        f"compression_training.weight_quantization.shared_parameters.{key}": (_falls, _FALLING)
        for key in ("fp16_mixed_quantize.enabled", "quantize_verbose")
    },
    **{
        f"compression_training.sparse_pruning.shared_parameters.{key}": (_prunes_blocks, _BLOCKS)
        for key in ("block_pattern", "dense_ratio", "schedule_offset_stride", "schedule_offset_end")
    },
}


def drop_unused(config: Config, spell: Callable[[str], str] = str) -> tuple[Config, list[str]]:
    """The settings without some that would contradict others, and a sentence on each.

    This is offload_param below stage 3. As in DeepSpeed, such a config works.
    """
    zero = config.zero_optimization
    if zero.stage == 3 or zero.offload_param is None or zero.offload_param.device == "none":
        return config, []
    why = f"parameters are whole on every rank below stage 3, and {_ZERO}.stage is {zero.stage}"
    without = config.model_copy(update={_ZERO: zero.model_copy(update={"offload_param": None})})
    return without, [f"{spell(f'{_ZERO}.offload_param')} has no effect here: {why}"]


def find_ineffective(config: Config, spell: Callable[[str], str] = str) -> list[str]:
    """A sentence for each key of the tables that differs from its default and has no effect.

    Args:
        config: the settings.
        spell: from a path to the path as the user wrote it.
    """
    always = NO_EFFECT | ON_HOST
    rows = [*always.items(), *((path, why) for path, (works, why) in DEPENDENT.items() if not works(config))]
    return [f"{spell(path)} has no effect here: {why}" for path, why in rows if _differs(config, path.split("."))]


def _differs(section: Any, keys: list[str]) -> bool:
    """True if the value at a path below `section` is not its default; absent sections have none."""
    for key in keys[:-1]:
        section = getattr(section, key)
        if section is None:
            return False
    info = type(section).model_fields[keys[-1]]
    return bool(getattr(section, keys[-1]) != info.get_default(call_default_factory=True))
