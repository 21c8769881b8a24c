"""Leaf modules: all parameters below such a module are unsharded together when it is entered.

For modules whose parts run in an order that differs between ranks or batches, such as experts, and for trees of many
small modules, where fetching each by itself costs more than it saves. Marks belong to module objects: a copy of a
marked module has none.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from mpispeed.base.errors import UsageError

log = logging.getLogger(__name__)

LARGEST_LEAF = 10**9
"""Elements above which a module is never chosen automatically: all of a leaf is live at once."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Marked modules; True where `mark_leaves_by_threshold` marked them and not the user.
_marks: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


class NoSuchModule(UsageError, ValueError):
    """None of the named classes occurs in the model."""


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Mark every module of these classes in `model` as a leaf; returns them in the order of `model.modules()`.

    Args:
        model: is searched, itself included.
        leaf_module_classes: classes, or their names; a subclass of a listed class does not count.

    Raises:
        NoSuchModule: (a ValueError) the model has no module of these classes.
        UsageError: (an AssertionError) something else than classes and names was given, or a class without forward.
    """
    found = _of_classes(model, leaf_module_classes)
    for module in found:
        if type(module).forward is nn.Module.forward:
            msg = (
                f"{type(module).__name__} has no forward, so there is no moment to fetch it as one; "
                "mark the class of the module that holds it"
            )
            raise UsageError(msg)
    _marks.update(dict.fromkeys(found, False))
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Take the mark off every module of these classes; returns those that had it.

    Raises:
        NoSuchModule: (a ValueError) the model has no module of these classes.
        UsageError: (an AssertionError) something else than classes and names was given.
    """
    marked = [module for module in _of_classes(model, leaf_module_classes) if is_leaf(module)]
    for module in marked:
        del _marks[module]
    return marked


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of `model`, in the order of `model.modules()`; those inside of others too."""
    return [module for module in model.modules() if is_leaf(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    """True for a module that is marked itself."""
    return module in _marks


is_leaf = z3_leaf_module


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """True for a parameter of a marked module or of any module below one."""
    return any(parameter is other for leaf in list(_marks) for other in leaf.parameters())


def is_automatic_leaf(module: nn.Module) -> bool:
    """True for a leaf that `mark_leaves_by_threshold` marked, whose parameters may be released as one."""
    return _marks.get(module, False)


def granularities(model: nn.Module, numel: Callable[[nn.Parameter], int] = torch.Tensor.numel) -> dict[str, float]:
    """Granularity of each module: elements per fetch in the tree below it; low for many small modules in a row.

    The elements of all parameters at and below the module, floor-divided by one more than the number of modules
    below it that have parameters at or below them (containers are never entered and do not count). Infinite for
    containers, for modules without parameters or without children, and above `LARGEST_LEAF` elements.

    Args:
        model: its modules are weighed.
        numel: elements of the full parameter; needed where parameters are sharded at rest.

    Returns:
        Name of each module -> its granularity, parents first.
    """
    return {name: _granularity(module, numel) for name, module in model.named_modules()}


def choose_leaves(
    model: nn.Module, threshold: int, numel: Callable[[nn.Parameter], int] = torch.Tensor.numel
) -> dict[str, nn.Module]:
    """The outermost modules whose granularity is at most `threshold`, by name, parents first; none at 0."""
    chosen: dict[str, nn.Module] = {}
    sizes = granularities(model, numel) if threshold > 0 else {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and sizes.get(name, math.inf) <= threshold:
            chosen[name] = module
            inside.update(module.modules())
    return chosen


def mark_leaves_by_threshold(
    model: nn.Module, threshold: int, numel: Callable[[nn.Parameter], int] = torch.Tensor.numel
) -> dict[str, nn.Module]:
    """Mark the modules that `choose_leaves` returns; warns where the threshold is below all granularities.

    Modules that the user marked stay as they are; marks of an earlier call are taken off.
    """
    for module in model.modules():
        if is_automatic_leaf(module):
            del _marks[module]
    chosen = choose_leaves(model, threshold, numel)
    for module in chosen.values():
        _marks.setdefault(module, True)
    if chosen:
        log.info("module_granularity_threshold %d: fetched as one: %s", threshold, ", ".join(map(_shown, chosen)))
    elif threshold > 0:
        _warn_of_smallest(threshold, granularities(model, numel))
    return chosen


def _warn_of_smallest(threshold: int, sizes: dict[str, float]) -> None:
    name, smallest = min(sizes.items(), key=lambda item: item[1])
    if math.isinf(smallest):
        log.warning(
            "module_granularity_threshold is %d, and the model has no module with children that could be fetched as "
            "one; set it to 0", threshold,
        )  # fmt: skip
    else:
        log.warning(
            "module_granularity_threshold is %d, below the smallest granularity of this model, %d of %s: no module is "
            "fetched as one; set it to %d or more, or to 0",
            threshold, smallest, _shown(name), smallest,
        )  # fmt: skip


def _granularity(module: nn.Module, numel: Callable[[nn.Parameter], int]) -> float:
    elements = sum(map(numel, module.parameters()))
    has_children = next(module.children(), None) is not None
    if not elements or not has_children or elements > LARGEST_LEAF or _is_container(module):
        return math.inf
    below = sum(
        other is not module and _has_parameters(other) and not _is_container(other) for other in module.modules()
    )
    return elements // (1 + below)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_container(module: nn.Module) -> bool:
    """True for torch's containers and for modules without a forward, whose hooks never run."""
    return type(module) in _CONTAINERS or type(module).forward is nn.Module.forward


def _of_classes(model: nn.Module, classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    if isinstance(classes, str) or not all(isinstance(item, type | str) for item in classes):
        msg = f"leaf_module_classes is a list of classes or of their names, found {classes!r}"
        raise UsageError(msg)
    found = [m for m in model.modules() if type(m) in classes or type(m).__name__ in classes]
    wanted = ", ".join(item if isinstance(item, str) else item.__name__ for item in classes)
    if not found:
        present = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        msg = f"no module of the classes [{wanted}] is in {type(model).__name__}; it has: {present}"
        raise NoSuchModule(msg)
    return found


def _shown(name: str) -> str:
    return name or "the whole model"
