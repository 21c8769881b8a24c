"""The sections amp and torch_autocast: what Apex's levels stand for, and settings that do not fit together.

Source: Apex's documentation, "opt_levels and Properties"; DeepSpeed's, "Mixed Precision Training".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from mpispeed.base.errors import UnimplementedOption
from mpispeed.config.precision import Amp, Dtype
from mpispeed.config.problems import Problem, show

if TYPE_CHECKING:
    from mpispeed.config.root import Config

Scale = float | Literal["dynamic"]

SAFE_MODULES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")
"""What `torch_autocast.lower_precision_safe_modules` is where it is left out."""


class Level(NamedTuple):
    """The settings of an optimization level of Apex.

    Attributes:
        model: dtype to which the model is cast; None: it stays as it is.
        casts_functions: functions of torch compute in the dtype that is best for them.
        keeps_norms: BatchNorms stay in fp32.
        has_masters: parameters in 16 bits have copies in fp32.
        scale: the loss scale.
    """

    model: Dtype | None
    casts_functions: bool
    keeps_norms: bool
    has_masters: bool
    scale: Scale


LEVELS = {
    "O0": Level("fp32", casts_functions=False, keeps_norms=False, has_masters=False, scale=1.0),
    "O1": Level(None, casts_functions=True, keeps_norms=False, has_masters=False, scale="dynamic"),
    "O2": Level("fp16", casts_functions=False, keeps_norms=True, has_masters=True, scale="dynamic"),
    "O3": Level("fp16", casts_functions=False, keeps_norms=False, has_masters=False, scale=1.0),
}
DEFAULT_LEVEL = "O1"


def level_of(amp: Amp) -> Level:
    """The level of the section, with what it replaces."""
    base, keeps = LEVELS[amp.opt_level or DEFAULT_LEVEL], amp.keep_batchnorm_fp32
    model = amp.cast_model_type or base.model
    return Level(
        model=model,
        casts_functions=base.casts_functions if amp.patch_torch_functions is None else amp.patch_torch_functions,
        keeps_norms=(base.keeps_norms if keeps is None else keeps) and model in ("fp16", "bf16"),
        has_masters=base.has_masters if amp.master_weights is None else amp.master_weights,
        scale=base.scale if amp.loss_scale is None else amp.loss_scale,
    )


def cast_dtype(config: Config) -> Dtype | None:
    """Format to which the model is cast by fp16, bf16 or amp; None: each of its tensors keeps its own."""
    if config.fp16.enabled:
        return "fp16"
    if config.bf16.enabled:
        return "bf16"
    return level_of(config.amp).model if config.amp.enabled else None


def check_mixed(config: Config) -> Iterator[Problem]:
    """Conflicts of amp and torch_autocast with other settings."""
    amp, cast = config.amp, config.torch_autocast
    others = [name for name in ("fp16", "bf16") if getattr(config, name).enabled]
    if amp.enabled and others:
        yield Problem("amp.enabled", "amp and fp16 or bf16 are both enabled", "choose one of them", UnimplementedOption)
    if amp.enabled:
        yield from _check_amp(amp)
    if not cast.enabled:
        return
    others += ["amp"] if amp.enabled else []
    if others:
        what = f"torch_autocast keeps parameters in fp32, and {' and '.join(others)} is enabled too"
        yield Problem("torch_autocast.enabled", what, "choose one of them")
    if config.communication_data_type not in (None, "fp32"):
        what = (
            f"{show(config.communication_data_type)} does not go with torch_autocast, which sends gradients of "
            "lower_precision_safe_modules in its dtype, and others in fp32"
        )
        yield Problem("communication_data_type", what, "leave the key out")


def _check_amp(amp: Amp) -> Iterator[Problem]:
    """What contradicts the level."""
    name = amp.opt_level or DEFAULT_LEVEL
    if name == "O1":
        why = "O1 converts what functions of torch are given; the model stays as it is"
        for key in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
            value = getattr(amp, key)
            if value is not None:
                yield Problem(f"amp.{key}", f"{show(value)} has no meaning at O1: {why}", "leave it out, or use O2")
    elif amp.patch_torch_functions:
        what = f"true belongs to O1, found opt_level {name}, which casts the model as a whole"
        yield Problem("amp.patch_torch_functions", what, "leave it out, or use O1")
    if amp.loss_scale == 0:
        yield Problem("amp.loss_scale", "a static scale is more than 0, found 0", 'use "dynamic" or 1')
    least, most = amp.min_loss_scale, amp.max_loss_scale
    if least is not None and least > most:
        yield Problem("amp.min_loss_scale", f"{least:g} is more than max_loss_scale {most:g}", "make it smaller")
