"""DeepSpeed's modules and names, and where each is here.

`deepspeed.*` and the modules of the same paths below `mpispeed` are made from these tables; nothing else is in them.
A module is a path below either package. Sources: DeepSpeed's API reference (0.14 to 0.19) and what transformers,
accelerate, peft, trl and lightning take from it.
"""

from __future__ import annotations

#: what `deepspeed.__version__` and the metadata of that name say; libraries compare it
VERSION = "0.19.8+mpispeed"

_SAFE = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"
)
_LEAVES = "get_z3_leaf_modules set_z3_leaf_modules unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
# DeepSpeed's own libraries call them with an underscore
_GROUPS = (
    " ".join(f"_get_{axis}_parallel_{what}" for axis in ("data", "model") for what in ("group", "rank", "world_size"))
    + " _get_sequence_parallel_rank _get_sequence_parallel_world_size"
    " _get_sequence_data_parallel_group _get_sequence_data_parallel_rank _get_sequence_data_parallel_world_size"
)
_SCHEDULES = "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR VALID_LR_SCHEDULES add_tuning_arguments"
_TOPOLOGY = "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid"
_RECOVERY = (
    "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
    "load_state_dict_from_zero_checkpoint"
)
_PATTERNS = (
    "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig "
    "BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig"
)
_LAYER = {"mpispeed.nn.block": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"}
_ENGINE = {"mpispeed.engine": "Engine=DeepSpeedEngine"}
_LOGGER = {"mpispeed.compat.logger": "logger log_dist LoggerFactory"}
_COMM = {"mpispeed.compat.accelerate_state": "init_distributed is_initialized", "mpispeed.comm": "*"}
_PROFILER = {
    "mpispeed.flops.profiler": "FlopsProfiler",
    "mpispeed.flops.model_profile": "get_model_profile",
}
_SETTINGS = {
    "mpispeed.config.inference": "InferenceConfig=DeepSpeedInferenceConfig TPConfig=DeepSpeedTPConfig "
    "MoEConfig=DeepSpeedMoEConfig QuantizationConfig WeightQuantConfig ActivationQuantConfig QKVQuantConfig "
    "InferenceCheckpointConfig DtypeEnum MoETypeEnum",
}
_INIT = {
    "mpispeed.zero": "Init GatheredParameters register_external_parameter unregister_external_parameter",
    "mpispeed.compat.constructors": "ZeroParamStatus ZeroParamType zero_wrapper_for_fp_tensor_constructor "
    "_orig_torch_arange get_accelerator",
}

#: module -> home of some of its names -> those names; "ours=theirs" where they differ, "*" for all of that home
SERVED: dict[str, dict[str, str]] = {
    "": {
        "mpispeed": "*",
        **_ENGINE,
        "mpispeed.engine.pipeline": "PipelineEngine",
        "mpispeed.optim": "add_tuning_arguments",
        "mpispeed.pipe": "PipelineModule",
        "mpispeed.comm": "=dist",
        **_LOGGER,
        "mpispeed.compat.accelerator": "get_accelerator",
        "mpispeed.config.inference": "InferenceConfig=DeepSpeedInferenceConfig",
        "mpispeed.inference": "default_inference_config",
        "mpispeed.compat.names": "VERSION=__version__ GIT=__git_hash__ GIT=__git_branch__",
    },
    "autotuning": {"mpispeed.tuning.api": "Autotuner"},
    "autotuning.autotuner": {"mpispeed.tuning.api": "Autotuner"},
    "accelerator": {"mpispeed.compat.accelerator": "get_accelerator set_accelerator DeepSpeedAccelerator"},
    "accelerator.real_accelerator": {"mpispeed.compat.accelerator": "get_accelerator set_accelerator"},
    "accelerator.abstract_accelerator": {"mpispeed.compat.accelerator": "DeepSpeedAccelerator"},
    "checkpoint": {"mpispeed.compat.fp32": "clone_tensors_for_torch_save"},
    "checkpoint.utils": {"mpispeed.compat.fp32": "clone_tensors_for_torch_save"},
    "checkpointing": {"mpispeed.checkpointing": "*"},
    "comm": _COMM,
    "comm.comm": _COMM,
    "compression": {"mpispeed.compression": "*"},
    "compression.compress": {"mpispeed.compression": "init_compression redundancy_clean student_initialization"},
    "compression.helper": {
        "mpispeed.compression": "convert_conv1d_to_linear",
        "mpispeed.compat.submodules": "recursive_getattr recursive_setattr",
    },
    "compression.scheduler": {"mpispeed.compression": "compression_scheduler"},
    "elasticity": {"mpispeed.elasticity": "*"},
    "elasticity.elasticity": {"mpispeed.elasticity": "*"},
    "elasticity.config": {
        "mpispeed.elasticity": "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize",
    },
    "git_version_info": {"mpispeed.compat.names": "VERSION=version GIT=git_hash GIT=git_branch"},
    "inference": {"mpispeed.inference": "*"},
    "inference.config": _SETTINGS,
    "inference.engine": {"mpispeed.inference": "InferenceEngine"},
    "module_inject": {"mpispeed.inference": "HFBertLayerPolicy"},
    "module_inject.replace_policy": {
        "mpispeed.inference": "BLOOMLayerPolicy HFBertLayerPolicy HFGPT2LayerPolicy HFGPTJLayerPolicy "
        "HFGPTNEOLayerPolicy HFOPTLayerPolicy LLAMALayerPolicy"
    },
    "launcher.runner": {"mpispeed.compat.launcher": "DEEPSPEED_ENVIRONMENT_NAME main"},
    "moe": {"mpispeed.moe": "*"},
    "moe.experts": {"mpispeed.nn.expert": "ExpertModules=Experts"},
    "moe.layer": {"mpispeed.moe.layer": "*"},
    "moe.sharded_moe": {
        "mpispeed.nn.expert": "RoutedExperts=MOELayer Router=TopKGate",
        "mpispeed.compat.gating": "top1gating top2gating topkgating",
    },
    "moe.utils": {
        "mpispeed.optim.expert_groups": "has_moe_layers is_moe_param is_moe_param_group configure_moe_param_groups "
        "split_params_into_different_moe_groups_for_optimizer split_params_into_shared_and_expert_params "
        "split_params_grads_into_shared_and_expert_params",
    },
    "monitor": {"mpispeed.monitor": "*"},
    "monitor.config": {
        "mpispeed.config.monitor": "Tensorboard=TensorBoardConfig Wandb=WandbConfig CsvMonitor=CSVConfig "
        "Comet=CometConfig MonitorConfig=DeepSpeedMonitorConfig",
    },
    "monitor.comet": {"mpispeed.compat.monitors": "CometMonitor"},
    "monitor.csv_monitor": {"mpispeed.compat.monitors": "CsvFiles=csvMonitor"},
    "monitor.monitor": {
        "mpispeed.compat.monitors": "MonitorMaster TensorBoardMonitor CsvFiles=csvMonitor WandbMonitor CometMonitor"
    },
    "monitor.tensorboard": {"mpispeed.compat.monitors": "TensorBoardMonitor"},
    "monitor.wandb": {"mpispeed.compat.monitors": "WandbMonitor"},
    "ops.adagrad": {"mpispeed.optim": "CPUAdagrad=DeepSpeedCPUAdagrad"},
    "ops.adagrad.cpu_adagrad": {"mpispeed.optim": "CPUAdagrad=DeepSpeedCPUAdagrad"},
    "ops.adam": {"mpispeed.optim": "CPUAdam=DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {"mpispeed.optim": "CPUAdam=DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {"mpispeed.optim": "FusedAdam"},
    "ops.aio": {"mpispeed.aio": "aio_handle aio_read aio_write"},
    "ops.lamb": {"mpispeed.optim": "FusedLamb"},
    "ops.lamb.fused_lamb": {"mpispeed.optim": "FusedLamb"},
    "ops.lion": {"mpispeed.optim": "CPULion=DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {"mpispeed.optim": "CPULion=DeepSpeedCPULion"},
    "ops.lion.fused_lion": {"mpispeed.optim": "FusedLion"},
    "ops.sparse_attention": {
        "mpispeed.nn.sparse": f"{_PATTERNS} SparseSelfAttention BertSparseSelfAttention SparseAttentionUtils MatMul "
        "Softmax"
    },
    "ops.sparse_attention.bert_sparse_self_attention": {"mpispeed.nn.sparse": "BertSparseSelfAttention"},
    "ops.sparse_attention.matmul": {"mpispeed.nn.sparse": "MatMul"},
    "ops.sparse_attention.softmax": {"mpispeed.nn.sparse": "Softmax"},
    "ops.sparse_attention.sparse_attention_utils": {"mpispeed.nn.sparse": "SparseAttentionUtils"},
    "ops.sparse_attention.sparse_self_attention": {"mpispeed.nn.sparse": "SparseSelfAttention"},
    "ops.sparse_attention.sparsity_config": {"mpispeed.nn.sparse": _PATTERNS},
    "ops.transformer": _LAYER,
    "ops.transformer.transformer": _LAYER,
    "pipe": {"mpispeed.pipe": "*"},
    "profiling": {},
    "profiling.config": {"mpispeed.config.monitor": "FlopsProfiler=DeepSpeedFlopsProfilerConfig"},
    "profiling.flops_profiler": _PROFILER,
    "profiling.flops_profiler.profiler": _PROFILER,
    "runtime.activation_checkpointing.checkpointing": {"mpispeed.checkpointing": "*"},
    "runtime.base_optimizer": {"mpispeed.engine.facade": "EngineOptimizer=DeepSpeedOptimizer"},
    "runtime.config": {
        "mpispeed.config.root": "Config=DeepSpeedConfig",
        "mpispeed.base.errors": "ConfigError=DeepSpeedConfigError",
    },
    "runtime.data_pipeline.curriculum_scheduler": {"mpispeed.curriculum": "CurriculumScheduler"},
    "runtime.data_pipeline.data_sampling.data_analyzer": {
        "mpispeed.compat.data_analyzers": "DataAnalyzer DistributedDataAnalyzer",
    },
    "runtime.data_pipeline.data_sampling.indexed_dataset": {
        "mpispeed.curriculum.index_file": "MMapIndexedDataset MMapIndexedDatasetBuilder",
    },
    "runtime.data_pipeline.data_sampling.data_sampler": {"mpispeed.curriculum": "DeepSpeedDataSampler"},
    "runtime.dataloader": {"mpispeed.data": "RepeatingLoader ShardedLoader=DeepSpeedDataLoader"},
    "runtime.data_pipeline.data_routing": {},
    "runtime.data_pipeline.data_routing.basic_layer": {"mpispeed.nn.routing": "RandomLayerTokenDrop"},
    "runtime.data_pipeline.data_routing.helper": {
        "mpispeed.nn.routing": "convert_to_random_ltd save_without_random_ltd remove_random_ltd_state_dict",
    },
    "runtime.data_pipeline.data_routing.scheduler": {"mpispeed.nn.routing": "RandomLTDScheduler"},
    "runtime.eigenvalue": {"mpispeed.engine.curvature": "Eigenvalue"},
    "runtime.engine": {**_ENGINE, "mpispeed.engine.pipeline": "PipelineEngine"},
    "runtime.fp16.onebit": {"mpispeed.optim": "OnebitAdam OnebitLamb ZeroOneAdam"},
    "runtime.fp16.onebit.adam": {"mpispeed.optim": "OnebitAdam"},
    "runtime.fp16.onebit.lamb": {"mpispeed.optim": "OnebitLamb"},
    "runtime.fp16.onebit.zoadam": {"mpispeed.optim": "ZeroOneAdam"},
    "runtime.lr_schedules": {
        "mpispeed.optim": f"{_SCHEDULES} parse_arguments override_params get_config_from_args get_lr_from_config"
    },
    "runtime.pipe": {"mpispeed.pipe": f"PipelineModule LayerSpec TiedLayerSpec {_TOPOLOGY}"},
    "runtime.pipe.engine": {"mpispeed.engine.pipeline": "PipelineEngine"},
    "runtime.pipe.module": {
        "mpispeed.pipe": "PipelineModule LayerSpec TiedLayerSpec",
        "mpispeed.base.errors": "PipelineError",
    },
    "runtime.pipe.schedule": {"mpispeed.pipe.schedule": "*"},
    "runtime.pipe.topology": {"mpispeed.pipe": _TOPOLOGY},
    "runtime.progressive_layer_drop": {"mpispeed.nn.layer_drop": "ProgressiveLayerDrop"},
    "runtime.quantize": {"mpispeed.compression": "Quantizer"},
    "runtime.torch_autocast": {
        "mpispeed.compat.torch_autocast": "get_comm_dtype has_comm_dtype get_default_autocast_lower_precision_modules",
    },
    "runtime.utils": {
        "mpispeed.compat.runtime_utils": "see_memory_usage set_random_seed clip_grad_norm_ get_global_norm "
        "get_global_norm_of_tensors empty_cache move_to_device",
        "mpispeed.compat.partitioned_tensor": "PartitionedTensor",
        "mpispeed.pipe": "partition_balanced partition_uniform",
    },
    "runtime.zero": {"mpispeed.zero": "*"},
    "runtime.zero.config": {
        "mpispeed.config.zero": "ZeroOptimization=DeepSpeedZeroConfig",
        "mpispeed.config.offload": "OffloadParam=DeepSpeedZeroOffloadParamConfig "
        "OffloadOptimizer=DeepSpeedZeroOffloadOptimizerConfig",
    },
    "runtime.zero.linear": {
        "torch.nn": "Linear=LinearModuleForZeroStage3",
        "torch.nn.functional": "linear=zero3_linear_wrap",
    },
    "runtime.zero.mics": {"mpispeed.zero": "MiCS_Init"},
    "runtime.zero.offload_config": {
        "mpispeed.config.offload": "OffloadParam=DeepSpeedZeroOffloadParamConfig "
        "OffloadOptimizer=DeepSpeedZeroOffloadOptimizerConfig",
        "mpispeed.zero": "OffloadStateTypeEnum",
    },
    "runtime.zero.partition_parameters": _INIT,
    "runtime.zero.stage3": {
        "mpispeed.zero": "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
        "estimate_zero3_model_states_mem_needs_all_live",
        "mpispeed.engine.facade": "EngineOptimizer=DeepSpeedZeroOptimizer_Stage3",
    },
    "runtime.zero.stage_1_and_2": {
        "mpispeed.zero": "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
        "estimate_zero2_model_states_mem_needs_all_live",
        "mpispeed.engine.facade": "EngineOptimizer=DeepSpeedZeroOptimizer",
    },
    "runtime.zero.tiling": {"mpispeed.zero": "TiledLinear TiledLinearReturnBias"},
    "runtime.zero.utils": {"mpispeed.zero": "ZeRORuntimeException"},
    "runtime.sequence_parallel.ulysses_sp": {
        "mpispeed.compat.ulysses": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    },
    "sequence.layer": {"mpispeed.compat.sequence_layer": "DistributedAttention"},
    "sequence.cross_entropy": {"mpispeed.nn.sequence.loss": "vocab_sequence_parallel_cross_entropy"},
    "utils": {
        "mpispeed.zero": f"{_SAFE} {_LEAVES} safe_update_full_grad_vectorized",
        "mpispeed.data": "RepeatingLoader",
        "mpispeed.comm": "is_initialized",
        "mpispeed": "OnDevice",
        **_LOGGER,
    },
    "utils.init_on_device": {"mpispeed": "OnDevice"},
    "utils.groups": {
        "mpispeed.compat.groups": f"* {_GROUPS}",
        "mpispeed.compat.sequence_groups": "_get_sequence_parallel_group",
    },
    "utils.logging": _LOGGER,
    "utils.tensor_fragment": {"mpispeed.zero": _SAFE},
    "utils.z3_leaf_module": {"mpispeed.zero": _LEAVES},
    "utils.zero_to_fp32": {"mpispeed.compat.fp32": _RECOVERY},
    "zero": {"mpispeed.zero": "*"},
}

#: git's names of this build: packages are built from release files, which carry none
GIT = "[none]"

#: feature that is not there yet -> module -> its names
LATER: dict[str, dict[str, str]] = {
    "the hybrid engine": {"": "DeepSpeedHybridEngine", "runtime.hybrid_engine": "DeepSpeedHybridEngine"},
    "replacing single layers": {
        "": "replace_transformer_layer revert_transformer_layer",
        "module_inject": "replace_transformer_layer revert_transformer_layer",
        "module_inject.containers": "",
        "ops.transformer.inference": "DeepSpeedInferenceConfig DeepSpeedTransformerInference",
    },
}

#: why a name has no counterpart -> module -> its names
NEVER: dict[str, dict[str, str]] = {
    "checkpoints here are HDF5 files and hold no pickles; open them with mpispeed.checkpoints.open_checkpoint": {
        "utils.zero_to_fp32": "get_model_state_file get_optim_files get_checkpoint_files",
    },
    'a layer is sliced by initialize: set "tensor_parallel" in the config': {"": "tp_model_init"},
}
