"""The verbs on torch tensors: checks, choice of algorithm, order of reduction, journal.

MPI, one rank alone and simulated ranks implement the primitives of `transport.Transport`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from mpispeed.base.device import is_on_device
from mpispeed.base.errors import AgreementError, CommError, MpispeedError
from mpispeed.base.ledger_file import Kind
from mpispeed.mesh import checks, hosted, staging
from mpispeed.mesh.call import Call
from mpispeed.mesh.dtypes import HALF_FLOATS, check_reduction
from mpispeed.mesh.journal import Journal
from mpispeed.mesh.ledger import Channel
from mpispeed.mesh.progress import Progress
from mpispeed.mesh.started import Started
from mpispeed.mesh.transport import Fast, Transport

CHUNK_BYTES = 1 << 30
"""Largest message; keeps counts below 2^31 elements for MPI libraries that refuse more."""

WINDOW_BYTES = 64 << 20
"""Scratch of the ordered reductions, per buffer; larger tensors pass through it in windows."""

FAST_BYTES = 1 << 20
"""From this size on ordered sums go through shared memory where ranks share it."""


class Verbs(Protocol):
    """The verbs on flat tensors that were checked: a module for memory of the host, one for that of devices."""

    def all_reduce(self, comm: Comm, x: torch.Tensor, op: str, scale: float) -> None:
        """Combine in place."""

    def reduce(self, comm: Comm, x: torch.Tensor, root: int, op: str) -> None:
        """Combine into `x` of `root`."""

    def broadcast(self, comm: Comm, x: torch.Tensor, root: int) -> None:
        """Copy `x` of `root` to all."""

    def all_gather(self, comm: Comm, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Equal shards in rank order."""

    def reduce_scatter(self, comm: Comm, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
        """Combine and keep the own cut."""

    def all_to_all(
        self, comm: Comm, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int] | None,
        counts: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """Equal parts, or parts of given lengths."""

    def send(self, comm: Comm, x: torch.Tensor, dst: int, tag: int) -> None:
        """One message."""

    def recv(self, comm: Comm, x: torch.Tensor, src: int, tag: int) -> None:
        """One message."""


class Comm(Started, Transport):
    """A group of ranks and the verbs over it.

    Verbs are collective over this group unless their docstring says otherwise, take contiguous tensors of
    any dtype and shape, and never allocate a result. Tensors of a device go through `staging`: on all ranks
    of a collective, or on none.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], axes: tuple[str, ...], reduction: str, journal: Journal
    ) -> None:
        if reduction not in ("ordered", "mpi"):
            msg = f"reduction={reduction!r} is unknown; choose 'ordered' (same bits on any library) or 'mpi' (its own)"
            raise CommError(msg)
        self.rank, self.size = rank, len(ranks)
        self.ranks, self.axes = ranks, axes
        self.reduction, self.journal = reduction, journal
        self.chunk_bytes, self.window_bytes, self.fast_bytes = CHUNK_BYTES, WINDOW_BYTES, FAST_BYTES
        self.timeout_seconds: float | None = None
        self.started: Comm = self
        self.progress: Progress | None = None
        self.is_lane = False
        self.channel: Channel | None = None  # None: not in the ledger
        self.shares_memory = True  # all ranks of the group are on one node
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}

    # -- verbs -----------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: str = "sum", *, scale: float = 1.0) -> None:
        """Combine `x` of all ranks in place; `scale` multiplies the sum before it is rounded.

        Collective over: this group.
        """
        flat = checks.flat(self, x, "all_reduce")
        check_reduction(x.dtype, op, scale, f"all_reduce over {self}")
        with self.counting("all_reduce", 2 * x.nbytes * (self.size - 1) // self.size, x, op):
            _verbs(flat).all_reduce(self, flat, op, scale)

    def reduce(self, x: torch.Tensor, root: int = 0, op: str = "sum") -> None:
        """Combine `x` of all ranks into `x` of `root`; other ranks keep theirs.

        Collective over: this group.
        """
        flat = checks.flat(self, x, "reduce")
        check_reduction(x.dtype, op, 1.0, f"reduce over {self}")
        checks.peer(self, root, "reduce")
        with self.counting("reduce", 0 if self.rank == root else x.nbytes, x, op, peer=root):
            _verbs(flat).reduce(self, flat, root, op)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        """Copy `x` of `root` to all ranks.

        Collective over: this group.
        """
        flat = checks.flat(self, x, "broadcast")
        checks.peer(self, root, "broadcast")
        sent = x.nbytes if self.rank == root and self.size > 1 else 0
        with self.counting("broadcast", sent, x, peer=root):
            _verbs(flat).broadcast(self, flat, root)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Collect the shards of all ranks in rank order; `shard` may be this rank's own slice of `out`.

        Collective over: this group.
        Shapes: out has `size` times the elements of shard.
        """
        whole, part = checks.flat(self, out, "all_gather"), checks.flat(self, shard, "all_gather")
        checks.cut(self, "all_gather", whole, part)
        with self.counting("all_gather", out.nbytes * (self.size - 1) // self.size, out):
            _verbs(whole, part).all_gather(self, whole, part)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str = "sum", *, scale: float = 1.0) -> None:
        """Combine `full` of all ranks and keep this rank's equal cut in `shard`.

        `shard` may be fp32 where `full` is a 16-bit float: then the sum is not rounded. It may be this
        rank's own slice of `full`; other contents of `full` are left alone.

        Collective over: this group.
        Shapes: full has `size` times the elements of shard.
        """
        part, whole = checks.flat(self, shard, "reduce_scatter"), checks.flat(self, full, "reduce_scatter")
        is_widened = full.dtype in HALF_FLOATS and shard.dtype == torch.float32
        checks.cut(self, "reduce_scatter", whole, part, is_widened=is_widened)
        check_reduction(full.dtype, op, scale, f"reduce_scatter over {self}")
        with self.counting("reduce_scatter", full.nbytes * (self.size - 1) // self.size, full, op):
            _verbs(whole, part).reduce_scatter(self, part, whole, op, scale)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Send the j-th part of `x` to rank j; `out` receives the parts in rank order.

        Collective over: this group; either all ranks give counts or none does.
        Units: counts are elements of the flat tensors.
        """
        target, source = checks.flat(self, out, "all_to_all"), checks.flat(self, x, "all_to_all")
        checks.exchange(self, target, source, out_counts, counts)
        kept = source.numel() // self.size if counts is None else counts[self.rank]
        sent = (source.numel() - kept) * source.itemsize
        with self.counting("all_to_all", sent, x, is_even=counts is None):
            _verbs(target, source).all_to_all(self, target, source, out_counts, counts)

    def send(self, x: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send `x` to rank `dst` of this group, which receives with the same tag and size."""
        flat = checks.flat(self, x, "send")
        checks.peer(self, dst, "send", is_other=True)
        with self.counting("send", x.nbytes, x, peer=dst, tag=tag, kind=Kind.SEND):
            _verbs(flat).send(self, flat, dst, tag)

    def recv(self, x: torch.Tensor, src: int, tag: int = 0) -> None:
        """Fill `x` with what rank `src` of this group sends with the same tag and size."""
        flat = checks.flat(self, x, "recv")
        checks.peer(self, src, "recv", is_other=True)
        with self.counting("recv", 0, x, peer=src, tag=tag, kind=Kind.RECV):
            _verbs(flat).recv(self, flat, src, tag)

    def barrier(self) -> None:
        """Return when all ranks have called.

        Collective over: this group.
        """
        with self.counting("barrier", 0):
            self.library_barrier()

    def agree(self, ok: bool, message: str = "", error: type[MpispeedError] = AgreementError) -> None:
        """Raise `error` on every rank if any rank says it is not `ok`; else on none.

        Collective over: this group.
        """
        with self.counting("agree", 0):
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

    def share(self, obj: Any, root: int = 0) -> Any:
        """The small Python object that rank `root` passed; other ranks' argument is ignored.

        Collective over: this group.
        """
        checks.peer(self, root, "share")
        with self.counting("share", 0, peer=root):
            return self.library_share(obj, root)

    def gather_objects(self, obj: Any) -> list[Any]:
        """The small Python objects of all ranks in rank order, on every rank.

        Collective over: this group.
        """
        with self.counting("gather_objects", 0):
            return self.library_gather_objects(obj)

    def __str__(self) -> str:
        return f"{','.join(self.axes) or 'a group'} ({self.size} rank{'s' if self.size > 1 else ''})"

    def inherit(self, parent: Comm) -> Comm:
        """Take limits and time-outs from the group this one was made of."""
        self.chunk_bytes, self.window_bytes = parent.chunk_bytes, parent.window_bytes
        self.fast_bytes, self.timeout_seconds = parent.fast_bytes, parent.timeout_seconds
        return self

    def run_on(self, progress: Progress) -> Comm:
        """Become a lane's group: started verbs go through `progress`, blocking ones wait for them first."""
        self.started, self.progress, self.is_lane = self, progress, True
        progress.add_group(self)
        return self

    def start_on(self, progress: Progress) -> Comm:
        """Let started verbs run on a duplicate through `progress`. Collective over: this group."""
        self.started, self.progress = self.duplicate().run_on(progress), progress
        return self

    # -- for the algorithms over this group ----------------------------------------------------------------

    @property
    def threads(self) -> int:
        """Threads a local sum may use; beside a computing main thread only one."""
        return 1 if self.is_lane else torch.get_num_threads()

    def scratch(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of this group that only grows. Shapes: [count]."""
        wanted = count * dtype.itemsize
        # One set per thread: lanes run elsewhere, but a blocking verb may run beside a started send.
        key = (name, threading.get_ident())
        kept = self._scratch.get(key)
        if kept is None or kept.numel() < wanted:
            kept = self._scratch[key] = torch.empty(wanted, dtype=torch.uint8)
        return kept[:wanted].view(dtype)

    def window_elements(self, dtype: torch.dtype) -> int:
        """Elements per rank and window so that a window of all ranks fits scratch and message limits."""
        return max(1, min(self.window_bytes, self.chunk_bytes) // (self.size * dtype.itemsize))

    def counting(
        self,
        verb: str,
        sent_bytes: int,
        x: torch.Tensor | None = None,
        op: str = "",
        *,
        peer: int = -1,
        tag: int = 0,
        kind: Kind = Kind.COLLECTIVE,
        is_even: bool = True,
    ) -> Call:
        """One call of a verb on `x`, as a context; on a lane, what was started before finishes first.

        `peer` is a position in this group. `is_even` is False where ranks rightly come with different sizes.
        """
        return Call(self, verb, sent_bytes, x, op, peer, tag, kind, is_even)

    def fast(self) -> Fast | None:
        """The shared-memory shortcut, if all ranks of the group share memory; the same answer on all of them.

        Collective over: this group, at the first call.
        """
        return None


def _verbs(*tensors: torch.Tensor) -> Verbs:
    """What carries verbs out where the tensors are."""
    return staging if any(is_on_device(x) for x in tensors) else hosted
