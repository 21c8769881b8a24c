"""Primitives over MPI: buffers by address with explicit datatypes; only small objects are pickled."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from array import array
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from mpi4py import MPI

from mpispeed.base.errors import CommError
from mpispeed.mesh.backends import shared_scratch, shared_slots
from mpispeed.mesh.collectives.host_collectives import is_own_cut
from mpispeed.mesh.collectives.transport import (
    EXCHANGE_TAG,
    SPIN_NS,
    Comparison,
    Fast,
    Pairs,
    Poll,
    Source,
    Transport,
    Waiting,
)
from mpispeed.mesh.collectives.work import nap_until
from mpispeed.mesh.ending import Ending

AWAKE_POLLS = 32
"""How often a receive asks before it naps: a message that is there already takes the library a few rounds."""

RECV_NAP_SECONDS = 200e-6
"""Longest nap of a receive: what a message waits in vain, at worst."""

_OTHER_LENGTH = (
    "a message of an exchange is not as long as this rank waits for: the ranks are at different calls, as after an "
    "error in a pass that the script of one rank has caught; let errors end the job, or catch them on all ranks alike"
)

EXCHANGE_NAP_SECONDS = 20e-6
"""Nap of an exchange whose peers are late."""

AWAKE_SECONDS, AWAKE_BYTES_PER_SECOND = 30e-6, 4e9
"""How long an exchange with peers who are there takes at most; it polls for so long, and naps then."""

_OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}

MOVE_NAMES = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
"""MPI datatype by item size, for verbs that only move bytes."""

REDUCE_NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
"""MPI datatype for reductions by the library; a dtype that is missing here is never handed to one."""

MOST_TAGS = 32000
"""Tags of `of_members`; MPI grants at least 32,767 of them."""


def _moved(x: torch.Tensor) -> list[Any]:
    return [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), getattr(MPI, MOVE_NAMES[x.itemsize])]


def _reduced(x: torch.Tensor) -> list[Any]:
    # A dtype that is not in the table fails here rather than being added up as something else.
    return [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), getattr(MPI, REDUCE_NAMES[x.dtype])]


def ending() -> Ending:
    """The way MPI ends a job."""
    # Set by `python -m mpi4py` for every error that passes it; without MPI to tell, the name may be missing.
    forget = getattr(MPI, "_set_abort_status", None)
    return Ending(abort=_abort, forgive=(lambda: forget(0)) if forget else (lambda: None))


def _abort(code: int) -> None:
    """End the job. The reason was written before; MPI's text about its own call would only follow it."""
    if not os.environ.get("MPISPEED_DEBUG"):
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    MPI.COMM_WORLD.Abort(code)


def grid_coords(handle: MPI.Comm, sizes: Sequence[int]) -> tuple[int, ...]:
    """This rank's place on an MPI Cartesian grid without reordering. Collective over: the communicator."""
    grid = MPI.Intracomm(handle).Create_cart(list(sizes), reorder=False)
    coords = tuple(grid.Get_coords(grid.Get_rank()))
    grid.Free()
    return coords


class MpiTransport(Transport):
    """Primitives of an MPI communicator of its own, which it frees.

    `ranks` are world ranks of the members; `node_ranks` those that share this rank's memory.
    """

    def __init__(self, handle: MPI.Comm, ranks: Sequence[int], node_ranks: frozenset[int] = frozenset()) -> None:
        super().__init__(handle.Get_rank(), len(ranks), shares_memory=all(rank in node_ranks for rank in ranks))
        self._handle, self._node_ranks = handle, node_ranks
        self._is_crowded = len(node_ranks) > (os.cpu_count() or 1)
        # Where ranks outnumber cores, a rank that polls would keep the one it waits for from its core.
        self.waiting = Waiting(ranks, 0 if self._is_crowded else SPIN_NS, self._progress)
        self._open: dict[bool, Fast | None] = {} if self.size > 1 and self.shares_memory else {True: None, False: None}

    def fast(self, *, is_small: bool = False) -> Fast | None:
        """Scratch or slots in shared memory, opened at first use. Collective over: this group, at the first call."""
        if is_small not in self._open:
            opened = shared_slots.open_slots if is_small else shared_scratch.open_scratch
            self._open[is_small] = opened(self, self.waiting)
        return self._open[is_small]

    def _progress(self) -> None:
        """Let the library carry messages on while this rank waits for something else."""
        self._handle.Iprobe(MPI.ANY_SOURCE, EXCHANGE_TAG)

    def alltoall(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """MPI_Alltoall."""
        self._handle.Alltoall(_moved(x), _moved(out))

    def allgather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """MPI_Allgather."""
        is_in_place = is_own_cut(out, shard, self.rank)
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
        """MPI_Irecv and MPI_Isend of all pairs at once, waited for in naps if peers are late.

        MPI_Waitall would burn a core, maybe the one that a late peer needs; where ranks outnumber cores, naps begin
        at once.

        Raises:
            CommError: only on the rank that gets a message of another length than it waits for.
        """
        requests = [self._handle.Irecv(_moved(x), src, EXCHANGE_TAG) for x, src in recvs]
        requests += [self._handle.Isend(_moved(x), dst, EXCHANGE_TAG) for x, dst in sends]
        statuses: list[MPI.Status] = []
        try:
            self._finish(
                functools.partial(MPI.Request.Testall, requests, statuses),
                sum(x.nbytes for pairs in (sends, recvs) for x, _ in pairs),
            )
        except MPI.Exception as error:
            raise CommError(_OTHER_LENGTH) from error
        for (x, _), status in zip(recvs, statuses[: len(recvs)], strict=True):
            if status.Get_count(MPI.BYTE) != x.nbytes:
                raise CommError(_OTHER_LENGTH)

    def _finish(self, poll: Poll, nbytes: int) -> None:
        """Wait for an exchange of so many bytes."""
        if any(poll() for _ in range(AWAKE_POLLS)):
            return
        if not self._is_crowded:
            end = time.perf_counter() + AWAKE_SECONDS + nbytes / AWAKE_BYTES_PER_SECOND
            while time.perf_counter() < end:
                if poll():
                    return
                os.sched_yield()
        nap_until(poll, longest_seconds=EXCHANGE_NAP_SECONDS)

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

    def post_recv_any(self, x: torch.Tensor, tag: int) -> Source:
        """MPI_Improbe of MPI_ANY_SOURCE, then MPI_Mrecv.

        Not MPI_Irecv of any source: between nodes, MPICH 5.0.2 over UCX was seen to lose messages for such receives.
        """
        status = MPI.Status()

        def poll() -> int | None:
            message = self._handle.Improbe(MPI.ANY_SOURCE, tag, status)
            if message is None:
                return None
            message.Recv(_moved(x))
            return status.Get_source()

        return poll

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
        """MPI_Iallreduce of the least and the greatest code: 16 bytes for any number of ranks."""
        bounds = array("q", (code, -code))
        test = self._handle.Iallreduce(MPI.IN_PLACE, [bounds, MPI.INT64_T], MPI.MIN).Test
        return lambda: (bounds[0], -bounds[1]) if test() else None

    def split(self, color: int, ranks: Sequence[int]) -> MpiTransport:
        """MPI_Comm_split, ordered by rank."""
        return MpiTransport(self._handle.Split(color, self.rank), ranks, self._node_ranks)

    def of_members(self, members: Sequence[int], ranks: Sequence[int], name: str) -> MpiTransport:
        """MPI_Comm_create_group."""
        everyone = self._handle.Get_group()
        chosen = everyone.Incl(list(members))
        handle = MPI.Intracomm(self._handle).Create_group(chosen, crc32(name.encode()) % MOST_TAGS)
        chosen.Free()
        everyone.Free()
        return MpiTransport(handle, ranks, self._node_ranks)

    def close(self) -> None:
        """MPI_Comm_free. Collective over: this group."""
        for shared in self._open.values():
            if shared is not None:
                shared.close()
        self._open = {True: None, False: None}
        if self._handle not in (MPI.COMM_NULL, MPI.COMM_WORLD):
            self._handle.Free()
