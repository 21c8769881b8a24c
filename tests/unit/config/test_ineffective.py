"""Keys without effect: each warns, and no key of the format is silently ignored."""

from __future__ import annotations

import json

import pytest

from mpispeed.config import load
from mpispeed.config.ineffective import DEPENDENT, NO_EFFECT, ON_HOST
from mpispeed.config.root import Config
from mpispeed.config.section import inner_section, walk
from mpispeed.config.unavailable import UNAVAILABLE

FIELDS = {field.path: field for field in walk(Config)}
COMPRESSION = ("compression_training.", "quantize_training.")
# Read by the engine, or by find_warnings.
READ = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "seed", "steps_per_print",
    "gradient_clipping", "communication_data_type", "reduction", "prescale_gradients", "gradient_predivide_factor",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "zero_allow_untested_optimizer", "dataloader_drop_last",
    "dataloader_shuffle", "vocabulary_size", "data_parallel_size", "optimizer.type", "optimizer.params",
    "sequence_parallel_size", "scheduler.type",
    "scheduler.params", "zero_optimization.reduce_bucket_size",
    "zero_optimization.overlap_comm", "zero_optimization.elastic_checkpoint", "checkpoint.tag_validation",
    "checkpoint.async_save", "checkpoint.overwrite",
    "checkpoint.writing", "checkpoint.files", "checkpoint.window_bytes",
    "checkpoint.read_back", "checkpoint.load_verify", "checkpoint.keep_last", "checkpoint.keep_every",
    "zero_optimization.load_from_fp32_weights",
    "timers.throughput.enabled",
    "comms_logger.enabled", "comms_logger.prof_all", "comms_logger.prof_ops", "comms_logger.verbose",
    "comms_logger.debug", "zero_optimization.stage", "zero_optimization.prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold", "zero_optimization.model_persistence_threshold",
    "zero_optimization.max_live_parameters", "zero_optimization.max_reuse_distance",
    "zero_optimization.gather_16bit_weights_on_model_save", "zero_optimization.module_granularity_threshold",
    "zero_optimization.log_trace_cache_warnings", "zero_optimization.divergent_modules", "sparse_gradients",
    "zero_optimization.override_module_apply",
    "zero_optimization.reduce_scatter", "zero_optimization.ignore_unused_parameters",
    "zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.zero_hpz_partition_size", "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zeropp_loco_param.err_beta", "zero_optimization.zeropp_loco_param.reset_T",
    "zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device", "host_memory_limit",
    "pipeline.stages", "pipeline.schedule", "pipeline.per_micro_batch", "pipeline.activation_checkpoint_interval",
    "pipeline.pipe_partitioned", "pipeline.grad_partitioned", "tensor_parallel.autotp_size",
    "tensor_parallel.vocab_parallel", "tensor_parallel.sequence_parallel", "tensor_parallel.injection_policy_tuple",
    "tensor_parallel.tensor_parallel.tp_size", "tensor_parallel.tensor_parallel.tp_grain_size",
    "checkpoint.use_node_local_storage", "elasticity.enabled", "elasticity.max_train_batch_size",
    "elasticity.micro_batch_sizes", "elasticity.min_gpus", "elasticity.max_gpus", "elasticity.version",
    "elasticity.prefer_larger_batch", "elasticity.ignore_non_elastic_batch_info", "elasticity.model_parallel_size",
    "elasticity.num_gpus_per_node",
    *(path for path in FIELDS if path.startswith("data_efficiency.")),
    *(
        path for path in FIELDS
        if path.startswith(COMPRESSION) and not path.endswith((".quantizer_kernel", ".eigenvalue"))
        and path not in DEPENDENT
    ),
    *(path for path in FIELDS if path.startswith("autotuning.") and path != "autotuning.model_info.profile"),
}  # fmt: skip
READ_SECTIONS = ("fp16", "tensorboard", "csv_monitor", "wandb", "comet", "nebula", "activation_checkpointing",
                 "walltime", "guard", "run_record", "data_loader", "trace", "expert_parallel", "flops_profiler",
                 "sequence_parallel", "curriculum_learning", "progressive_layer_drop", "eigenvalue",
                 "sparse_attention", "bf16", "amp", "torch_autocast", "data_types")  # fmt: skip
ONE_OF = {"expert_parallel.combine_impl": "legacy_bmm", "expert_parallel.row_weighting_impl": "fused",
          "expert_parallel.gate_up_impl": "fused"}  # fmt: skip
CODED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
UPDATES = ("allgather_partitions", "allgather_bucket_size", "sub_group_size")
BY_STAGE = {f"zero_optimization.{key}" for key in (*UPDATES, *CODED)}
REFUSED = {row.path for row in UNAVAILABLE} | {"zero_optimization.legacy_stage1"}


def other_than(default):
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1 if default < 2**60 else default - 1
    if isinstance(default, list):
        return ["all_reduce"]
    if isinstance(default, float):
        return default / 2
    return {"fp32": "bf16", "fp16": "bf16", "best": "uniform", "auto": "threads"}.get(default, 7)


def nested(path, value):
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize("path", NO_EFFECT | ON_HOST)
def test_each_warns_once_and_only_when_it_differs_from_the_default(path):
    default = FIELDS[path].default
    warnings = load(nested(path, ONE_OF.get(path) or other_than(default))).warnings
    assert [w.partition(" has no effect here: ")[0] for w in warnings] == [path]
    assert (NO_EFFECT | ON_HOST)[path] in warnings[0]
    assert load(nested(path, default)).warnings == []


@pytest.mark.parametrize("path", [path for path in DEPENDENT if not path.startswith("compression_training")])
def test_keys_that_need_others_warn_without_them(path):
    value = "disk" if path.endswith("_path") else other_than(FIELDS[path].default)
    settings = nested(path, value)
    zero = settings.setdefault("zero_optimization", {})
    zero["stage"] = 0 if path in BY_STAGE else 3
    warnings = load(settings).warnings
    assert [w.partition(" has no effect here: ")[0] for w in warnings] == [path]
    assert DEPENDENT[path][1] in warnings[0]
    zero["stage"], settings["sequence_parallel_size"], zero["zero_quantized_weights"] = 3, 2, True
    disk = {"device": "nvme", "nvme_path": "disk"}
    for name in ("offload_param", "offload_optimizer"):
        zero[name] = disk | zero.get(name, {})
    if "muon" in path:
        settings["optimizer"] = {"type": "Muon"}
    if "reproducibility" in path:
        zero.pop("zero_quantized_weights")  # refused with it
        settings |= {"reduction": "invariant", "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    assert load(settings).warnings == []


@pytest.mark.parametrize("path", [path for path in DEPENDENT if path.startswith("compression_training")])
def test_keys_of_a_technique_that_is_used_otherwise_warn(path):
    """`quantize_weight_in_forward` true has no bits that fall; methods other than snip_momentum have no blocks."""
    value = {"block_pattern": "2:4", "schedule_offset_end": 2000}.get(path.rpartition(".")[2])
    settings = nested(path, other_than(FIELDS[path].default) if value is None else value) | {"bf16": {"enabled": True}}
    section = settings["compression_training"]
    assert load(settings).warnings == []  # the technique is off
    technique = next(iter(section))
    shared = section[technique]["shared_parameters"]
    key, without, with_it = (
        ("quantize_weight_in_forward", True, False)
        if technique == "weight_quantization"
        else ("method", "l1", "snip_momentum")
    )
    shared |= {"enabled": True, key: without}
    params = {"start_bits": 8, "target_bits": 8, "dense_ratio": 0.5}
    names = ("start_bits", "target_bits") if technique == "weight_quantization" else ("dense_ratio",)
    section[technique]["different_groups"] = {"g": {"params": {name: params[name] for name in names}}}
    warnings = load(settings).warnings
    assert [w.partition(" has no effect here: ")[0] for w in warnings] == [path]
    assert DEPENDENT[path][1] in warnings[0]
    shared[key] = with_it
    assert load(settings).warnings == []


def test_files_of_one_kind_give_no_effect_to_keys_of_the_other():
    zero = {
        "stage": 3, "sub_group_size": 5, "offload_param": {"device": "nvme", "nvme_path": "disk"},
        "offload_optimizer": {"device": "cpu", "fast_init": True, "ratio": 0.5},
    }  # fmt: skip
    warnings = load({"zero_optimization": zero, "aio": {"block_size": 4096}}).warnings
    assert [w.split()[0] for w in warnings] == ["zero_optimization.offload_optimizer.fast_init"]


@pytest.mark.parametrize("key", [*UPDATES, *CODED])
def test_keys_of_updates_and_codes_say_at_which_stages_they_have_no_effect(key):
    value = False if key == "allgather_partitions" else True if key in CODED else 7
    quiet = [s for s in range(4) if not load({"zero_optimization": {"stage": s, key: value}}).warnings]
    assert quiet == ([1, 2, 3] if key.startswith("allgather") else [3])


@pytest.mark.deepspeed_row("a10")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("section", [{"device": "cpu", "buffer_count": 2}, {"device": "nvme"}], ids=["cpu", "nvme"])
def test_parameters_stay_where_they_are_below_stage_3(stage, section):
    """DeepSpeed ignores the section there: whoever tries another stage leaves it in."""
    settings = {"zero_optimization": {"stage": stage, "offload_param": section | {"nvme_path": "disk"}}}
    loaded = load(settings)
    if stage == 3:
        assert loaded.config.zero_optimization.offload_param.device == section["device"]
        assert [w for w in loaded.warnings if "offload_param has" in w] == []
        return
    assert loaded.config.zero_optimization.offload_param is None
    (warning,) = loaded.warnings
    assert warning.startswith("zero_optimization.offload_param has no effect here: ")
    assert f"zero_optimization.stage is {stage}" in warning
    old = load({"zero_optimization": {"stage": stage, "cpu_offload_param": True}}).warnings
    assert [w for w in old if w.startswith("zero_optimization.cpu_offload_param has no effect here: ")]


def test_the_warning_names_the_key_as_it_was_written():
    warnings = load({"zero_optimization": {"stage3_use_all_reduce_for_fetch_params": True}}).warnings
    assert [w.split()[0] for w in warnings] == ["zero_optimization.stage3_use_all_reduce_for_fetch_params"]


def test_defaults_and_plain_settings_are_quiet():
    settings = {"train_batch_size": 4, "bf16": True, "zero_optimization": {"stage": 2, "reduce_scatter": True}}
    assert load(settings).warnings == []
    full = load({}).config.resolved_dict()
    assert load(json.loads(json.dumps(full))).warnings == []


def is_accounted_for(path):
    """Read, refused, warned about, or part of a section that is off or refused as a whole."""
    keys = path.split(".")
    heads = {".".join(keys[:count]) for count in range(1, len(keys) + 1)}
    is_listed = any(path in table for table in (READ, NO_EFFECT, ON_HOST, DEPENDENT))
    return is_listed or keys[0] in READ_SECTIONS or bool(heads & REFUSED)


def test_no_key_is_silently_ignored():
    leaves = [path for path, field in FIELDS.items() if inner_section(field.annotation)[0] is None]
    assert [path for path in leaves if not is_accounted_for(path)] == []
    tables = (set(NO_EFFECT), set(ON_HOST), set(DEPENDENT), READ, REFUSED)
    assert sum(map(len, tables)) == len(set().union(*tables)), "a key is in one table only"
    assert set(NO_EFFECT) | set(ON_HOST) | set(DEPENDENT) | READ <= set(FIELDS)
