"""The primitives over MPI: buffers by address with explicit datatypes, nothing pickled but small objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mpi4py import MPI

from mpispeed.base.ledger_file import Kind
from mpispeed.mesh import checks, shared
from mpispeed.mesh import ledger as ledgers
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.dtypes import REDUCE_NAMES, move_name
from mpispeed.mesh.ending import Ending
from mpispeed.mesh.journal import Journal
from mpispeed.mesh.ledger import Channel
from mpispeed.mesh.transport import Comparison, Fast, Pairs
from mpispeed.mesh.work import Poll, nap_until

EXCHANGE_TAG = 32000
"""Tag of messages inside one verb; tags of users stay below."""

AWAKE_POLLS = 32
"""How often a receive asks before it naps: a message that is there already takes the library a few rounds."""

RECV_NAP_SECONDS = 200e-6
"""Longest nap of a receive: what a message waits in vain, at worst."""

_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


def _moved(x: torch.Tensor) -> list[Any]:
    return [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), getattr(MPI, move_name(x.dtype))]


def _reduced(x: torch.Tensor) -> list[Any]:
    # A dtype that is not in the table fails here rather than being added up as something else.
    return [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), getattr(MPI, REDUCE_NAMES[x.dtype])]


def ending() -> Ending:
    """How MPI ends a job."""
    # Set by `python -m mpi4py` for every error that passes it; without MPI to tell, the name may be missing.
    forget = getattr(MPI, "_set_abort_status", None)
    return Ending(abort=MPI.COMM_WORLD.Abort, forgive=(lambda: forget(0)) if forget else (lambda: None))


class MpiComm(Comm):
    """A group of ranks on an MPI communicator of its own.

    `node_ranks` are the world ranks that share this rank's memory.
    """

    def __init__(
        self,
        handle: MPI.Comm,
        ranks: Sequence[int],
        axes: tuple[str, ...],
        reduction: str,
        journal: Journal,
        node_ranks: frozenset[int] = frozenset(),
        channel: Channel | None = None,
    ) -> None:
        super().__init__(handle.Get_rank(), ranks, axes, reduction, journal)
        self.channel = channel or Channel.root(",".join(axes), ranks)
        self._handle, self._node_ranks = handle, node_ranks
        self.shares_memory = all(rank in node_ranks for rank in ranks)
        self._has_fast = self.size > 1 and self.shares_memory
        self._fast: Fast | None = None

    def fast(self) -> Fast | None:
        """Scratch in shared memory, opened at first use. Collective over: this group, at the first call."""
        if self._has_fast and self._fast is None:
            self._fast = shared.open_scratch(self)
            self._has_fast = self._fast is not None
        return self._fast

    def swap_equal(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """MPI_Alltoall."""
        self._handle.Alltoall(_moved(x), _moved(out))

    def gather_equal(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """MPI_Allgather."""
        is_in_place = checks.is_own_cut(out, shard, self.rank)
        self._handle.Allgather(MPI.IN_PLACE if is_in_place else _moved(shard), _moved(out))

    def library_all_reduce(self, x: torch.Tensor, op: str) -> None:
        """MPI_Allreduce."""
        self._handle.Allreduce(MPI.IN_PLACE, _reduced(x), _OPS[op])

    def library_reduce(self, x: torch.Tensor, root: int, op: str) -> None:
        """MPI_Reduce."""
        if self.rank == root:
            self._handle.Reduce(MPI.IN_PLACE, _reduced(x), _OPS[op], root)
        else:
            self._handle.Reduce(_reduced(x), None, _OPS[op], root)

    def library_reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
        """MPI_Reduce_scatter_block."""
        self._handle.Reduce_scatter_block(_reduced(full), _reduced(shard), _OPS[op])

    def library_broadcast(self, x: torch.Tensor, root: int) -> None:
        """MPI_Bcast."""
        self._handle.Bcast(_moved(x), root)

    def exchange_pairs(self, sends: Pairs, recvs: Pairs) -> None:
        """MPI_Irecv and MPI_Isend of all pairs at once."""
        requests = [self._handle.Irecv(_moved(x), src, EXCHANGE_TAG) for x, src in recvs]
        requests += [self._handle.Isend(_moved(x), dst, EXCHANGE_TAG) for x, dst in sends]
        MPI.Request.Waitall(requests)

    def library_send(self, x: torch.Tensor, dst: int, tag: int) -> None:
        """MPI_Send."""
        self._handle.Send(_moved(x), dst, tag)

    def library_recv(self, x: torch.Tensor, src: int, tag: int) -> None:
        """MPI_Irecv, waited for in naps: MPI_Recv would burn a core, maybe the one its sender computes on."""
        poll = self.post_recv(x, src, tag)
        if not any(poll() for _ in range(AWAKE_POLLS)):
            nap_until(poll, longest_seconds=RECV_NAP_SECONDS)

    def post_send(self, x: torch.Tensor, dst: int, tag: int) -> Poll:
        """MPI_Isend."""
        return self._handle.Isend(_moved(x), dst, tag).Test

    def post_recv(self, x: torch.Tensor, src: int, tag: int) -> Poll:
        """MPI_Irecv."""
        return self._handle.Irecv(_moved(x), src, tag).Test

    def library_barrier(self) -> None:
        """MPI_Barrier."""
        self._handle.Barrier()

    def library_share(self, obj: Any, root: int) -> Any:
        """MPI_Bcast of a pickle."""
        return self._handle.bcast(obj, root)

    def library_gather_objects(self, obj: Any) -> list[Any]:
        """MPI_Allgather of pickles."""
        return list(self._handle.allgather(obj))

    def compare(self, code: int) -> Comparison:
        """MPI_Iallreduce of the least code and the greatest: 16 bytes for any number of ranks."""
        bounds = array("q", (code, -code))
        test = self._handle.Iallreduce(MPI.IN_PLACE, [bounds, MPI.INT64_T], MPI.MIN).Test
        return lambda: (bounds[0], -bounds[1]) if test() else None

    def duplicate(self) -> Comm:
        """MPI_Comm_dup."""
        with self._noting("duplicate"):
            return self._made_of(self._handle.Dup(), self.ranks, self.axes, -1)

    def split(self, color: int, ranks: Sequence[int], axes: tuple[str, ...]) -> Comm:
        """MPI_Comm_split, ordered by rank."""
        with self._noting("split"):
            return self._made_of(self._handle.Split(color, self.rank), ranks, axes, color)

    def _made_of(self, handle: MPI.Comm, ranks: Sequence[int], axes: tuple[str, ...], color: int) -> Comm:
        channel = self.channel.child(color, ",".join(axes), ranks) if self.channel is not None else None
        return MpiComm(handle, ranks, axes, self.reduction, self.journal, self._node_ranks, channel).inherit(self)

    @contextmanager
    def _noting(self, verb: str) -> Iterator[None]:
        """Making a group is collective as well, though it moves no tensor that the journal would count."""
        ledger = ledgers.current()
        row = ledgers.NO_ROW
        if self.channel is not None:
            if ledger is None:
                ledgers.skip(self.channel, Kind.COLLECTIVE)
            else:
                row = ledger.begin(self.channel, Kind.COLLECTIVE, verb)
        try:
            yield
        finally:
            if ledger is not None and row != ledgers.NO_ROW:
                ledger.end(row)

    def grid_coords(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """This rank's place on an MPI Cartesian grid without reordering. Collective over: this group."""
        grid = MPI.Intracomm(self._handle).Create_cart(list(sizes), reorder=False)
        coords = tuple(grid.Get_coords(grid.Get_rank()))
        grid.Free()
        return coords

    def close(self) -> None:
        """MPI_Comm_free. Collective over: this group."""
        if self._fast is not None:
            self._fast.close()
            self._fast = None
        if self._handle not in (MPI.COMM_NULL, MPI.COMM_WORLD):
            self._handle.Free()
