"""Verbs without tensors: barriers, agreements, and exchanges of small objects."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from mpispeed.base.errors import AgreementError, MpispeedError
from mpispeed.mesh.collectives import checks
from mpispeed.mesh.collectives.call import Call
from mpispeed.mesh.collectives.nonblocking import Started
from mpispeed.mesh.collectives.together import Kinds, together


class Meetings(Started):
    """A group whose ranks meet and agree."""

    def barrier(self) -> None:
        """Return when all ranks have called.

        Collective over: this group.
        """
        with Call(self, "barrier", 0):
            self.library_barrier()

    def agree(self, ok: bool, message: str = "", error: type[MpispeedError] = AgreementError) -> None:
        """Raise `error` on every rank if `ok` is false on any; else on none.

        Collective over: this group.
        """
        with Call(self, "agree", 0):
            flag = torch.tensor([int(ok)], dtype=torch.uint8)
            self.library_all_reduce(flag, "min")
            if flag.item():
                return
            reports = self.library_gather_objects((bool(ok), message))
        failed = [(self.ranks[i], text) for i, (is_ok, text) in enumerate(reports) if not is_ok]
        shown = ", ".join(str(rank) for rank, _ in failed[:8]) + (", ..." if len(failed) > 8 else "")
        text = next((text for _, text in failed if text), "no reason given")
        msg = text if self.size == 1 else f"rank{'s' if len(failed) > 1 else ''} {shown} of {self.size}: {text}"
        raised = error(msg)
        raised.is_collective = True
        raise raised

    def together(
        self,
        error: type[MpispeedError] = AgreementError,
        *,
        doing: str = "",
        plain: Kinds = MpispeedError,
    ) -> AbstractContextManager[None]:
        """Context of a step without communication; if it fails on any rank, all raise `error`, else none.

        The text is that of the first rank that failed and names it. No verb of this group may be called inside.

        Args:
            error: type that all ranks raise; on those that failed, their own failure is its cause.
            doing: stands before the text.
            plain: failures whose text is enough; others are shown with their type.

        Collective over: this group, at the end of the step.
        """
        return together(self.agree, error, doing, plain)

    def share(self, obj: Any, root: int = 0) -> Any:
        """The small Python object that rank `root` passed; other ranks' argument is ignored.

        Collective over: this group.
        """
        checks.peer(self, root, "share")
        with Call(self, "share", 0, peer=root):
            return self.library_share(obj, root)

    def gather_objects(self, obj: Any) -> list[Any]:
        """The small Python objects of all ranks in rank order, on every rank.

        Collective over: this group.
        """
        with Call(self, "gather_objects", 0):
            return self.library_gather_objects(obj)
