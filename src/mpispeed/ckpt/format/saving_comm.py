"""The part of `Comm` that a save needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from mpispeed.base.errors import AgreementError, MpispeedError

if TYPE_CHECKING:
    import torch

    from mpispeed.mesh.comm import Kinds


class SavingComm(Protocol):
    """A `Comm`, or the same verbs on a channel; each verb is collective over the group."""

    @property
    def rank(self) -> int:
        """Position of this rank in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def agree(self, ok: bool, message: str = "", error: type[MpispeedError] = AgreementError) -> None:
        """As `Comm.agree`. Collective over: the group."""

    def together(
        self, error: type[MpispeedError] = AgreementError, *, doing: str = "", plain: Kinds = MpispeedError
    ) -> AbstractContextManager[None]:
        """As `Comm.together`. Collective over: the group."""
        ...

    def share(self, obj: Any, root: int = 0) -> Any:
        """As `Comm.share`. Collective over: the group."""

    def gather_objects(self, obj: Any) -> list[Any]:
        """As `Comm.gather_objects`. Collective over: the group."""
        ...

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        """As `Comm.all_to_all`. Collective over: the group."""
