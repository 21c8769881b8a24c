"""Mixed precision of a run: what its model is cast to, torch's autocast around it, and the loss scale."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpispeed.base.errors import ConfigError
from mpispeed.config.mixed import SAFE_MODULES, Level, cast_dtype, level_of
from mpispeed.config.problems import show
from mpispeed.nn.tensor.embedding import VocabLinear
from mpispeed.nn.tensor.linear import ColumnLinear, RowLinear
from mpispeed.precision.policy import parse_dtype
from mpispeed.precision.scaler import DynamicScale, LossScale, StaticScale

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpispeed.config.precision import Amp, Fp16
    from mpispeed.config.root import Config

FIRST_SCALE = 2.0**16
WINDOW = 2000
"""Where dynamic scales of amp and of autocast begin, and clean steps until they double: those of Apex and of
`torch.amp.GradScaler`."""
SLICES: set[type[nn.Module]] = {ColumnLinear, RowLinear, VocabLinear}
"""What takes the place of torch's linear layers where these are cut over ranks."""
LEAST_SCALE = 2.0**-126
"""A dynamic scale without a bound stays a normal number of fp32."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """The dtypes of a run, as the sections fp16, bf16, amp and torch_autocast ask for them.

    Attributes:
        section: by which the model is cast, "fp16", "bf16", "amp" or "": each of its tensors keeps its own dtype.
        model: dtype to which it is cast; None without `section`.
        autocast: dtype of torch's autocast around passes through the model; None: none.
        lowers: names of classes of modules whose parameters are gathered, and whose gradients are summed, in
            `autocast`.
        keeps_norms: BatchNorms stay in fp32 when the model is cast.
        casts_inputs: floating positional inputs are cast to `model`.
        casts_keywords: those that are given by keyword are, too.
        outputs: dtype of floating outputs; None: as the model gives them.
        is_scaled: the loss is multiplied by a scale.
    """

    section: str = ""
    model: torch.dtype | None = None
    autocast: torch.dtype | None = None
    lowers: tuple[str, ...] = ()
    keeps_norms: bool = False
    casts_inputs: bool = False
    casts_keywords: bool = False
    outputs: torch.dtype | None = None
    is_scaled: bool = False

    @property
    def computes_half(self) -> bool:
        """True if gradients are computed in fp16."""
        return torch.float16 in (self.model, self.autocast)

    def describe(self) -> str:
        """Autocast in words; empty without it."""
        if self.autocast is None:
            return ""
        lowered = f", sums and gathers of {', '.join(self.lowers)} too" if self.lowers else ""
        return f"{str(self.autocast).removeprefix('torch.')}{lowered}"


def mixed_precision(config: Config) -> Mixed:
    """The dtypes that a config asks for."""
    cast = config.torch_autocast
    if config.amp.enabled:
        return _of_amp(config.amp)
    if cast.enabled:
        given = cast.lower_precision_safe_modules
        return Mixed(
            autocast=parse_dtype(cast.dtype, "torch_autocast.dtype"),
            lowers=SAFE_MODULES if given is None else tuple(given),
            is_scaled=cast.dtype == "fp16",
        )
    name = cast_dtype(config)
    if name is None:
        return Mixed()
    is_half = config.fp16.enabled
    return Mixed(
        section=name,
        model=parse_dtype(name, name),
        casts_inputs=is_half and config.fp16.auto_cast,
        is_scaled=is_half,
    )


def _of_amp(amp: Amp) -> Mixed:
    level, outputs = level_of(amp), amp.cast_model_outputs
    if level.model is not None and outputs is None:
        outputs = "fp32"
    model = None if level.model is None else parse_dtype(level.model, "amp.cast_model_type")
    return Mixed(
        section="" if model is None else "amp",
        model=model,
        autocast=torch.float16 if level.casts_functions else None,
        keeps_norms=level.keeps_norms,
        casts_inputs=model is not None,
        casts_keywords=model is not None,
        outputs=None if outputs is None else parse_dtype(outputs, "amp.cast_model_outputs"),
        is_scaled=level.scale != 1.0,
    )


# -- the loss scale --------------------------------------------------------------------------------------------------


def make_scaler(config: Config, mixed: Mixed, *, goes_on: bool) -> LossScale:
    """The loss scale: static 1 where gradients need none, else as fp16, amp or torch_autocast says.

    Args:
        config: the settings.
        mixed: what they ask for.
        goes_on: an overflow at the minimum scale of fp16 does not end the run.
    """
    if not mixed.is_scaled:
        return StaticScale(1.0)
    if config.amp.enabled:
        return _scaler_of_amp(config.amp, level_of(config.amp))
    if config.torch_autocast.enabled:
        return DynamicScale(
            loss_scale_window=WINDOW, hysteresis=1, min_loss_scale=LEAST_SCALE, first_scale=FIRST_SCALE, goes_on=True
        )
    return _scaler_of_half(config.fp16, goes_on=goes_on)


def _scaler_of_half(fp16: Fp16, *, goes_on: bool) -> LossScale:
    """As in DeepSpeed, an overflow at the minimum scale ends the run only where states are sharded."""
    if fp16.loss_scale:
        return StaticScale(float(fp16.loss_scale))
    return DynamicScale(
        initial_scale_power=fp16.initial_scale_power,
        loss_scale_window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_loss_scale=fp16.min_loss_scale,
        goes_on=goes_on,
    )


def _scaler_of_amp(amp: Amp, level: Level) -> LossScale:
    """As Apex's: one overflow halves the scale, and none ends the run."""
    if level.scale != "dynamic":
        return StaticScale(float(level.scale))
    return DynamicScale(
        loss_scale_window=WINDOW,
        hysteresis=1,
        min_loss_scale=amp.min_loss_scale or LEAST_SCALE,
        max_loss_scale=amp.max_loss_scale,
        first_scale=min(FIRST_SCALE, amp.max_loss_scale),
        goes_on=True,
    )


# -- parameters with dtypes of their own -----------------------------------------------------------------------------


def find_norms(model: nn.Module, mixed: Mixed) -> set[int]:
    """`id` of parameters and buffers that stay in fp32 while the model is cast: those of BatchNorms, if that is set."""
    if not mixed.keeps_norms:
        return set()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    own = [tensor for norm in norms for tensor in (*norm.parameters(False), *norm.buffers(False))]
    return {id(tensor) for tensor in own if tensor.is_floating_point()}


def find_lowered(model: nn.Module, mixed: Mixed) -> set[int]:
    """`id` of trained fp32 parameters that are gathered and summed in the dtype of autocast.

    A parameter that modules of several classes share is among them if all of them are named.

    Raises:
        ConfigError: a class is named that does not exist, or is no module.
    """
    if not mixed.lowers:
        return set()
    kinds = set(classes_of(mixed.lowers))
    kinds |= SLICES if nn.Linear in kinds else set()
    found: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        own = {id(param) for param in module.parameters(False) if param.dtype == torch.float32 and param.requires_grad}
        (found if type(module) in kinds else others).update(own)
    return found - others


def classes_of(names: Iterable[str]) -> tuple[type[nn.Module], ...]:
    """The classes of these names.

    Raises:
        ConfigError: there is none of this name, or it is no module.
    """
    return tuple(_class_of(name) for name in names)


def _class_of(name: str) -> type[nn.Module]:
    where, key = name.rpartition(".")[0], "torch_autocast.lower_precision_safe_modules"
    try:
        found = getattr(importlib.import_module(where), name.rpartition(".")[2])
    except (Exception, SystemExit) as error:  # importing runs whatever the module does
        what = f"{type(error).__name__}: {str(error)[:200]}"
        msg = f"{key} names {show(name)}, which cannot be found ({what}); name classes as torch.nn.Linear"
        raise ConfigError(msg) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        msg = f"{key} names {show(name)}, which is no class of modules; name classes as torch.nn.Linear"
        raise ConfigError(msg)
    return found
