"""Muon for matrices, with Adam for all other parameters.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; keywords as in DeepSpeed's
documentation of its configuration and in `torch.optim.Muon`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpispeed.base.errors import ConfigError, UnsupportedOption, UsageError
from mpispeed.optim.adam import DEFAULTS as ADAM_DEFAULTS
from mpispeed.optim.adam import Adam
from mpispeed.optim.host_rule import checked_betas
from mpispeed.optim.newton_schulz import COEFFICIENTS, orthogonalise, rate_factor
from mpispeed.optim.rule import RULES, Rule, Window, check_range, drop_auto, key_text, refuse_keyword

MOMENTUM = "momentum_buffer"
METHODS = ("standard", "gram")
ADJUSTMENTS = ("original", "match_rms_adamw")
DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_STEPS = 99  # as in torch

MATRIX_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.0,
    "ns_steps": 5,
    "ns_coefficients": COEFFICIENTS,
    "ns_eps": 1e-7,
    "ns_method": "standard",
    "ns_dtype": "auto",
    "adjust_lr_fn": "original",
}
_RATES = ("muon_lr", "adam_lr")
_SWITCHES = ("adam_w_mode", "torch_adam", "per_head_muon")
_IGNORED = ("set_grad_none", "fp32_optimizer_states")
_CHOICES = {"ns_method": METHODS, "ns_dtype": tuple(DTYPES), "adjust_lr_fn": ADJUSTMENTS}
USE = "use_muon"
"""Key of a parameter group, and attribute of a parameter: it is updated by Muon."""


class Muon:
    """Momentum whose matrices are made orthogonal, and Adam for the groups that are not for it.

    State of a matrix: `momentum_buffer`; of other parameters: `exp_avg` and `exp_avg_sq`. Matrices are whole only where
    one rank is told to have them, so an update comes in three parts: `directions`, `orthogonal`, `apply`. `update`
    does all of it for windows that are whole parameters.
    """

    name = "Muon"
    state_names: tuple[str, ...] = (MOMENTUM, "exp_avg", "exp_avg_sq")
    wants_whole = True
    is_elementwise: bool | None = False

    def __init__(self, *, adam_w_mode: bool = True, **hyper: Any) -> None:
        """Args: `hyper` are defaults of groups: those of `MATRIX_DEFAULTS` and of Adam, muon_lr and adam_lr."""
        self.defaults: dict[str, Any] = {**ADAM_DEFAULTS, **MATRIX_DEFAULTS, **hyper}
        self._adam = Adam(adam_w_mode=adam_w_mode)

    # -- groups ------------------------------------------------------------------------------------------------------

    def is_for_matrices(self, group: Mapping[str, Any]) -> bool:
        """True if this rule orthogonalises the parameters of a group."""
        return bool(group.get(USE, False))

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the states of parameters of a group."""
        return (MOMENTUM,) if self.is_for_matrices(group) else self._adam.state_names

    def group_of(self, group: Mapping[str, Any], *, is_matrix: bool) -> dict[str, Any]:
        """The hyper-parameters of a group for matrices or for others, without parameters; `group` may give some."""
        names = tuple(MATRIX_DEFAULTS if is_matrix else ADAM_DEFAULTS)
        found = {name: self.defaults[name] for name in names}
        rate = self.defaults.get(_RATES[0 if is_matrix else 1])
        if rate is not None:
            found["lr"] = rate
        known = {*MATRIX_DEFAULTS, *ADAM_DEFAULTS, *_RATES, "params"}
        found |= {name: value for name, value in group.items() if name in names or name not in known}
        own = group.get(_RATES[0 if is_matrix else 1])
        return {**found, **({} if own is None else {"lr": own}), USE: is_matrix}

    # -- updates -----------------------------------------------------------------------------------------------------

    def update_others(self, windows: Iterable[Window], *, grad_scale: float, threads: int) -> None:
        """Update windows of parameters that are no matrices, all at once, by Adam."""
        self._adam.update(windows, grad_scale=grad_scale, threads=threads)

    def direction(self, window: Window, *, grad_scale: float) -> Tensor:
        """Update the momentum of a window, and give what is to be made orthogonal. Shapes: that of the master."""
        hyper, momentum = {**MATRIX_DEFAULTS, **window.group}, window.state[MOMENTUM]
        grad = window.grad.to(window.master.dtype)
        grad = grad if grad_scale == 1.0 else grad * grad_scale
        momentum.lerp_(grad, 1.0 - hyper["momentum"])
        return grad.lerp(momentum, hyper["momentum"]) if hyper["nesterov"] else momentum

    def dtype_of(self, group: Mapping[str, Any], full: torch.dtype, device: torch.device) -> torch.dtype:
        """In which the iteration runs on a device, for masters of dtype `full`.

        "auto" is bf16 on a device, where its products are fast and the authors have found it enough, and the masters'
        own on the host.
        """
        given = DTYPES[group.get("ns_dtype", "auto")]
        if full == torch.float64:
            return full
        return given or (torch.float32 if device.type == "cpu" else torch.bfloat16)

    def orthogonal(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The orthogonal factors of the directions of whole matrices, in their dtype. Shapes: [..., n, m]."""
        hyper = {**MATRIX_DEFAULTS, **group}
        return orthogonalise(
            matrices,
            steps=int(hyper["ns_steps"]),
            coefficients=tuple(hyper["ns_coefficients"]),
            eps=float(hyper["ns_eps"]),
            method=hyper["ns_method"],
        )

    def apply(self, window: Window, direction: Tensor, shape: tuple[int, int]) -> None:
        """Decay the master and move it against `direction`, the window's part of a matrix of this shape; fill `out`."""
        hyper = {**MATRIX_DEFAULTS, **window.group}
        rate, decay = float(hyper["lr"]), float(hyper["weight_decay"])
        if decay:
            window.master.mul_(1.0 - rate * decay)
        window.master.add_(direction.to(window.master.dtype), alpha=-rate * rate_factor(*shape, hyper["adjust_lr_fn"]))
        if window.out is not None:
            window.out.copy_(window.master)

    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Update windows that are whole parameters; those of several ranks are the engine's `MatrixUpdate`.

        Raises:
            UsageError: a window for Muon is a part of a parameter, or no matrix.
        """
        for window in windows:
            if not self.is_for_matrices(window.group):
                self.update_others([window], grad_scale=grad_scale, threads=threads)
                continue
            if window.shape is None or len(window.shape) < 2:
                msg = (
                    f"window {key_text(window.key)} of the optimizer Muon is {window.shape or 'a part of a parameter'}"
                    "; it makes whole matrices orthogonal: give it whole parameters of at least two dims"
                )
                raise UsageError(msg)
            shape = matrices_of(window.shape)
            found = self.direction(window, grad_scale=grad_scale)
            found = found.to(self.dtype_of(window.group, window.master.dtype, window.master.device))
            self.apply(window, self.orthogonal(found.view(shape), window.group).reshape(-1), (shape[-2], shape[-1]))

    def scalars(self) -> dict[str, Any]:
        """Nothing: all state is in slots."""
        return {}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Do nothing."""


def matrices_of(shape: tuple[int, ...], *, is_convolution: bool = False) -> tuple[int, int, int]:
    """(matrices, rows, columns) of a parameter of at least two dims.

    A parameter of three is a stack of matrices, as of experts, unless it is that of a convolution; of more, or of a
    convolution, the first dim has the rows, and the others one after another the columns.
    """
    if len(shape) == 3 and not is_convolution:
        return shape
    columns = 1
    for size in shape[1:]:
        columns *= size
    return 1, shape[0], columns


def is_named_hidden(name: str) -> bool:
    """False for parameters that DeepSpeed leaves to Adam by their names: embeddings and the head."""
    return not any(word in name.lower() for word in ("embed", "lm_head"))


@RULES.register("Muon")
def _build(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    params = drop_auto(params)
    if params.pop("per_head_muon", False):
        msg = (
            "per_head_muon is true in the params of the optimizer Muon; heads are not made orthogonal one by one here. "
            "Remove it, or give query, key and value projections of each head as parameters of three dims"
        )
        raise UnsupportedOption(msg)
    hyper: dict[str, Any] = {}
    known = {*MATRIX_DEFAULTS, *ADAM_DEFAULTS, *_RATES, *_SWITCHES, *_IGNORED}
    for key, value in params.items():
        if key not in known:
            refuse_keyword(key, known, "the optimizer Muon")
        if key not in _IGNORED and key != "torch_adam":
            hyper[key] = _checked(key, value)
    decoupled = hyper.pop("adam_w_mode", True)
    rule = Muon(adam_w_mode=decoupled, **hyper)
    return rule, dict(rule.defaults)


def _checked(key: str, value: Any) -> Any:
    """A value of the JSON file as the rule has it."""
    if key == "adjust_lr_fn" and value is None:  # torch's default
        return ADJUSTMENTS[0]
    wanted = _unfit(key, value)
    if wanted:
        msg = f"{key} of the optimizer Muon is {value!r}; expected {wanted}"
        raise ConfigError(msg)
    if key == "betas":
        return checked_betas("Muon", value)
    if key == "ns_coefficients":
        return tuple(check_range("Muon", key, one, least=float("-inf")) for one in value)
    if key in _CHOICES or isinstance(value, bool):
        return value
    number = check_range("Muon", key, value, below=1.0 if key == "momentum" else float("inf"))
    return int(number) if key == "ns_steps" else number


def _unfit(key: str, value: Any) -> str:
    """What is expected instead of a value, or ""."""
    if key in _CHOICES:
        return "" if value in _CHOICES[key] else f"one of {', '.join(_CHOICES[key])}"
    if key in ("nesterov", "adam_w_mode", "bias_correction"):
        return "" if isinstance(value, bool) else "true or false"
    if key == "ns_coefficients":
        return "" if isinstance(value, list | tuple) and len(value) == 3 else "three numbers"
    if key == "ns_steps":
        is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_STEPS
        return "" if is_count else f"a whole number from 1 to {MOST_STEPS}"
    return ""
