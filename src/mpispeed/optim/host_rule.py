"""Base of the rules with compiled loops: windows one at a time, and checked params of a JSON file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from mpispeed.base.errors import ConfigError, UnsupportedOption
from mpispeed.native import coded_update, status
from mpispeed.native.cuda import launcher
from mpispeed.native.device_optim import SKIPPING, update_row
from mpispeed.native.flat import DECAY_DECOUPLED, DECAY_L2, DECAY_NONE, Terms
from mpispeed.native.multi_tensor_host import STATE_NAMES, HostTable, Row
from mpispeed.optim.rule import Window, check_range, drop_auto, refuse_keyword


class HostRule(ABC):
    """A rule whose loops are in `native.multi_tensor_host`; a subclass gives the factors of an update.

    Windows are taken one at a time, and each is finished before the next is asked for. Gradients are not
    modified. Windows on a device are updated there, asynchronously.
    """

    kernel: str  # name of the rule in `native.multi_tensor_host`
    wants_whole = False
    is_elementwise: bool | None = True

    def __init__(self, name: str, defaults: Mapping[str, Any]) -> None:
        self.name = name
        self.state_names: tuple[str, ...] = STATE_NAMES[self.kernel]
        self.defaults: dict[str, Any] = dict(defaults)

    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Update the master, state and `out` of every window from its gradient times `grad_scale`."""
        for window in windows:
            if window.master.numel():
                self.update_one(window, grad_scale, threads)

    @property
    def takes_factor(self) -> bool:
        """True if there is `update_by`."""
        return self.kernel in SKIPPING

    def update_by(self, windows: Iterable[Window], factor: Tensor) -> None:
        """As `update` by a factor that only the device of the windows knows, an fp32 scalar; by NaN nothing changes."""
        for window in windows:
            if window.master.numel():
                row = Row(window.master, self.states_of(window), window.grad, window.out)
                update_row(self.kernel, row, self.terms_of(window, 1.0), factor)

    def takes_codes(self, group: Mapping[str, Any], step: int) -> bool:
        """True if there is a compiled loop over codes, and no stand-in of a device takes the place of loops."""
        del group, step
        is_known = self.kernel in coded_update.RULES and launcher.stand_in is None
        return is_known and status.compiled("coded_optim") is not None

    def update_one(self, window: Window, grad_scale: float, threads: int) -> float | Tensor:
        """Update one window that is not empty; gives LAMB's trust ratio, on a device as a scalar there, or 1."""
        terms = self.terms_of(window, grad_scale)
        if window.at_rest is not None:
            master, found, start = window.at_rest
            coded_update.update(
                self.kernel, master, [found[name] for name in self.state_names], window.grad, window.out, terms,
                step=window.step, start=start, threads=threads,
            )  # fmt: skip
            return 1.0
        states = self.states_of(window)
        return run_kernel(self.kernel, window.master, states, window.grad, window.out, terms, threads)

    def states_of(self, window: Window) -> tuple[Tensor, ...]:
        """The states of a window in the order of the kernel."""
        return tuple(window.state[name] for name in self.state_names)

    def terms_of(self, window: Window, grad_scale: float) -> Terms:
        """The factors of the update of a window, with the hyper-parameters of its group."""
        return self.terms({**self.defaults, **window.group}, window.step, grad_scale)

    @abstractmethod
    def terms(self, hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
        """The factors of update number `step`, from 1, with the hyper-parameters of a group."""

    def scalars(self) -> dict[str, Any]:
        """Nothing: the step number comes with the windows."""
        return {}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:  # noqa: B027 # a rule may have none
        """Do nothing."""


def run_kernel(
    kernel: str,
    param: Tensor,
    states: tuple[Tensor, ...],
    grad: Tensor,
    out: Tensor | None,
    terms: Terms,
    threads: int = 1,
) -> float | Tensor:
    """One update by a kernel of `native.multi_tensor_host` or `native.device_optim`; returns LAMB's ratio, or 1."""
    row = Row(param, states, grad, out)
    if runs_on_device(param):
        return update_row(kernel, row, terms)
    ratios = HostTable(kernel, [row]).run([terms], threads=threads)
    return ratios[0] if ratios else 1.0


def runs_on_device(param: Tensor) -> bool:
    """True if the kernels of `native.device_optim`, or its references there, update this tensor."""
    return param.device.type != "cpu" or launcher.stand_in is not None


def check_factors(rule: str, betas: tuple[float, float] | None, step: int) -> tuple[float, float]:
    """The betas as floats, if they and the number of the update are within their limits.

    Raises:
        ValueError: they are not.
    """
    beta1, beta2 = (0.0, 0.0) if betas is None else (float(betas[0]), float(betas[1]))
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        msg = f"{rule}: betas are {(beta1, beta2)}; both must be at least 0 and below 1"
        raise ValueError(msg)
    if step < 1:
        msg = f"{rule}: step is {step}; it counts updates from 1"
        raise ValueError(msg)
    return beta1, beta2


def decay_mode(weight_decay: float, *, decoupled: bool) -> int:
    """The number of a kind of weight decay in `Terms`."""
    return DECAY_NONE if weight_decay == 0.0 else DECAY_DECOUPLED if decoupled else DECAY_L2


def read_hyper(
    name: str, params: Mapping[str, Any], defaults: Mapping[str, Any], ignored: Iterable[str] = ()
) -> dict[str, Any]:
    """The hyper-parameters among `params`, checked: numbers at least 0, betas within [0, 1), truths.

    Raises:
        UnknownOption: a parameter that is neither in `defaults` nor in `ignored`.
        UnsupportedOption: amsgrad is true.
        ConfigError: a value is impossible.
    """
    params = drop_auto(params)
    if params.pop("amsgrad", False):
        msg = f"amsgrad is true in the params of the optimizer {name}; this variant is not supported. Remove it"
        raise UnsupportedOption(msg)
    hyper: dict[str, Any] = {}
    for key, value in params.items():
        if key in defaults:
            hyper[key] = _checked(name, key, value, defaults[key])
        elif key not in set(ignored):
            refuse_keyword(key, {*defaults, *ignored, "amsgrad"}, f"the optimizer {name}")
    return hyper


def _checked(name: str, key: str, value: Any, default: Any) -> Any:
    if key == "betas":
        return checked_betas(name, value)
    if not isinstance(default, bool):
        return check_range(name, key, value)
    if not isinstance(value, bool):
        msg = f"{key} of the optimizer {name} is {value!r}; expected true or false"
        raise ConfigError(msg)
    return value


def checked_betas(name: str, betas: Any) -> tuple[float, float]:
    """Two numbers within [0, 1).

    Raises:
        ConfigError: `betas` is something else.
    """
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        msg = f"betas of the optimizer {name} is {betas!r}; expected two numbers such as [0.9, 0.999]"
        raise ConfigError(msg)
    first, second = (check_range(name, "betas", beta, below=1.0) for beta in betas)
    return first, second


def check_coefficients(name: str, hyper: Mapping[str, Any]) -> None:
    """Check that the limits of LAMB's trust ratio are in order.

    Raises:
        ConfigError: min_coeff is above max_coeff.
    """
    if hyper["min_coeff"] > hyper["max_coeff"]:
        msg = (
            f"min_coeff of the optimizer {name} is {hyper['min_coeff']!r} and max_coeff {hyper['max_coeff']!r}; "
            "min_coeff may not be above max_coeff"
        )
        raise ConfigError(msg)
