"""Background saves: a thread writes a copy of the state, and communicates on its own channel."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from mpispeed.base.errors import AgreementError, MpispeedError
from mpispeed.ckpt.format import tree
from mpispeed.ckpt.write.request import Request
from mpispeed.ckpt.write.save import SaveReport, carry_out
from mpispeed.ckpt.write.snapshot import Snapshot
from mpispeed.mesh.comm import Kinds, together

if TYPE_CHECKING:
    import torch

    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)


class PatientComm:
    """The verbs that a save needs, started on a channel, so that waiting ranks sleep instead of spinning."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def agree(self, ok: bool, message: str = "", error: type[MpispeedError] = AgreementError) -> None:
        """As `Comm.agree`. Collective over: the group."""
        found: list[MpispeedError] = []

        def agree(comm: Comm) -> None:
            try:
                comm.agree(ok, message, error)
            except error as failure:  # it is for the thread that saves; the channel itself is well
                found.append(failure)

        self._comm.start(agree, "agree").wait()
        if found:
            raise found[0]

    def together(
        self, error: type[MpispeedError] = AgreementError, *, doing: str = "", plain: Kinds = MpispeedError
    ) -> AbstractContextManager[None]:
        """As `Comm.together`. Collective over: the group."""
        return together(self.agree, error, doing, plain)

    def share(self, obj: Any, root: int = 0) -> Any:
        """As `Comm.share`. Collective over: the group."""
        return self._ask(lambda comm: comm.share(obj, root), "share")

    def gather_objects(self, obj: Any) -> list[Any]:
        """As `Comm.gather_objects`. Collective over: the group."""
        found: list[Any] = self._ask(lambda comm: comm.gather_objects(obj), "gather_objects")
        return found

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int] | None, counts: Sequence[int] | None
    ) -> None:
        """As `Comm.all_to_all`. Collective over: the group."""
        self._ask(lambda comm: comm.all_to_all(out, x, out_counts, counts), "all_to_all")

    def _ask(self, fn: Callable[[Comm], Any], verb: str) -> Any:
        found: list[Any] = []
        self._comm.start(lambda comm: found.append(fn(comm)), verb).wait()
        return found[0]


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread.

    The thread is not a daemon: a script that ends waits for its checkpoint.
    """

    def __init__(self, comm: Comm) -> None:
        """Args: `comm`: a group over all ranks that nothing else uses."""
        comm.group.limits.timeout_seconds = None  # ranks wait for the slowest disk, however long it takes
        self._comm = cast("Comm", PatientComm(comm))
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._report: SaveReport | None = None
        self._error: BaseException | None = None

    def copy(self, request: Request) -> Request:
        """A request with copies of everything that may change, in memory of this saver. Local.

        Raises:
            MemoryError, RuntimeError: there is no memory for them.
        """
        # The state that is written is that of rank 0.
        state = tree.copied(dict(request.state)) if self._comm.rank == 0 else {}
        return replace(request, tensors=tuple(self._snapshot.take(request.tensors)), state=state)

    def start(self, request: Request) -> None:
        """Begin to write a request made by `copy`.

        Collective over: all ranks; `wait` has been called before that.
        """
        self._report, self._error = None, None
        self._thread = threading.Thread(target=self._run, args=(request,), name="mpispeed-save")
        self._thread.start()

    def is_pending(self) -> bool:
        """True until `wait` has returned the result of the last save."""
        return self._thread is not None

    def wait(self) -> SaveReport | None:
        """Wait for the save under way, if any, and return its report once.

        Collective over: all ranks.

        Raises:
            SaveFailed: on every rank; nothing was published.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, error = None, self._error
        if error is not None:
            raise error
        return self._report

    def _run(self, request: Request) -> None:
        try:
            self._report = carry_out(self._comm, request)
        except BaseException as error:
            self._error = error
            if self._comm.rank == 0 or not getattr(error, "is_collective", False):
                log.error("checkpoint %r was not saved: %s", request.tag, error)  # noqa: TRY400 - raised by `wait`
