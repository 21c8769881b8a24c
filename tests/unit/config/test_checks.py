"""Conflicts between settings, keywords of optimizers and schedules, settings whose parts are not there."""

from __future__ import annotations

import pytest

from mpispeed.base.errors import ConfigError, ElasticityConfigError
from mpispeed.config import load, require_available
from mpispeed.config.accept import accept
from mpispeed.config.root import Config
from mpispeed.config.section import walk
from mpispeed.config.unavailable import UNAVAILABLE
from mpispeed.config.zero import ZeroOptimization

ELASTIC = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2]}
SNIP = {"enabled": True, "method": "snip_momentum", "schedule_offset": 10, "schedule_offset_end": 5}


def in_files(**zero):
    """Settings with states in files."""
    for name in ("offload_param", "offload_optimizer"):
        if name in zero:
            zero[name] = {"device": "nvme", "nvme_path": "disk"} | zero[name]
    return {"zero_optimization": {"stage": 3} | zero}


CONFLICTS = {
    "amp.master_weights": {"amp": {"enabled": True, "master_weights": True}},
    "amp.keep_batchnorm_fp32": {"amp": {"enabled": True, "keep_batchnorm_fp32": True}},
    "amp.cast_model_type": {"amp": {"enabled": True, "opt_level": "O1", "cast_model_type": "torch.float16"}},
    "amp.patch_torch_functions": {"amp": {"enabled": True, "opt_level": "O2", "patch_torch_functions": True}},
    "amp.loss_scale": {"amp": {"enabled": True, "loss_scale": 0}},
    "amp.min_loss_scale": {"amp": {"enabled": True, "min_loss_scale": 8, "max_loss_scale": 4}},
    "torch_autocast.enabled": {"torch_autocast": True, "bf16": True},
    "communication_data_type": {"torch_autocast": True, "communication_data_type": "bf16"},
    "bf16.enabled": {"bf16": True, "fp16": True},
    "prescale_gradients": {"prescale_gradients": True, "zero_optimization": {"stage": 2}},
    "gradient_predivide_factor": {"gradient_predivide_factor": 2, "zero_optimization": {"stage": 3}},
    "zero_optimization.zero_quantized_gradients": {
        "zero_optimization": {"zero_quantized_gradients": True, "reduce_scatter": False}
    },
    "zero_optimization.offload_optimizer.ratio": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    },
    "zero_optimization.offload_optimizer.nvme_path": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    },
    "zero_optimization.offload_optimizer.device": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "zero_optimization.cpu_offload.device": {"zero_optimization": {"cpu_offload": True}},
    "zero_optimization.offload_param.nvme_path": {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ""}}
    },
    "zero_optimization.offload_param.buffer_count": in_files(offload_param={"buffer_count": 0}),
    "zero_optimization.offload_param.buffer_size": in_files(offload_param={"buffer_size": 0}),
    "zero_optimization.offload_optimizer.buffer_count": in_files(offload_optimizer={"buffer_count": 0}),
    "zero_optimization.sub_group_size": in_files(offload_optimizer={}, sub_group_size=0),
    "zero_optimization.allgather_bucket_size": {"zero_optimization": {"stage": 1, "allgather_bucket_size": 0}},
    "zero_optimization.zero_hpz_partition_size": in_files(offload_param={}, zero_hpz_partition_size=2),
    "zero_optimization.mics_shard_size": in_files(offload_param={}, mics_shard_size=1),
    "zero_optimization.legacy_stage1": {"zero_optimization": {"legacy_stage1": True}},
    "fp16.fp16_master_weights_and_grads": {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    "data_types.grad_accum_dtype": {"bf16": True, "data_types": {"grad_accum_dtype": "fp16"}},
    "elasticity.max_train_batch_size": {"elasticity": {"enabled": True, "micro_batch_sizes": [2]}},
    "train_batch_size": {
        "train_batch_size": 4,
        "elasticity": {"enabled": True, "micro_batch_sizes": [2], "max_train_batch_size": 8},
    },
    "elasticity.min_gpus": {
        "elasticity": {
            "enabled": True, "micro_batch_sizes": [2], "max_train_batch_size": 8, "min_gpus": 3, "max_gpus": 2,
        }
    },
    "elasticity.micro_batch_sizes": {
        "elasticity": {"enabled": True, "micro_batch_sizes": [2, 9], "max_train_batch_size": 8}
    },
    "elasticity.version": {
        "elasticity": {"enabled": True, "micro_batch_sizes": [2], "max_train_batch_size": 8, "version": 0.15}
    },
    "elasticity.num_gpus_per_node": {
        "elasticity": {
            "enabled": True, "micro_batch_sizes": [2], "max_train_batch_size": 8, "model_parallel_size": 2,
            "num_gpus_per_node": 3,
        }
    },
    "zero_optimization.ignore_unused_parameters": {
        "progressive_layer_drop": {"enabled": True, "theta": 0.5},
        "zero_optimization": {"ignore_unused_parameters": False},
    },
    "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics": {
        "data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}
    },
    "activation_checkpointing.contiguous_memory_optimization": {
        "activation_checkpointing": {"contiguous_memory_optimization": True}
    },
    "compression_training.row_pruning.different_groups": {
        "compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}
    },
    "compression_training.sparse_pruning.shared_parameters.schedule_offset_end": {
        "compression_training": {"sparse_pruning": {"shared_parameters": SNIP}}
    },
    "compression_training.layer_reduction.teacher_layer": {
        "compression_training": {
            "layer_reduction": {"enabled": True, "keep_number_layer": 2, "teacher_layer": [1, 2, 3]}
        }
    },
    "optimizer.type": {"optimizer": {"params": {"lr": 1}}},
    "scheduler.type": {"scheduler": {"type": "warmuplr"}},
}  # fmt: skip


@pytest.mark.parametrize("path", CONFLICTS)
def test_conflicts_name_the_key(path):
    with pytest.raises(ConfigError, match=rf"(^configuration: |\n  ){path}: "):
        load(CONFLICTS[path])


@pytest.mark.parametrize(
    "settings",
    [
        {"prescale_gradients": True, "zero_optimization": {"stage": 2, "reduce_scatter": False}},
        {"prescale_gradients": True, "zero_optimization": {"stage": 1}},
        {"gradient_predivide_factor": 2, "zero_optimization": {"stage": 0}},
        {"bf16": True, "data_types": {"grad_accum_dtype": "fp16"}, "zero_optimization": {"stage": 1}},
        {"bf16": True, "data_types": {"grad_accum_dtype": "fp32"}},
        {"bf16": True, "data_types": {"grad_accum_dtype": "bf16"}, "pipeline": {"stages": 2}},
        {"elasticity": {"enabled": True, "micro_batch_sizes": [2], "max_train_batch_size": 8}},
        {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
        in_files(stage=1, offload_optimizer={}),
        in_files(stage=2, offload_optimizer={}),
        in_files(offload_param={"max_in_cpu": 0}),
        in_files(offload_param={}, zero_quantized_nontrainable_weights=True),
        in_files(offload_param={"device": "cpu"}, zero_hpz_partition_size=2),
        in_files(offload_param={"device": "cpu"}, mics_shard_size=2),
        in_files(offload_param={"device": "cpu", "buffer_count": 0}),
        {"zero_optimization": {"stage": 2, "sub_group_size": 0}},
        {"zero_optimization": {"stage": 0, "allgather_bucket_size": 0}},
        in_files(offload_optimizer={"ratio": 0.0}),
    ],
)
def test_what_stands_near_a_conflict_is_legal(settings):
    load(settings)


@pytest.mark.parametrize(
    ("kind", "params", "key"),
    [
        ("Adam", {"beta": [0.9, 0.99]}, "beta"),
        ("AdamW", {"lr": -1}, "lr"),
        ("adamw", {"betas": [0.9]}, "betas"),
        ("adam", {"betas": [0.9, 1.0]}, "betas"),
        ("Adam", {"eps": "small"}, "eps"),
        ("Adam", {"eps": -1}, "eps"),
        ("Adam", {"adam_w_mode": "false"}, "adam_w_mode"),
        ("Adam", {"amsgrad": True}, "amsgrad"),
        ("Adam", {"fused": True}, "fused"),
        ("SGD", {"momentun": 0.9}, "momentun"),
        ("SGD", {"nesterov": 1}, "nesterov"),
        ("RMSprop", {"max_grad_norm": 0}, "max_grad_norm"),
    ],
)
def test_optimizer_keywords(kind, params, key):
    with pytest.raises(ConfigError, match=rf"^configuration: optimizer\.params\.{key}: "):
        load({"optimizer": {"type": kind, "params": params}})


@pytest.mark.parametrize("kind", ["Adam", "adamw", "Adagrad", "lion", "Lamb", "SGD", None])
def test_states_of_own_optimizers_may_rest_in_files(kind):
    load({"optimizer": {"type": kind}, **in_files(offload_optimizer={})})


@pytest.mark.parametrize("kind", ["SparseAdam"])
def test_states_of_other_optimizers_may_not(kind):
    settings = {"optimizer": {"type": kind}, **in_files(offload_optimizer={})}
    with pytest.raises(
        ConfigError,
        match=rf'optimizer\.type: "{kind}" cannot keep .* Adagrad, Lion, Lamb, Muon, SGD, .* Rprop, or set .* cpu',
    ):
        load(settings)
    settings["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    load(settings)


@pytest.mark.parametrize(
    ("given", "limit"),
    [(5, 5), ("4e9", 4 * 10**9), ("4GB", 4 * 10**9), ("4GiB", 4 << 30), ("auto", None), (2e9, 2 * 10**9)],
)
def test_a_limit_of_memory_has_units(given, limit):
    assert load({"host_memory_limit": given}).config.host_memory_limit == limit


@pytest.mark.parametrize("given", ["much", True, 1.5, "4 potatoes", [4], {}])
def test_a_limit_of_memory_is_bytes(given):
    with pytest.raises(ConfigError, match=r"host_memory_limit: expected (bytes, such as|a whole number)"):
        load({"host_memory_limit": given})
    with pytest.raises(ConfigError, match="host_memory_limit: must be at least 1"):
        load({"host_memory_limit": 0})


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        (
            "Adamm",
            {},
            r'optimizer\.type: unknown optimizer "Adamm"; did you mean "Adam"\? Known are Adam, .* RMSprop, ',
        ),
        ("rmsprop", {}, r'optimizer\.type: .*did you mean "RMSprop"'),
        ("LBFGS", {}, r"optimizer\.type: LBFGS cannot be used: its step"),
        ("RMSprop", {"alphaa": 0.9}, r'optimizer\.params\.alphaa: unknown keyword .*did you mean "alpha"'),
        ("RMSprop", {"alphaa": "auto"}, r'optimizer\.params\.alphaa: unknown keyword \(value "auto"\)'),
        ("RMSprop", {"lr": "fast"}, r'optimizer\.params\.lr: expected a learning rate .*found "fast"'),
        ("RMSprop", {"momentum": -1}, r"optimizer\.params: RMSprop of torch refuses .*Invalid momentum value: -1"),
        ("Adamax", {"betas": [0.9]}, r"optimizer\.params: Adamax of torch refuses"),
        ("Adam", {"torch_adam": True, "bias_correction": True}, r"optimizer\.params\.bias_correction: unknown"),
        ("SGD", {"nesterov": True}, r"optimizer\.params\.nesterov: SGD needs momentum"),
        ("Lamb", {"min_coeff": 3, "max_coeff": 2}, r"optimizer\.params\.min_coeff: 3 is above max_coeff"),
        ("OneBitAdam", {"comm_backend_name": "gloo"}, r"optimizer\.params\.comm_backend_name: expected one of nccl"),
    ],
)
def test_what_torch_or_a_rule_would_refuse_in_the_run_is_refused_at_once(kind, params, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load({"optimizer": {"type": kind, "params": params}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Adam", "Lamb", "Adagrad", "OneBitAdam"])
def test_a_large_eps_is_legal(kind):
    load({"optimizer": {"type": kind, "params": {"eps": 2}}})


def test_keywords_of_torch_optimizers():
    load({"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9, "foreach": None}}})
    load({"optimizer": {"type": "Adamax", "params": {"betas": [0.9, 0.99], "lr": "auto"}}})
    load({"optimizer": {"type": "Muon", "params": {"momentum": 0.9}}})
    load({"optimizer": {"type": "Adam", "params": {"torch_adam": True, "fused": True, "amsgrad": True}}})


@pytest.mark.parametrize(
    ("kind", "params", "key"),
    [
        ("WarmupLR", {"warmup_steps": 10}, "warmup_steps"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_max_lr": []}, "warmup_max_lr"),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, "total_num_steps"),
        ("WarmupCosineLR", {}, "total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0}, "cycle_max_lr"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("LRRangeTest", {"lr_range_test_staircase": "yes"}, "lr_range_test_staircase"),
    ],
)
def test_schedule_keywords(kind, params, key):
    with pytest.raises(ConfigError, match=rf"^configuration: scheduler\.params\.{key}: "):
        load({"scheduler": {"type": kind, "params": params}})


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        (
            "WarmupLRR",
            {},
            r'scheduler\.type: unknown schedule "WarmupLRR"; did you mean "WarmupLR"\? Known are LRRange',
        ),
        ("stepLR", {}, r'scheduler\.type: .*did you mean "StepLR"'),
        ("StepLR", {}, r"scheduler\.params\.step_size: required by StepLR"),
        ("StepLR", {"step_size": "auto"}, r"scheduler\.params\.step_size: required by StepLR"),
        ("StepLR", {"step_size": "ten"}, r'scheduler\.params\.step_size: expected a whole number, found "ten"'),
        ("StepLR", {"step_size": 3, "gama": 0.1}, r'scheduler\.params\.gama: .*did you mean "gamma"'),
        ("OneCycleLR", {"max_lr": 0.1}, r"scheduler\.params: OneCycleLR of torch refuses"),
    ],
)
def test_schedules_that_do_not_exist_or_cannot_be_made(kind, params, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load({"scheduler": {"type": kind, "params": params}})
    assert "\n" not in str(caught.value)


def test_schedules_of_torch_and_lists_per_group():
    load({"scheduler": {"type": "OneCycleLR", "params": {"max_lr": [0.1, 0.2], "total_steps": 10}}})
    load({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}})
    load({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0.1], "warmup_max_lr": [1, 2]}}})


def test_an_unknown_warmup_type_warns():
    loaded = load({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "square"}}})
    assert "log is used" in loaded.warnings[0]


def test_accepted_without_effect_is_said():
    loaded = load({"nebula": True, "zero_optimization": {"elastic_checkpoint": True}, "vocabulary_size": 9})
    assert [warning.split()[0] for warning in loaded.warnings] == [
        "nebula", "zero_optimization.elastic_checkpoint", "vocabulary_size",
    ]  # fmt: skip
    require_available(loaded.config)


def test_second_copies_over_the_ranks_of_a_shard_group_are_one_warning():
    zero = {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}
    (said,) = load({"zero_optimization": zero}).warnings
    assert "zero_hpz_partition_size has no effect here" in said
    assert "same 2 ranks" in said
    for other in (
        {"mics_shard_size": 4},
        {"mics_shard_size": 1, "zero_hpz_partition_size": 1},
        {"mics_shard_size": -1},
    ):
        assert load({"zero_optimization": zero | other}).warnings == []


ASKS = {
    "zero_optimization.stage": {"zero_optimization": {"stage": 3}},
    "zero_optimization.zero_hpz_partition_size": {"zero_optimization": {"zero_hpz_partition_size": 4}},
    "zero_optimization.ignore_unused_parameters": {"zero_optimization": {"ignore_unused_parameters": False}},
    "zero_optimization.load_from_fp32_weights": {"zero_optimization": {"load_from_fp32_weights": False}},
    "zero_optimization.zeropp_loco_param": {"zero_optimization": {"zeropp_loco_param": {}}},
    "zero_optimization.mics_shard_size": {"zero_optimization": {"mics_shard_size": 2}},
    "weight_quantization": {"weight_quantization": {"post_init_quant": {"fc": {"num_bits": 4}}}},
    "pipeline.stages": {"pipeline": {"stages": 2}},
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
    "tensor_parallel.tensor_parallel.tp_size": {"tensor_parallel": {"tp": {"tp_size": 2}}},
    "expert_parallel.score_apply": {"expert_parallel": {"score_apply": "pre"}},
    "expert_parallel.comm_backend": {"expert_parallel": {"comm_backend": "deepep"}},
    "sparse_gradients": {"sparse_gradients": True},
} | {
    name: {name: True}
    for name in (
        "hybrid_engine",
    )
} | {
    f"zero_optimization.{name}": {"zero_optimization": {name: True}}
    for name in (
        "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
        "zero_quantized_in_node", "mics_hierarchical_params_gather",
    )
}  # fmt: skip


def test_tiers_are_available():
    for settings in (
        {"zero_optimization": {"stage": 1, "cpu_offload": True}},
        {"zero_optimization": {"stage": 3, "cpu_offload_param": True, "cpu_offload": True}},
        in_files(offload_param={}, offload_optimizer={}),
    ):
        require_available(load(settings).config)


@pytest.mark.parametrize("row", UNAVAILABLE, ids=lambda row: row.path)
def test_each_missing_part_is_refused_by_name(row):
    loaded = load(ASKS[row.path])
    with pytest.raises(ConfigError, match=rf"(^ds\.json: |\n  ){row.path}: .*not available"):
        require_available(loaded.config, "ds.json")


def test_the_table_names_fields_and_defaults_ask_for_nothing():
    paths = {field.path for field in walk(Config)}
    assert {row.path for row in UNAVAILABLE} <= paths
    require_available(Config())


def test_several_missing_parts_are_told_at_once():
    loaded = load({"fp16": {"enabled": True}, "hybrid_engine": True, "expert_parallel": {"score_apply": "pre"}})
    with pytest.raises(ConfigError, match="2 problems"):
        require_available(loaded.config)


def test_batches_of_ranks_that_share_sequences():
    settings = {"train_batch_size": 6, "sequence_parallel_size": 2}
    accept(settings, "ds.json", 4)  # two times two ranks, three samples for each two
    accept({**settings, "train_batch_size": 5}, "ds.json", 2)
    with pytest.raises(ConfigError, match=r"sequence_parallel_size: 2 ranks cannot share each seq.* choose 1 or 3"):
        accept(settings, "ds.json", 3)
    with pytest.raises(ConfigError, match="train_batch_size"):
        accept({**settings, "train_batch_size": 5}, "ds.json", 4)


def test_an_experiment_is_continued_by_its_key():
    comet = {"enabled": True, "mode": "get"}
    with pytest.raises(ConfigError, match=r"comet\.mode: get continues an experiment and needs its key"):
        accept({"comet": comet}, "ds.json")
    for settings in (comet | {"experiment_key": "k" * 32}, comet | {"mode": "create"}, comet | {"enabled": False}):
        accept({"comet": settings}, "ds.json")


def test_adagrad_falls_to_torch():
    require_available(load({"optimizer": {"type": "Adagrad", "params": {"lr_decay": 0.1}}}).config)


@pytest.mark.parametrize("limit", [True, -5, 1e39, [], {}, "soon"])
def test_a_time_that_is_none_is_one_mistake(limit):
    with pytest.raises(ConfigError) as caught:
        load({"walltime": {"limit": limit}})
    assert str(caught.value).startswith("configuration: walltime.limit: Input should be seconds, or a time such as ")


@pytest.mark.deepspeed_row("a17")
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"elasticity": ELASTIC, "train_batch_size": 4}, ElasticityConfigError),
        ({"elasticity": {**ELASTIC, "micro_batch_sizes": []}}, ElasticityConfigError),
        ({"elasticity": {**ELASTIC, "version": "new"}, "gradient_clipping": -1}, ElasticityConfigError),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, NotImplementedError),
        ({"amp": {"enabled": True}, "fp16": {"enabled": True}}, NotImplementedError),
    ],
)
def test_errors_that_scripts_catch_by_type(settings, error):
    with pytest.raises(error) as caught:
        load(settings)
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(ConfigError) as plain:
        load({"gradient_clipping": -1})
    assert type(plain.value) is ConfigError


def test_torch_adam_with_states_in_files_is_left_as_it_is():
    params = {"torch_adam": True, "fused": None, "lr": 0.1, "maximize": False, "amsgrad": True}
    for kind in ("Adam", "AdamW"):
        loaded = load({"optimizer": {"type": kind, "params": params}, **in_files(offload_optimizer={})})
        assert loaded.config.optimizer.params == params
        assert not any("torch_adam" in text for text in loaded.warnings)


def test_sections_made_in_code_take_old_spellings():
    made = ZeroOptimization(
        stage=3, stage3_max_live_parameters=7, cpu_offload=True, cpu_offload_use_pin_memory=True,
        stage3_gather_fp16_weights_on_model_save=True, cpu_offload_param=True,
    )  # fmt: skip
    assert made.max_live_parameters == 7
    assert made.offload_optimizer.device == made.offload_param.device == "cpu"
    assert made.gather_16bit_weights_on_model_save
    for given in ({"stage3_max_live_parameters": 7, "max_live_parameters": 8}, {"cpu_offload": 1}):
        with pytest.raises(ValueError, match=r"the same setting|expected true or false"):
            ZeroOptimization(**given)


def test_steps_per_print_may_be_infinite():
    assert load({"steps_per_print": float("inf")}).config.steps_per_print is None
    assert Config(steps_per_print=float("inf")).steps_per_print is None


def test_parameters_of_1_bit_optimizers_without_effect_warn():
    params = {"cuda_aware": True, "comm_backend_name": "nccl", "bias_correction": True}
    said = load({"optimizer": {"type": "OneBitAdam", "params": params}}).warnings
    assert [text.split()[0] for text in said] == [
        "optimizer.params.bias_correction", "optimizer.params.cuda_aware", "optimizer.params.comm_backend_name"
    ]  # fmt: skip
    assert not load({"optimizer": {"type": "OneBitAdam", "params": {"comm_backend_name": "mpi"}}}).warnings


def test_measured_steps_of_a_search_end_after_they_begin():
    steps = {"start_profile_step": 7, "end_profile_step": 7}
    assert load({"autotuning": steps}).config.autotuning.end_profile_step == 7
    with pytest.raises(ConfigError, match=r"autotuning\.start_profile_step.*7 is after end_profile_step 5"):
        load({"autotuning": {"start_profile_step": 7}})


def test_a_trace_ends_after_it_begins():
    assert load({"trace": {"enabled": True, "start_step": 7, "end_step": 7}}).config.trace.end_step == 7
    with pytest.raises(ConfigError, match=r"trace\.end_step.*the last traced step, 5, comes before the first, 7"):
        load({"trace": {"start_step": 7}})
