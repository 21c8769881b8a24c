"""Classes that stand in for that of an object which exists, and casts that leave some of its tensors alone."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch


def stand_in(base: type, members: Mapping[str, Any], rebuilt: Callable[[type], Any] | None = None) -> type:
    """A subclass of the same name, for `object.__class__ = ...`; copies and pickles become objects of it.

    Args:
        base: the class of the object.
        members: of the subclass.
        rebuilt: makes an empty object of the subclass, given `base`; a function of a module. None: `members` has
            `__reduce_ex__`.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        made, args, *rest = cast("Any", base).__reduce_ex__(self, protocol)
        if made is copyreg.__newobj__ and args == (type(self),):  # type: ignore[attr-defined]
            made, args = rebuilt, (base,)
        return made, args, *rest

    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    if rebuilt is not None:
        names["__reduce_ex__"] = reduce
    return type(base.__name__, (base,), {**names, **members})


@contextmanager
def uncast(buffers: dict[str, Any], names: Iterable[str]) -> Iterator[None]:
    """A context in which casts to float dtypes leave these fp32 buffers as they are: meanwhile they are integers."""
    kept = list(names)
    for name in kept:
        buffers[name] = buffers[name].view(torch.int32)
    try:
        yield
    finally:
        for name in kept:
            buffers[name] = buffers[name].view(torch.float32)
