"""Sections of features that are not available yet: they are read and checked, and `unavailable` refuses them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mpispeed.config.section import Natural, NonNegative, Positive, Section


class ModelInfo(Section):
    """Known facts about the model."""

    profile: bool = Field(False, description="Measure the rest of these values.")
    num_params: Positive | None = Field(None, description="Parameter elements.")
    hidden_size: Positive | None = Field(None, description="Width.")
    num_layers: Positive | None = Field(None, description="Depth.")


class Autotuning(Section):
    """Search for fast settings."""

    enabled: bool = Field(False, description="Search instead of training.")
    fast: bool = Field(True, description="Try micro-batches only.")
    results_dir: str = Field("autotuning_results", min_length=1, description="Folder of results.")
    exps_dir: str = Field("autotuning_exps", min_length=1, description="Folder of experiments.")
    overwrite: bool = Field(False, description="Delete both folders first.")
    start_profile_step: Natural = Field(3, description="First measured step.")
    end_profile_step: Natural = Field(5, description="Last measured step.")
    metric: Literal["latency", "throughput", "flops"] = Field("throughput", description="What is to be best.")
    metric_path: str | None = Field(None, description="File of the measured value.")
    model_info_path: str | None = Field(None, description="File of the model's facts.")
    tuner_type: Literal["gridsearch", "random", "model_based"] = Field("model_based", description="Search method.")
    tuner_early_stopping: Natural = Field(5, description="Stop after so many trials without progress.")
    tuner_num_trials: Positive = Field(50, description="Most trials.")
    arg_mappings: dict[str, str] | None = Field(None, description="Key of this file -> option of the script.")
    model_info: ModelInfo | None = Field(None, description="What is known of the model.")
    mp_size: Positive = Field(1, description="Ranks that share a model.")
    max_train_batch_size: Positive | None = Field(None, description="Greatest batch.")
    min_train_batch_size: Positive = Field(1, description="Least batch.")
    max_train_micro_batch_size_per_gpu: Positive = Field(1024, description="Greatest micro-batch.")
    min_train_micro_batch_size_per_gpu: Positive = Field(1, description="Least micro-batch.")
    num_tuning_micro_batch_sizes: Positive = Field(3, description="Micro-batches tried.")


class HybridEngine(Section):
    """Train and generate with one set of weights."""

    enabled: bool = Field(False, description="Switch between training and generation.")
    max_out_tokens: Positive = Field(512, description="Most generated tokens.")
    inference_tp_size: Positive = Field(1, description="Ranks that share a layer while generating.")
    release_inference_cache: bool = Field(False, description="Free the key/value cache after each generation.")
    pin_parameters: bool = Field(True, description="Keep parameters in page-locked memory.")
    tp_gather_partition_size: Positive = Field(8, description="Ranks that gather weights together.")


class WeightQuantization(Section):
    """Weights in few bits for inference."""

    enabled: bool = Field(True, description="Quantize what the last two keys name.")
    num_bits: Positive = Field(8, description="Bits of a weight.")
    q_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="Range of the integers.")
    q_groups: Positive = Field(1, description="Groups with their own scale.")
    quantized_initialization: dict[str, Any] = Field(default_factory=dict, description="Quantize while building.")
    post_init_quant: dict[str, Any] = Field(default_factory=dict, description="Quantize after building.")


class SparseAttention(Section):
    """Pattern of the computed blocks of the attention matrix; each mode reads its own keys."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = Field("fixed", description="Pattern.")
    block: Positive = Field(16, description="Rows and columns of a block.")
    different_layout_per_head: bool = Field(False, description="Each head has its own pattern.")
    num_local_blocks: Positive = Field(4, description="fixed: blocks of a local window.")
    num_global_blocks: Natural = Field(1, description="fixed, bigbird: blocks that see and are seen by all.")
    attention: Literal["bidirectional", "unidirectional"] = Field(
        "bidirectional", description="fixed, variable: whether later tokens are seen."
    )
    horizontal_global_attention: bool = Field(False, description="fixed, variable: global blocks see all.")
    num_different_global_patterns: Positive = Field(1, description="fixed: patterns spread over heads.")
    num_random_blocks: Natural = Field(0, description="variable, bigbird: random blocks per row.")
    local_window_blocks: list[Positive] = Field([4], description="variable: sizes of local windows.")
    global_block_indices: list[Natural] = Field([0], description="variable, bslongformer: global blocks.")
    global_block_end_indices: list[Natural] | None = Field(
        None, description="variable, bslongformer: ends of the ranges that begin at global_block_indices."
    )
    num_sliding_window_blocks: Positive = Field(3, description="bigbird, bslongformer: blocks of the window.")


class ProgressiveLayerDrop(Section):
    """Skip layers with a probability that grows during training."""

    enabled: bool = Field(False, description="Drop layers; needs theta and gamma.")
    theta: NonNegative | None = Field(None, description="Part of the layers that is kept in the end.")
    gamma: NonNegative | None = Field(None, description="Rate at which the kept part falls.")
