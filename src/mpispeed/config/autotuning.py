"""The search for fast settings, by `mpispeed tune` or `mpispeed run --autotuning`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Natural, Positive, PositiveReal, Section


class ModelInfo(Section):
    """Known facts about the model; those left out are read off the model that the script gives to `initialize`."""

    profile: bool = Field(False, description="No effect: a search always reads what is left out.")
    num_params: Positive | None = Field(None, description="Parameter elements; sizes of buckets follow from them.")
    hidden_size: Positive | None = Field(None, description="Width; sizes of buckets at stage 3 follow from it.")
    num_layers: Positive | None = Field(None, description="Depth; written beside the others.")


class Autotuning(Section):
    """Search for fast settings. A list in place of a value anywhere else in the file is a set of values to try."""

    enabled: bool = Field(False, description="Lets `--autotuning` search; a run without it trains as ever.")
    fast: bool = Field(
        True, description="Try ZeRO stages, micro-batches and the file's lists; false: then buckets, overlap, offload."
    )
    results_dir: str = Field("autotuning_results", min_length=1, description="Folder of results.")
    exps_dir: str = Field("autotuning_exps", min_length=1, description="Folder of descriptions of trials.")
    overwrite: bool = Field(
        False, description="Delete both folders first; else trials whose results are there are not run again."
    )
    start_profile_step: Natural = Field(3, description="First measured step.")
    end_profile_step: Natural = Field(5, description="Last measured step.")
    metric: Literal["latency", "throughput", "flops"] = Field(
        "throughput",
        description="What is to be best: seconds of a step, samples per second, operations per second of a rank.",
    )
    metric_path: str | None = Field(None, description="File for the figures of the best trial.")
    model_info_path: str | None = Field(None, description="File for the facts about the model.")
    tuner_type: Literal["gridsearch", "random", "model_based"] = Field(
        "model_based",
        description="Order of trials: as listed, by chance, or by step times that a model of them predicts.",
    )
    tuner_early_stopping: Natural = Field(
        5, description="Stop after so many trials without a better one; 0: only when nothing is left to try."
    )
    tuner_num_trials: Positive = Field(50, description="Most trials.")
    arg_mappings: dict[str, str] | None = Field(
        None, description="Key of this file -> option of the script that gets the trial's value."
    )
    model_info: ModelInfo | None = Field(None, description="What is known of the model.")
    mp_size: Positive = Field(1, description="Ranks that share a model in the script's own code.")
    max_train_batch_size: Positive | None = Field(
        None, description="Greatest batch; micro-batches are accumulated up to it."
    )
    min_train_batch_size: Positive = Field(1, description="Least batch.")
    max_train_micro_batch_size_per_gpu: Positive = Field(1024, description="Greatest micro-batch.")
    min_train_micro_batch_size_per_gpu: Positive = Field(1, description="Least micro-batch.")
    num_tuning_micro_batch_sizes: Positive = Field(
        3, description="Micro-batches tried around the best power of two, if the file lists none."
    )
    trial_timeout: PositiveReal | None = Field(
        None,
        description="Seconds after which a trial counts as hung; null is a multiple of the longest good one "
        "(mpispeed only).",
    )
