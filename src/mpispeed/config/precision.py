"""Number formats: fp16, bf16, amp, accumulation dtype."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Integer, NonNegative, Positive, ScalePower, Section

Dtype = Literal["fp16", "bf16", "fp32"]
StateDtype = Literal["fp32", "bf16", "int8"]


class Fp16(Section):
    """Training in half precision with a loss scale."""

    enabled: bool = Field(False, description="Cast the model to fp16 and scale the loss; not together with bf16.")
    auto_cast: bool = Field(False, description="Cast floating positional inputs of the model to fp16.")
    loss_scale: NonNegative = Field(0.0, description="Static loss scale; 0 means dynamic.")
    initial_scale_power: ScalePower = Field(16, description="The dynamic scale starts at 2 to this power.")
    loss_scale_window: Positive = Field(1000, description="Clean steps after which the dynamic scale doubles.")
    hysteresis: Positive = Field(2, description="Overflows that are forgiven before the scale is halved.")
    consecutive_hysteresis: bool = Field(False, description="Refill the forgiven overflows at every clean step.")
    min_loss_scale: NonNegative = Field(1.0, description="The dynamic scale never goes below this.")
    fp16_master_weights_and_grads: bool = Field(
        False, description="Keep masters and accumulated gradients in fp16; ZeRO stages 1 to 3."
    )


class Bf16(Section):
    """Training in bfloat16, without a loss scale."""

    enabled: bool = Field(False, description="Cast the model to bf16; not together with fp16.")
    immediate_grad_update: bool = Field(
        False, description="Add each gradient to the fp32 accumulator as soon as it is there."
    )
    bf16_master_weights_and_grads: bool = Field(
        False, description="Keep masters and accumulated gradients in bf16; ZeRO stages 1 to 3."
    )
    bf16_optimizer_states: bool = Field(
        False, description="Keep the optimizer's states in bf16; with bf16_master_weights_and_grads."
    )


class Amp(Section):
    """Mixed precision by Apex's keywords."""

    enabled: bool = Field(False, description="Use automatic mixed precision; not with ZeRO, fp16 or bf16.")
    opt_level: str | None = Field(None, description="Apex: O0, O1, O2 or O3.")
    cast_model_type: str | None = Field(None, description="Apex: dtype of the model.")
    patch_torch_functions: bool | None = Field(None, description="Apex: patch functions of torch.")
    keep_batchnorm_fp32: bool | None = Field(None, description="Apex: keep batch norms in fp32.")
    master_weights: bool | None = Field(None, description="Apex: keep fp32 master weights.")
    loss_scale: NonNegative | None = Field(None, description="Apex: static loss scale.")
    cast_model_outputs: str | None = Field(None, description="Apex: dtype of the outputs.")
    num_losses: Positive = Field(1, description="Apex: number of losses.")
    verbosity: Integer = Field(1, description="Apex: verbosity.")
    min_loss_scale: NonNegative | None = Field(None, description="Apex: least dynamic scale.")
    max_loss_scale: NonNegative | None = Field(None, description="Apex: greatest dynamic scale.")


class DataTypes(Section):
    """Number formats that are not the model's own."""

    grad_accum_dtype: Literal["fp16", "bf16", "fp32", "int8"] | None = Field(
        None,
        description="Format in which gradients are accumulated; null is fp32, also for 16-bit models.",
    )
    master_dtype: Dtype | None = Field(
        None,
        description="Format in which masters rest between updates: fp32, or that of the 16-bit model; null is fp32 "
        "(mpispeed only).",
    )
    master_rounding: Literal["nearest", "stochastic", "kahan"] = Field(
        "nearest",
        description="How an update rounds 16-bit masters; kahan keeps the rest in a second 16-bit number "
        "(mpispeed only).",
    )
    optimizer_states: StateDtype | dict[str, StateDtype] | None = Field(
        None,
        description="Format in which states of the optimizer rest: one for all, or one by name as exp_avg; int8 has "
        "a scale for each 256 elements; null is fp32 (mpispeed only).",
    )
