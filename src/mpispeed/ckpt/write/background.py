"""Background saves: a thread writes a snapshot of the state, and communicates on its own channel."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import AgreementError, MpispeedError
from mpispeed.ckpt.format import schema, tree
from mpispeed.ckpt.format.logical import Deferred, LogicalTensor, Piece
from mpispeed.ckpt.write.request import Request
from mpispeed.ckpt.write.save import SaveReport, carry_out
from mpispeed.mesh.comm import Kinds, together

if TYPE_CHECKING:
    import torch

    from mpispeed.ckpt.format.saving_comm import SavingComm
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
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
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
        self._comm: SavingComm = PatientComm(comm)
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


def has_deferred(tensors: Sequence[LogicalTensor]) -> bool:
    """True if some of this rank's pieces are not in memory; those cannot be copied."""
    pieces = (piece for tensor in tensors for piece in tensor.pieces)
    return any(isinstance(piece.values, Deferred) and not piece.values.is_in_memory for piece in pieces)


class Snapshot:
    """Memory for the pieces of one save, kept from save to save.

    The first `take` maps the memory; later ones only copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.numel()

    def take(self, tensors: Sequence[LogicalTensor]) -> list[LogicalTensor]:
        """The same tensors with copies of their pieces, valid until the next `take`."""
        pieces = [piece for tensor in tensors for piece in tensor.pieces]
        needed = sum(_room(piece) for piece in pieces)
        if needed > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._memory = torch.empty(needed, dtype=torch.uint8)
        taken, at = [], 0
        for tensor in tensors:
            copies = []
            for piece in tensor.pieces:
                copies.append(self._copy(piece, at))
                at += _room(piece)
            taken.append(replace(tensor, pieces=tuple(copies)))
        return taken

    def _copy(self, piece: Piece, at: int) -> Piece:
        values = piece.values
        if isinstance(values, Deferred) and not values.is_in_memory:
            msg = "elements that are not in memory cannot be copied"
            raise TypeError(msg)
        held, done = self._memory[at : at + piece.count * values.dtype.itemsize].view(values.dtype), 0
        for part in piece.parts(0, piece.count):
            held[done : done + part.numel()].copy_(part.detach())
            done += part.numel()
        return replace(piece, values=held)


def _room(piece: Piece) -> int:
    """Bytes of a piece, rounded up so that every piece begins at a page."""
    size = piece.count * piece.values.dtype.itemsize
    return -(-size // schema.ALIGN_BYTES) * schema.ALIGN_BYTES
