"""Blocks of experts of other libraries, which take part in expert parallelism: today's AutoEP of DeepSpeed.

Source: DeepSpeed's page of configuration keys, "Expert Parallel (AutoEP)", and the keys that 0.19 reads beside it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import AutoPositive, AutoReal, Natural, Positive, Real, Section

Name = str | None


class ExpertParallel(Section):
    """Blocks of experts of transformers' models are shared out over ranks."""

    enabled: bool = Field(False, description="Find the model's blocks of experts and share their experts out.")
    autoep_size: Positive = Field(1, description="Neighbouring data ranks that share the experts of a block out.")
    expert_tensor_parallel_size: Positive = Field(1, description="Ranks that slice an expert: 1, or those of a layer.")
    validate_folding_routing: bool = Field(False, description="Compare the routing of ranks that slice one model.")
    async_split_plan: bool = Field(False, description="Copy row counts to the host beside the sorting of rows.")
    preset_model: Literal["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "olmoe", "deepseek_v2", "deepseek_v3"] | (
        None
    ) = Field(None, description="Family that all blocks are of; null: each is looked up by its class.")
    use_grouped_mm: bool = Field(True, description="Use grouped products where the device has them; false: a loop.")
    disable_triton_grouped_mm: bool = Field(False, description="Leave Triton's grouped products out.")
    moe_layer_pattern: Name = Field(None, description="Regular expression that names of blocks match as a whole.")
    router_pattern: Name = Field(None, description="Name of the router in a block.")
    expert_pattern: Name = Field(None, description="Name of the experts in a block.")
    expert_w1: Name = Field(None, description="Tensor of gate projections, or of gates and up projections in one.")
    expert_w2: Name = Field(None, description="Tensor of down projections.")
    expert_w3: Name = Field(None, description="Tensor of up projections; null: expert_w1 has them too.")
    expert_activation: Literal["swiglu", "geglu", "silu", "gelu", "relu"] | None = Field(
        None, description="Activation of gates (swiglu is silu, geglu is gelu); null is that of the experts."
    )
    has_shared_experts: bool | None = Field(
        None, description="Blocks have experts for all tokens; null: those of the class of the block."
    )
    shared_experts_pattern: Name = Field(None, description="Name of the experts for all tokens in a block.")
    shared_experts_gate_pattern: Name = Field(None, description="Name of the linear gate of their output.")
    num_experts_attr: Name = Field(None, description="Attribute of model.config that is the number of experts.")
    top_k_attr: Name = Field(None, description="Attribute of model.config that is the experts of a token.")
    top_k: AutoPositive = Field("auto", description="Experts of a token; auto: as the block says.")
    score_func: Literal["auto", "softmax", "sigmoid"] = Field("auto", description="What logits become.")
    score_apply: Literal["auto", "pre", "post"] = Field("auto", description="Weight outputs of experts; pre: inputs.")
    route_norm: bool | None = Field(
        None, description="Divide weights of a token by their sum; null: as the block says."
    )
    route_scale: Real = Field(1.0, description="Factor of weights, beside routed_scaling_factor.")
    routed_scaling_factor: AutoReal = Field("auto", description="Factor of weights; auto: as the block says.")
    num_expert_groups: Positive | None = Field(None, description="Groups of experts; null: as the block says.")
    num_limited_groups: Positive | None = Field(None, description="Groups that a token's experts are in.")
    load_balance_coeff: Real | None = Field(
        None, description="Step of the biases that balance loads without a loss, where blocks have such biases."
    )
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = Field(
        "auto", description="How outputs of experts are added."
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] = Field("auto", description="How rows are weighted.")
    gate_up_impl: Literal["separate", "fused"] = Field("separate", description="Products of gates and up projections.")
    comm_backend: Literal["comm", "deepep"] = Field("comm", description="Library that exchanges rows.")
    comm_num_sm: Positive = Field(12, description="Multiprocessors for deepep.")
    comm_qp_margin: Natural = Field(4, description="Spare queue pairs of deepep.")
    comm_max_tokens_per_rank: Natural = Field(0, description="Most tokens of a rank for deepep.")
