"""ZeRO: model states sharded over the data-parallel ranks, and their communication."""

from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import Field, model_validator

from mpispeed.base.log import once
from mpispeed.config import legacy
from mpispeed.config.offload import OffloadOptimizer, OffloadParam
from mpispeed.config.section import Integer, Natural, Positive, Real, Section, Stage

log = logging.getLogger(__name__)


class LocoParam(Section):
    """Error feedback of quantized gradients."""

    err_beta: Real = Field(0.8, description="Weight of the old error.")
    reset_T: Positive = Field(1024, description="Steps after which the error is forgotten.")


class ZeroOptimization(Section):
    """States sharded over data-parallel ranks: 1 masters and optimizer states, 2 also gradients, 3 also parameters.

    Made in code, it takes the old spellings too: stage3_*, cpu_offload and the others that files may have.
    """

    stage: Stage = Field(0, description="0 nothing, 1 masters and optimizer states, 2 and gradients, 3 and parameters.")
    contiguous_gradients: bool = Field(True, description="Copy gradients into one buffer as they appear.")
    reduce_scatter: bool = Field(
        True, description="Stages 1 to 3: sum gradients by reduce-scatter, else by all-reduce."
    )
    reduce_bucket_size: Natural = Field(
        5 * 10**8,
        description="Most elements in one unit of several parameters; units are reduced, fetched and updated as one.",
    )
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="One all-reduce for a bucket that spans several owners; used when reduce_scatter is off."
    )
    allgather_partitions: bool = Field(
        True, description="Collect updated parameters by all-gather; false: by a broadcast from each owner in turn."
    )
    allgather_bucket_size: Natural = Field(
        5 * 10**8,
        description="Most elements of one message that collects updated parameters, on the receiving side; an "
        "all-gather has at least one element of each rank.",
    )
    overlap_comm: bool | None = Field(
        None, description="Reduce during the backward pass; null is true at stage 3 and false below."
    )
    load_from_fp32_weights: bool = Field(True, description="Load masters from the fp32 values of a checkpoint.")
    elastic_checkpoint: bool = Field(False, description="No effect: every checkpoint loads at any number of ranks.")
    offload_param: OffloadParam | None = Field(None, description="Where parameters rest (stage 3).")
    offload_optimizer: OffloadOptimizer | None = Field(None, description="Where masters and optimizer states rest.")
    sub_group_size: Natural = Field(
        10**9,
        description="Stage 3: most elements that an optimizer updates at once; optimizers that look at whole "
        "parameters, those of torch and 1-bit ones ignore it. With offload_optimizer.device nvme: most fp32 elements "
        "of one buffer between disk and update.",
    )
    prefetch_bucket_size: Natural = Field(
        5 * 10**7, description="Stage 3: elements fetched before they are needed; 0 is off."
    )
    param_persistence_threshold: Natural = Field(
        10**5,
        description="Elements up to which neighbouring small modules form one unit (at every stage), and up to which a "
        "unit stays whole (stage 3). A unit is a block of the model, or what stands between two blocks.",
    )
    model_persistence_threshold: Natural = Field(
        2**63 - 1, description="Stage 3: elements that stay whole in all, at most."
    )
    max_live_parameters: Natural | None = Field(
        None,
        description="Stage 3: elements that are whole at once, at most, beside the unit that is needed. null: what the "
        "largest block and the one fetched ahead of it need.",
    )
    max_reuse_distance: Natural | None = Field(
        None,
        description="Stage 3: keep a unit that is used again before so many elements of others are used. null: those "
        "that are used next, as far as max_live_parameters goes.",
    )
    gather_16bit_weights_on_model_save: bool = Field(
        False, description="Stage 3: allow save_16bit_model, which gathers the model; without it it writes nothing."
    )
    module_granularity_threshold: Integer = Field(
        0,
        description="Stage 3: fetch a module with all below it where that is at most so many elements for each "
        "module; 0 is off.",
    )
    use_all_reduce_for_fetch_params: bool = Field(
        False, description="No effect: parameters are fetched by all-gather, which sends half as much."
    )
    ignore_unused_parameters: bool = Field(
        True, description="Accept parameters without a gradient; false refuses them."
    )
    legacy_stage1: bool = Field(False, description="Removed; only false is accepted.")
    round_robin_gradients: bool = Field(False, description="Stages 1, 2: spread the copies of gradients over ranks.")
    divergent_modules: Literal["error", "union"] = Field(
        "error",
        description="Stage 3: what happens when ranks run different modules: an error that names them, or every rank "
        "takes part in fetching what any of them needs.",
    )
    zero_hpz_partition_size: Positive = Field(1, description="Ranks over which a second copy of parameters is cut.")
    zero_quantized_weights: bool = Field(False, description="Fetch parameters as 8-bit integers.")
    zero_quantized_nontrainable_weights: bool = Field(False, description="The same for parameters without gradient.")
    zero_quantized_gradients: bool = Field(False, description="Reduce gradients as small integers.")
    zero_quantized_in_node: bool = Field(
        False,
        description="zero_quantized_weights and zero_quantized_gradients also among ranks of one node, where coding "
        "costs more time than plain values.",
    )
    zeropp_loco_param: LocoParam | None = Field(None, description="Error feedback of quantized gradients.")
    mics_shard_size: Integer = Field(-1, description="Ranks over which parameters are cut; -1 is all.")
    mics_hierarchical_params_gather: bool = Field(False, description="Fetch between nodes, then inside them.")
    memory_efficient_linear: bool = Field(True, description="No effect: no module keeps whole weights.")
    override_module_apply: bool = Field(True, description="zero.Init: gather cut parameters for Module.apply.")
    pipeline_loading_checkpoint: bool = Field(
        False, description="No effect: no rank reads more of a checkpoint than its own part."
    )
    save_muon_momentum_buffer_in_memory: bool = Field(
        False,
        description="Optimizer Muon with offload_optimizer.device nvme: keep its momentum in host memory, and the "
        "other states in files.",
    )
    log_trace_cache_warnings: bool = Field(
        False, description="Stage 3: warn on rank 0 when modules are used in another order than before."
    )

    @model_validator(mode="before")
    @classmethod
    def take_old_spellings(cls, given: Any) -> Any:
        """Translate old spellings; a file has none left here."""
        if not isinstance(given, dict):
            return given
        settings, said = legacy.in_section("zero_optimization", given)
        for sentence in said:
            once(log, logging.WARNING, sentence)
        return settings

    @property
    def cpu_offload(self) -> None:
        """Deprecated: what is given becomes offload_optimizer."""

    @property
    def cpu_offload_param(self) -> None:
        """Deprecated: what is given becomes offload_param."""

    @property
    def cpu_offload_use_pin_memory(self) -> None:
        """Deprecated: what is given is ignored."""

    @property
    def stage3_gather_fp16_weights_on_model_save(self) -> bool:
        """Deprecated spelling of gather_16bit_weights_on_model_save."""
        return self.gather_16bit_weights_on_model_save
