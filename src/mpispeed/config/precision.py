"""Number formats: fp16, bf16, amp, torch_autocast, accumulation dtype."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mpispeed.config.section import (
    Integer,
    Names,
    NonNegative,
    Positive,
    PositiveReal,
    ScalePower,
    Section,
    either,
)

Dtype = Literal["fp16", "bf16", "fp32"]
ScaleOrDynamic = Annotated[NonNegative | Literal["dynamic"], either('"dynamic" or a number from 0 on')]
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
    """Mixed precision by Apex's keywords, which torch's autocast or a cast of the model carry out."""

    enabled: bool = Field(False, description="Use mixed precision by these keys; not together with fp16 or bf16.")
    opt_level: Literal["O0", "O1", "O2", "O3"] | None = Field(
        None,
        description="O0: the model in fp32; O1, also null: torch.autocast in fp16; O2: the model in fp16, BatchNorms "
        "in fp32; O3: all in fp16, without a loss scale.",
    )
    cast_model_type: Dtype | None = Field(None, description="Format of the model at O0, O2 and O3.")
    patch_torch_functions: bool | None = Field(None, description="Use torch.autocast; O1 only.")
    keep_batchnorm_fp32: bool | None = Field(None, description="Keep BatchNorms in fp32; null is true at O2.")
    master_weights: bool | None = Field(
        None,
        description="Keep fp32 masters of parameters in 16 bits; null is false at O3; false: the parameters are the "
        "masters, as by data_types.master_dtype.",
    )
    loss_scale: ScaleOrDynamic | None = Field(
        None, description='Static loss scale, or "dynamic"; null is dynamic at O1 and O2, and 1 at O0 and O3.'
    )
    cast_model_outputs: Dtype | None = Field(
        None, description="Format of floating outputs of the model; null is fp32 at O0, O2 and O3."
    )
    num_losses: Positive = Field(1, description="No effect: one scale serves all losses.")
    verbosity: Integer = Field(1, description="No effect: what is cast is in the plan that is logged.")
    min_loss_scale: NonNegative | None = Field(
        None, description="The dynamic scale never goes below this; null: no bound."
    )
    max_loss_scale: PositiveReal = Field(2.0**24, description="The dynamic scale never goes above this.")


class TorchAutocast(Section):
    """Passes through the model within torch.autocast, around parameters in fp32."""

    enabled: bool = Field(
        False, description="Run forward passes within torch.autocast; not together with fp16, bf16 or amp."
    )
    dtype: Literal["fp16", "bf16"] = Field(
        "bf16", description="Format given to torch.autocast; fp16 has a dynamic loss scale."
    )
    lower_precision_safe_modules: Names | None = Field(
        None,
        description="Classes of modules, as package.Class, whose parameters are gathered at stage 3, and whose "
        "gradients are summed, in dtype; null is torch.nn.Linear, Conv1d, Conv2d and Conv3d.",
    )


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
