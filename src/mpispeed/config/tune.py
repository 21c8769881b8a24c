"""Search for fast settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Natural, Positive, Section


class ModelInfo(Section):
    """What is known of the model."""

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
    overwrite: bool = Field(True, description="Delete both folders first.")
    start_profile_step: Natural = Field(3, description="First measured step.")
    end_profile_step: Natural = Field(5, description="Last measured step.")
    metric: Literal["latency", "throughput", "flops"] = Field("throughput", description="What is to be best.")
    metric_path: str | None = Field(None, description="File of the measured value.")
    model_info_path: str | None = Field(None, description="File of the model's facts.")
    tuner_type: Literal["gridsearch", "random", "model_based"] = Field("gridsearch", description="Search method.")
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
