"""Modules built on torch's meta device, without importing torch's compiler, which takes seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

T = TypeVar("T")

FILLING = frozenset({"normal_", "uniform_", "random_", "bernoulli_"})
DRAWING = frozenset({"randn", "rand"})


def without_memory(make: Callable[[], T]) -> T:
    """What `make` builds, its parameters without memory; it is called twice if the first call fails.

    Raises:
        Exception: `make` cannot do without values.
    """
    # Where a range meets a parameter, both have to be without memory.
    with contextlib.suppress(Exception), torch.device("meta"), _Unfilled(are_ranges_on_host=True):
        return make()
    with torch.device("meta"), _Unfilled(are_ranges_on_host=False):
        return make()


class _Unfilled(TorchFunctionMode):
    """Mode that skips random values of tensors without memory, for which torch would import its compiler.

    So it would for `arange` and what follows from it, as angles of rotary positions do. Ranges are short, and may be on
    the host.
    """

    def __init__(self, *, are_ranges_on_host: bool) -> None:
        super().__init__()
        self.are_ranges_on_host = are_ranges_on_host

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Leave such tensors alone, hand on all else."""
        kwargs = dict(kwargs or {})
        name, target = getattr(func, "__name__", ""), args[0] if args else kwargs.get("tensor")
        if isinstance(target, torch.Tensor) and target.is_meta:
            is_init = getattr(func, "__module__", "") == "torch.nn.init" and name.endswith("_")
            if is_init or name in FILLING:
                return target
        if name in DRAWING and func in (torch.randn, torch.rand):
            return torch.empty(*args, **{key: value for key, value in kwargs.items() if key != "generator"})
        if self.are_ranges_on_host and func is torch.arange:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)
