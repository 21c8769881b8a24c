"""Plain layers whose class a feature has replaced, to compute more: they are sliced with what they carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from mpispeed.nn.tensor.linear import CutLayer


@runtime_checkable
class Carries(Protocol):
    """A layer of a class derived from a plain one.

    Attributes:
        plain_type: the class that it had.
    """

    plain_type: type[nn.Module]

    def carry_to(self, made: CutLayer) -> None:
        """Let the slice that takes this layer's place compute more too, with this rank's part of what the layer has.

        Called while full parameters are at hand. Local.
        """


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class of a layer, apart from what it carries."""
    return module.plain_type if isinstance(module, Carries) else type(module)


def carried(old: nn.Module, make: Callable[[], CutLayer]) -> CutLayer:
    """What `make` makes in place of `old`, with what that carries."""
    made = make()
    if isinstance(old, Carries):
        old.carry_to(made)
    return made
