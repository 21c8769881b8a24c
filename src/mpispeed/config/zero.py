"""ZeRO: which model states are cut over the data-parallel ranks, and how they move."""

from __future__ import annotations

from pydantic import Field

from mpispeed.config.offload import OffloadOptimizer, OffloadParam
from mpispeed.config.section import Integer, Natural, Positive, Real, Section, Stage


class LocoParam(Section):
    """Error feedback of quantized gradients."""

    err_beta: Real = Field(0.8, description="Weight of the old error.")
    reset_T: Positive = Field(1024, description="Steps after which the error is forgotten.")


class ZeroOptimization(Section):
    """What is cut over the data-parallel ranks: 1 masters and states, 2 also gradients, 3 also parameters."""

    stage: Stage = Field(0, description="0 nothing, 1 masters and optimizer states, 2 and gradients, 3 and parameters.")
    contiguous_gradients: bool = Field(True, description="Copy gradients into one buffer as they appear.")
    reduce_scatter: bool = Field(True, description="Reduce gradients by reduce-scatter rather than all-reduce.")
    reduce_bucket_size: Natural = Field(5 * 10**8, description="Elements reduced at once.")
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="One all-reduce for a bucket that spans several owners; used when reduce_scatter is off."
    )
    allgather_partitions: bool = Field(True, description="Collect updated parameters by all-gather.")
    allgather_bucket_size: Natural = Field(5 * 10**8, description="Elements gathered at once.")
    overlap_comm: bool | None = Field(
        None, description="Reduce during the backward pass; null is true at stage 3 and false below."
    )
    load_from_fp32_weights: bool = Field(True, description="Load masters from the fp32 values of a checkpoint.")
    elastic_checkpoint: bool = Field(False, description="No effect: every checkpoint loads at any number of ranks.")
    offload_param: OffloadParam | None = Field(None, description="Where parameters rest (stage 3).")
    offload_optimizer: OffloadOptimizer | None = Field(None, description="Where masters and optimizer states rest.")
    sub_group_size: Natural = Field(10**9, description="Elements that are updated at once.")
    prefetch_bucket_size: Natural = Field(5 * 10**7, description="Stage 3: elements fetched ahead.")
    param_persistence_threshold: Natural = Field(10**5, description="Stage 3: smaller parameters stay whole.")
    model_persistence_threshold: Natural = Field(2**63 - 1, description="Stage 3: elements that may stay whole in all.")
    max_live_parameters: Natural = Field(10**9, description="Stage 3: elements that may be whole at once.")
    max_reuse_distance: Natural = Field(
        10**9, description="Stage 3: keep a parameter that is used again within so many elements."
    )
    gather_16bit_weights_on_model_save: bool = Field(False, description="Stage 3: save whole 16-bit weights.")
    module_granularity_threshold: Integer = Field(0, description="Stage 3: fetch small modules as one.")
    use_all_reduce_for_fetch_params: bool = Field(False, description="Stage 3: fetch by all-reduce.")
    ignore_unused_parameters: bool = Field(
        True, description="Accept parameters without a gradient; false refuses them."
    )
    legacy_stage1: bool = Field(False, description="Removed; only false is accepted.")
    round_robin_gradients: bool = Field(False, description="Stages 1, 2: spread the copies of gradients over ranks.")
    zero_hpz_partition_size: Positive = Field(1, description="Ranks over which a second copy of parameters is cut.")
    zero_quantized_weights: bool = Field(False, description="Fetch parameters as 8-bit integers.")
    zero_quantized_nontrainable_weights: bool = Field(False, description="The same for parameters without gradient.")
    zero_quantized_gradients: bool = Field(False, description="Reduce gradients as small integers.")
    zeropp_loco_param: LocoParam | None = Field(None, description="Error feedback of quantized gradients.")
    mics_shard_size: Integer = Field(-1, description="Ranks over which parameters are cut; -1 is all.")
    mics_hierarchical_params_gather: bool = Field(False, description="Fetch between nodes, then inside them.")
    memory_efficient_linear: bool = Field(True, description="Stage 3: linear layers keep no whole weights.")
    override_module_apply: bool = Field(True, description="Stage 3: gather parameters for Module.apply.")
    pipeline_loading_checkpoint: bool = Field(False, description="Stage 3: ranks of a node load in turn.")
    log_trace_cache_warnings: bool = Field(False, description="Stage 3: warn when the order of use changes.")
