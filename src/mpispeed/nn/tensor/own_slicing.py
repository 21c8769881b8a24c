"""Layers that know how they are sliced, beside those that a policy finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.nn.tensor.apply import Layers


@runtime_checkable
class SlicesItself(Protocol):
    """A module that injection asks to slice its parameters."""

    def whole_part(self) -> tuple[str, str]:
        """Path inside the module of what no policy is to slice, and the reason; ("", "") for nothing."""

    def slice_over(self, comm: Comm, layers: Layers, grain: int) -> list[str]:
        """Slice parameters over `comm`, in grains; return the paths inside the module of the modules that have them.

        Local, unless full parameters are elsewhere.
        """
