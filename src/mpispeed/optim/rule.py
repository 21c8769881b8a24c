"""Update rules: windows of flat tensors in, updated masters out; and the table of rules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from mpispeed.base.errors import ConfigError, UnknownOption
from mpispeed.base.registry import Registry, did_you_mean
from mpispeed.native.coded_update import Rest

Scalar = int | float | bool | str | Tensor | None
"""State that is not one value per element: a number, a text, None, or a small tensor of any shape."""


class AtRest(NamedTuple):
    """A master and states in the form in which they rest, for `native.coded_update`.

    Attributes:
        master: codes, 16-bit numbers or pairs of [n] elements, or fp32 [n].
        state: the same by name of the rule's states.
        start: number of the first element where stochastic rounding draws.
    """

    master: Rest
    state: dict[str, Rest]
    start: int


@dataclass(slots=True)
class Window:
    """A flat range of one parameter group, updated at once.

    Shapes: `master`, `grad`, `out` and every tensor of `state` are one-dimensional, contiguous and equally long.
    """

    master: Tensor  # fp32 (or the parameter's own dtype at fp64), updated in place
    grad: Tensor  # fp32, bf16 or fp16, or what the rule wants in its place; not modified unless the rule says so
    state: dict[str, Tensor]  # one flat tensor per name of rule.state_names
    group: dict[str, Any]  # hyper-parameters of the parameter group: lr, betas, ...
    step: int  # number of this update, from 1
    out: Tensor | None = None  # copy of the master to fill, in another dtype; 0/1 Adam: the local parameter
    key: tuple[Any, ...] = ()  # stable identity (unit, group index, start), for rules that keep their own objects
    shape: tuple[int, ...] | None = None  # set when the window is exactly one whole parameter
    entry: int | None = None  # set when all of it is of one parameter: its number, which is that of every rank
    after: Callable[[], None] | None = None  # due after the update, where the rule keeps windows until all are there
    at_rest: AtRest | None = None  # what to update in place of master, which is as long, and of state, which is empty


class Rule(Protocol):
    """An optimizer without parameters of its own: it updates the windows it is given."""

    name: str
    state_names: tuple[str, ...]  # flat slots the store allocates (zeros, dtype of the master) and checkpoints
    defaults: dict[str, Any]  # hyper-parameters and their defaults
    wants_whole: bool  # True: give one window per parameter when masters are whole
    is_elementwise: bool | None  # False: the result depends on the cut, so it is whole or the rule is `Layerwise`

    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Update the master, state and `out` of every window from its gradient times `grad_scale`."""

    def scalars(self) -> dict[str, Any]:
        """State outside the slots, as nested dicts of numbers, strings and tensors; empty for most rules."""

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Take back what `scalars` gave, for windows with the same keys."""


@runtime_checkable
class TakesCodes(Protocol):
    """A rule that can update masters and states as they rest, in one pass over memory, with the bits of windows."""

    def takes_codes(self, group: Mapping[str, Any], step: int) -> bool:
        """True if windows in host memory of a group may come `at_rest` in this update."""


@runtime_checkable
class KeepsState(Protocol):
    """A rule that keeps the state of windows in objects of its own instead of in `Window.state`.

    `kinds` are its names in a checkpoint: it can load state saved under any of them.

    A checkpoint reads `slots` and `window_scalars` of every window after an update. To resume, possibly with other
    windows, it passes to `restore`, for every new window, its part of the slots and the scalars of its parameter,
    before the first update.

    It asks for all windows before it updates any, so it calls what is due `after` each.
    """

    kinds: frozenset[str]

    def slots(self, key: tuple[Any, ...]) -> dict[str, Tensor]:
        """One flat tensor of the window's length per elementwise state; empty before the first update."""

    def window_scalars(self, key: tuple[Any, ...]) -> dict[str, Scalar]:
        """The rest of the window's state: step counts, products, factors of other shapes."""

    def restore(self, window: Window, slots: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> None:
        """Set the state of `window`; tensors are copied."""

    def forget(self) -> None:
        """Drop the state of all windows, as before the first update."""


@runtime_checkable
class KeepsCounts(Protocol):
    """A rule with scalars, as step counts, that all windows of a parameter group share.

    A checkpoint keeps them with every parameter, as those of a `KeepsState` of the same `kinds`, which may load them.
    """

    kinds: frozenset[str]

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the states that parameters of a group with these hyper-parameters have."""

    def counts(self) -> dict[int, tuple[int, dict[str, Scalar]]]:
        """By group: the update that left them, 0 if they were restored, and its scalars; only groups that began."""

    def restore_counts(self, group: int, scalars: Mapping[str, Scalar]) -> None:
        """Set the scalars of a group, which goes on from them."""


@runtime_checkable
class Layerwise(Protocol):
    """A rule whose step depends on norms of full parameters, and that can update parts of them.

    It goes over its windows twice; sums over the ranks that have parts come in between. Every window is of one
    parameter, numbered by its `entry`.
    """

    def first_half(self, windows: Iterable[Window], count: int, *, grad_scale: float, threads: int) -> Tensor:
        """Update states only; gives sums over this rank's parts. Shape: (count, k), fp64, in host memory."""

    def second_half(self, windows: Iterable[Window], sums: Tensor, *, grad_scale: float, threads: int) -> None:
        """Update masters and `out` of the same windows from states and the sums over all parts."""


@runtime_checkable
class Matrixwise(Protocol):
    """A rule that updates matrices as wholes, of which ranks have parts, and other parameters element by element.

    Groups differ in the states of their parameters. Of a matrix the rank that owns it gathers the directions of all
    parts, makes them orthogonal, and sends them back.
    """

    def is_for_matrices(self, group: Mapping[str, Any]) -> bool:
        """True if parameters of a group are updated as matrices."""

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the states of parameters of a group."""

    def group_of(self, group: Mapping[str, Any], *, is_matrix: bool) -> dict[str, Any]:
        """The hyper-parameters of a group for matrices or for others, without parameters; `group` may give some."""

    def update_others(self, windows: Iterable[Window], *, grad_scale: float, threads: int) -> None:
        """Update windows of parameters that are no matrices."""

    def direction(self, window: Window, *, grad_scale: float) -> Tensor:
        """Update the states of a window of a matrix; gives its part of what is to be made orthogonal."""

    def dtype_of(self, group: Mapping[str, Any], full: torch.dtype, device: torch.device) -> torch.dtype:
        """In which directions travel and are made orthogonal."""

    def orthogonal(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The orthogonal factors of whole matrices. Shapes: [..., n, m]."""

    def apply(self, window: Window, direction: Tensor, shape: tuple[int, int]) -> None:
        """Update the master and `out` of a window by its part of the result for a matrix of this shape."""


@runtime_checkable
class TakesFactor(Protocol):
    """A rule that can take the factor of gradients from the device on which its windows are."""

    takes_factor: bool

    def update_by(self, windows: Iterable[Window], factor: Tensor) -> None:
        """As `update` with the factor, an fp32 scalar on the device; nothing is changed where it is NaN."""


@runtime_checkable
class KeepsNumbers(Protocol):
    """A rule whose `scalars` are numbers of full parameters: by the `key_text` of the window, then by name.

    A checkpoint keeps them with the parameter.
    """

    number_names: tuple[str, ...]


LR_FACTOR = "lr_factor"
"""Key of a parameter group: what its rate is to that which is said for all groups. Left out: 1."""
MASK = "exp_avg_mask"
"""Key of a parameter group: a tensor that is 0 where the momentum has to stay 0, 1 elsewhere. It is not saved."""

RuleFactory = Callable[[dict[str, Any]], tuple[Rule, dict[str, Any]]]

RULES: Registry[RuleFactory] = Registry("optimizer type", ignore_case=True)
"""From the type of a JSON file, compared without case, to what builds the rule and its group defaults."""


def key_text(key: tuple[Any, ...]) -> str:
    """A window's key as one word, for tables that are stored: (unit, group, start) -> "unit/group/start"."""
    return "/".join(str(part) for part in key)


def drop_auto(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of `params` without the entries left at "auto", so that defaults apply; None is an empty dict."""
    return {key: value for key, value in (params or {}).items() if value != "auto"}


def check_keywords(target: Callable[..., Any], params: Mapping[str, Any], owner: str, skip: int = 0) -> None:
    """Check that `target` can be called with the keywords `params` after `skip` positional arguments.

    Raises:
        UnknownOption: a keyword that it does not take (also a TypeError).
        ConfigError: a keyword without default that is missing.
    """
    all_parameters = list(inspect.signature(target).parameters.values())[skip:]
    has_any_keyword = any(p.kind is p.VAR_KEYWORD for p in all_parameters)
    named = {p.name: p for p in all_parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for key in params:
        if key not in named and not has_any_keyword:
            refuse_keyword(key, named, owner)
    missing = [name for name, p in named.items() if p.default is p.empty and name not in params]
    if missing:
        listed = ", ".join(repr(name) for name in missing)
        msg = f"{owner} needs {listed} in its params, found only {sorted(params)}; add it with a value"
        raise ConfigError(msg)


def refuse_keyword(key: str, known: Iterable[str], owner: str) -> NoReturn:
    """Raise for a keyword `key` that `owner` does not take.

    Raises:
        UnknownOption: always.
    """
    names = sorted(known)
    msg = f"{owner} does not take the parameter {key!r}; it takes {', '.join(names)}.{did_you_mean(key, names)}"
    raise UnknownOption(msg)


def check_range(owner: str, key: str, value: Any, *, least: float = 0.0, below: float = float("inf")) -> float:
    """`value` as a float within [least, below).

    Raises:
        ConfigError: it is no number, or outside.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not least <= number < below:
        wanted = f"at least {least:g}" + ("" if below == float("inf") else f" and below {below:g}")
        msg = f"{key} of the optimizer {owner} is {value!r}; expected a number {wanted}"
        raise ConfigError(msg)
    return number
