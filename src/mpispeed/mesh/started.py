"""Verbs that are started now and waited for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.base.device import is_on_device
from mpispeed.base.errors import StoreError
from mpispeed.base.ledger_file import Kind
from mpispeed.mesh import checks, handover, hosted, staging
from mpispeed.mesh.gate import Label, Ready, text_of
from mpispeed.mesh.work import Poll, Work, nap_until

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.progress import Progress


class Started:
    """Started verbs of a group.

    They run on a duplicate of the group in the order in which they were started, beside blocking verbs
    of the group itself. Buffers belong to the operation until `Work.wait` returns. Messages between
    two ranks are posted at once and do not wait for collectives started before them.
    """

    started: Comm
    progress: Progress | None

    def start(
        self,
        fn: Callable[[Comm], object],
        verb: str = "start",
        buffers: object = None,
        label: Label = "",
        describe: Callable[[], str] | None = None,
        ready: Ready | None = None,
    ) -> Work:
        """Run `fn(comm)` in its turn; it may call blocking verbs of that comm, or of its lane.

        `verb` and `label` say which operation it is and are compared before it runs; if ranks have come with
        different ones, it runs nowhere and the lane is broken: `wait` of this and of everything started later
        raises. `describe` says in words what the operation is for; it is called only then. `ready` is asked until it
        says that what the operation needs on this rank is there; if it says why it will never be, the operation runs
        nowhere either.

        Collective over: the group, in the same order and with the same verb and label on every rank.

        Raises:
            AgreementError: ranks have come with different operations; from `wait`, or from here without threads.
            StoreError: as that, where `ready` of a rank told a problem; names it and its rank.
        """
        comm = self.started
        if self.progress is None:
            work = Work(verb, buffers)
            try:
                problem = None if ready is None else _outcome(ready)
                if problem:
                    what = f"{verb} {label}" if describe is None else text_of(describe)
                    work.finish(StoreError(f"{what}: {problem}"))
                    return work
                with torch.no_grad():
                    fn(comm)
            except Exception as error:
                work.finish(error)
            else:
                work.finish()
            return work
        handed = handover.begin()
        body = fn if handed is None else handed.carrying(fn)
        work = self.progress.submit(comm, lambda: body(comm), verb, buffers, label, describe, ready)
        work.join = None if handed is None else handed.join
        return work

    def start_all_reduce(self, x: torch.Tensor, op: str = "sum", *, scale: float = 1.0) -> Work:
        """Start `all_reduce`. Collective over: the group."""
        checks.flat(self.started, x, "start_all_reduce")
        label = f"{op} of {x.numel()} {x.dtype}"
        return self.start(lambda comm: comm.all_reduce(x, op, scale=scale), "all_reduce", x, label)

    def start_all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start `all_gather`. Collective over: the group."""
        flat = [checks.flat(self.started, t, "start_all_gather") for t in (out, shard)]
        checks.cut(self.started, "all_gather", flat[0], flat[1])
        return self.start(
            lambda comm: comm.all_gather(out, shard), "all_gather", (out, shard), f"of {out.nbytes} bytes"
        )

    def start_reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, op: str = "sum", *, scale: float = 1.0
    ) -> Work:
        """Start `reduce_scatter`. Collective over: the group."""
        for tensor in (shard, full):
            checks.flat(self.started, tensor, "start_reduce_scatter")
        return self.start(
            lambda comm: comm.reduce_scatter(shard, full, op, scale=scale),
            "reduce_scatter",
            (shard, full),
            f"{op} of {full.numel()} {full.dtype}",
        )

    def start_all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """Start `all_to_all`. Collective over: the group."""
        flat = [checks.flat(self.started, t, "start_all_to_all") for t in (out, x)]
        checks.exchange(self.started, flat[0], flat[1], out_counts, counts)
        return self.start(lambda comm: comm.all_to_all(out, x, out_counts, counts), "all_to_all", (out, x))

    def start_broadcast(self, x: torch.Tensor, root: int = 0) -> Work:
        """Start `broadcast`. Collective over: the group."""
        checks.flat(self.started, x, "start_broadcast")
        checks.peer(self.started, root, "start_broadcast")
        return self.start(lambda comm: comm.broadcast(x, root), "broadcast", x, f"of {x.nbytes} bytes from {root}")

    def start_send(self, x: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Post `send`; not collective."""
        comm = self.started
        flat = checks.flat(comm, x, "start_send")
        checks.peer(comm, dst, "start_send", is_other=True)
        row = comm.counting("send", x.nbytes, x, peer=dst, tag=tag, kind=Kind.SEND).post()
        if not is_on_device(flat):
            return self._post("send", x, hosted.post_send(comm, flat, dst, tag), row)
        polls, host = staging.post_send(comm, flat, dst, tag)
        return self._post("send", (x, host), polls, row)

    def start_recv(self, x: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Post `recv`; not collective."""
        comm = self.started
        flat = checks.flat(comm, x, "start_recv")
        checks.peer(comm, src, "start_recv", is_other=True)
        row = comm.counting("recv", 0, x, peer=src, tag=tag, kind=Kind.RECV).post()
        if not is_on_device(flat):
            return self._post("recv", x, hosted.post_recv(comm, flat, src, tag), row)
        polls, host, bring = staging.post_recv(comm, flat, src, tag)
        work = self._post("recv", (x, host), polls, row)
        work.bring = bring
        return work

    def _post(self, verb: str, buffers: object, polls: list[Poll], row: int) -> Work:
        def poll() -> bool:
            while polls and polls[0]():
                polls.pop(0)
            return not polls

        if self.progress is not None and self.progress.is_threaded:
            return self.progress.watch(poll, verb, buffers, row)

        def drive(work: Work) -> None:
            if poll():
                work.finish()

        return Work(verb, buffers, drive, row)


def _outcome(ready: Ready) -> str:
    """What `ready` says once it has something to say."""
    found: list[str] = []

    def poll() -> bool:
        said = ready()
        if said is not None:
            found.append(said)
        return said is not None

    nap_until(poll)
    return found[0]
