"""Formats of numbers that follow from several settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.config.mixed import cast_dtype, level_of

if TYPE_CHECKING:
    from mpispeed.config.root import Config

AMP_KEY = "amp.master_weights"
"""The key that `amp_masters` follows, or the level by itself."""


def train_dtype(config: Config) -> str:
    """Format of the model: fp16, bf16 or fp32."""
    return cast_dtype(config) or "fp32"


def communication_dtype(config: Config) -> str:
    """Format in which gradients travel."""
    return config.communication_data_type or train_dtype(config)


def accumulation_dtype(config: Config) -> str:
    """Format in which gradients are accumulated: fp32 at every stage, also for 16-bit models, unless set."""
    return config.data_types.grad_accum_dtype or masters_and_grads(config) or "fp32"


def masters_and_grads(config: Config) -> str:
    """Format of masters and gradients by the section of the model's, or ""."""
    fp16, bf16 = config.fp16, config.bf16
    if fp16.enabled and fp16.fp16_master_weights_and_grads:
        return "fp16"
    return "bf16" if bf16.enabled and bf16.bf16_master_weights_and_grads else ""


def amp_masters(config: Config) -> str:
    """Format of masters by section amp, where it asks for none beside 16-bit parameters, or ""."""
    if not config.amp.enabled:
        return ""
    level = level_of(config.amp)
    return level.model if level.model in ("fp16", "bf16") and not level.has_masters else ""


def master_dtype(config: Config) -> str:
    """Format in which masters rest: fp32 unless set."""
    return config.data_types.master_dtype or masters_and_grads(config) or amp_masters(config) or "fp32"


def optimizer_dtypes(config: Config) -> str | dict[str, str]:
    """Format in which states of the optimizer rest: one word for all, or one for each that is named."""
    given = config.data_types.optimizer_states
    if given is not None:
        return given if isinstance(given, str) else dict(given)
    return "bf16" if config.bf16.enabled and config.bf16.bf16_optimizer_states else "fp32"


def masters_key(config: Config) -> str:
    """The key that `masters_and_grads` follows."""
    name = masters_and_grads(config)
    return f"{name}.{name}_master_weights_and_grads"
