"""Policies in DeepSpeed's form: the layers of a block whose outputs are summed; other linear layers come before them.

Source: DeepSpeed's documentation, "Initializing for Inference", and its tutorial on automatic tensor parallelism.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.nn.tensor.policy import KINDS, Chosen, joined_sites
from mpispeed.nn.tensor.shard_plan import Division, form_of, join, shape_of


def is_row_policy(model: nn.Module, policy: Any) -> bool:
    """True for {class or its name: a name or names}, and for names alone; False for a table of kinds."""
    if not isinstance(policy, Mapping):
        return True
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return any(
        not isinstance(key, str) or not isinstance(value, str) or (value not in KINDS and key in classes)
        for key, value in policy.items()
    )


def row_sites(model: nn.Module, policy: Any, division: Division) -> Chosen:
    """The sites of a policy in DeepSpeed's form.

    Args:
        model: the whole model.
        policy: class of blocks, or its name -> names that end the paths of the row-parallel layers below it, or one
            name; names alone are meant for the blocks in all lists of the model.
        division: how to slice.

    Raises:
        ConfigError: a name ends no layer's path, a class is in no module, or widths do not fit.
    """
    kinds: dict[str, str] = {}
    if isinstance(policy, Mapping):
        for key, names in policy.items():
            _mark(model, list(_instances(model, key)), _name(key), _names(key, names), kinds)
    else:
        _mark(model, list(_blocks(model)), f"blocks of {type(model).__name__}", _names("blocks", policy), kinds)
    order = [path for path, _ in model.named_modules() if path in kinds]
    return joined_sites(model, {path: kinds[path] for path in order}, division, "injection policy")


def _names(key: Any, names: Any) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else names
    if not isinstance(found, (tuple, list, set, frozenset)) or not all(isinstance(name, str) for name in found):
        msg = f"injection policy of {_name(key)}: {names!r} is not valid; give the name of a layer "
        msg += 'whose output is summed, or a tuple of such names, e.g. ("attention.output.dense", "output.dense")'
        raise ConfigError(msg)
    return tuple(name.lstrip(".") for name in found)


def _name(key: Any) -> str:
    return str(getattr(key, "__name__", key))


def _instances(model: nn.Module, key: Any) -> Iterator[str]:
    found = False
    for path, module in model.named_modules():
        names = {base.__name__ for base in type(module).__mro__}
        if isinstance(module, key) if isinstance(key, type) else key in names:
            found = True
            yield path
    if not found:
        known = {type(module).__name__ for module in model.modules()}
        name = _name(key)
        near = difflib.get_close_matches(name, known, 3, 0.5)
        msg = f"injection policy: class {name} is not valid, no module of {type(model).__name__} is one"
        raise ConfigError(f"{msg}; did you mean {' or '.join(near)}?" if near else msg)


def _blocks(model: nn.Module) -> Iterator[str]:
    """Paths of what is in the outermost lists."""
    lists: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{other}.") for other in lists):
            lists.append(path)
            yield from (join(path, name) for name in module._modules)


def _mark(model: nn.Module, blocks: list[str], what: str, names: tuple[str, ...], kinds: dict[str, str]) -> None:
    """Add the kinds of all linear layers of some blocks."""
    layers = [
        (join(block, path), path)
        for block in blocks
        for path, module in model.get_submodule(block).named_modules()
        if shape_of(module)
    ]
    for name in names:
        if not any(_ends(path, name) for _, path in layers):
            inner = list(dict.fromkeys(path for _, path in layers))
            tails = {".".join(path.split(".")[-count:]) for path in inner for count in (1, 2, 3)}
            near = difflib.get_close_matches(name, tails, 3, 0.5) or inner[:5]
            msg = f"Injection policy layer {name!r} of {what} is not valid: it ends the path of no linear layer there; "
            raise ConfigError(f"{msg}did you mean {' or '.join(near)}?" if near else f"{msg}it has none")
    for full, path in layers:
        kinds[full] = "row" if any(_ends(path, name) for name in names) else form_of(path)


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")
