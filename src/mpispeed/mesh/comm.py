"""Verbs on torch tensors and agreements, as methods of a group of ranks; blocking, or started now and waited for later.

`Comm` holds a `Group`, which holds the `Transport` of a backend: MPI, one rank alone, simulated ranks. The checks and
implementations of verbs are in `verbs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import AgreementError, MpispeedError, StoreError
from mpispeed.mesh.collectives import verbs
from mpispeed.mesh.collectives.group import Call, CommTrace, Group
from mpispeed.mesh.collectives.transport import Posted
from mpispeed.mesh.collectives.verbs import Message, Verb, check_peer
from mpispeed.mesh.collectives.work import Label, Ready, Work, described, nap_until, stream_sync

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.progress import Progress

P = ParamSpec("P")
Counts = Sequence[int] | None
"""Elements to or from each rank; None: equal parts."""

Kinds = type[Exception] | tuple[type[Exception], ...]
Agree = Callable[[bool, str, type[MpispeedError]], None]


class Comm:
    """A group of ranks and the verbs over it.

    Verbs are collective over this group unless their docstring says otherwise, take contiguous tensors of any dtype
    and shape, and never allocate a result. Tensors may be on a device: on all ranks of a collective, or on none.

    Started verbs run on a duplicate of the group in the order in which they were started, beside blocking verbs of the
    group itself. Buffers belong to the operation until `Work.wait` returns. Messages between two ranks are posted at
    once and do not wait for collectives started before them.

    Attributes:
        group: members, limits, scratch, order of calls.
        transport: primitives without checks, which enter no trace.
        rank, size: position of this rank in the group, and number of ranks.
        ranks: world ranks of the members.
        axes: names of the axes that the group is over.
        progress: the channel of started verbs; None: they run at once.
    """

    def __init__(self, group: Group, progress: Progress | None = None, started: Comm | None = None) -> None:
        """Join a channel, if there is one.

        Args:
            group: the members.
            progress: the channel; blocking verbs keep its order if they are in the turn of `group`.
            started: what started verbs run on, on a channel of its own; `group` itself by default.
        """
        self.group, self.transport, self._started = group, group.transport, started
        self.rank, self.size, self.ranks, self.axes = group.rank, group.size, group.ranks, group.axes
        self.progress: Progress | None = progress if started is None else started.progress
        if progress is not None:
            progress.add_group(group)

    def __str__(self) -> str:
        return str(self.group)

    def __deepcopy__(self, memo: Any) -> Comm:
        """The same group: copies of a layer communicate as the layer does."""
        return self

    @property
    def reduction(self) -> str:
        """The order of sums: "ordered" or "mpi"."""
        return self.group.reduction

    @property
    def comm_trace(self) -> CommTrace:
        """The trace that verbs of this group enter."""
        return self.group.comm_trace

    @property
    def started(self) -> Comm:
        """What started verbs run on: a duplicate of this group, or this one itself."""
        return self if self._started is None else self._started

    def duplicate(self, progress: Progress | None = None) -> Comm:
        """The same ranks with message traffic of their own; on a channel all verbs keep its order.

        Collective over: this group.
        """
        turn = None if progress is None else progress.drain
        return _child(self.group, self.group.split(0, self.ranks, self.axes, turn=turn), progress)

    def starting_on(self, progress: Progress) -> Comm:
        """This group, with started verbs on a duplicate through `progress`. Collective over: this group."""
        return Comm(self.group, started=self.duplicate(progress))

    def split(
        self,
        color: int,
        ranks: Sequence[int],
        axes: tuple[str, ...],
        *,
        reduction: str = "",
        comm_trace: CommTrace | None = None,
    ) -> Comm:
        """The group of equal `color`, whose world ranks are `ranks`; reduction and trace are those of this one.

        Collective over: this group.
        """
        return _child(self.group, self.group.split(color, ranks, axes, reduction=reduction, comm_trace=comm_trace))

    def of_members(self, members: Sequence[int], name: str, axes: tuple[str, ...], *, reduction: str = "") -> Comm:
        """The group of some ranks of this one, in the given order. `name` is the same on all of them.

        Collective over: those ranks only; two groups that are made at the same time need different names.
        """
        return _child(self.group, self.group.of_members(members, name, axes, reduction=reduction))

    def keeps_lead(self, device: torch.device) -> bool:
        """True if verbs on tensors of `device` make the host wait for nothing, the same on all ranks of the group."""
        return self.group.keeps_lead(device) and self.started.group.keeps_lead(device)

    def close(self) -> None:
        """Release the group and that of started verbs, whose channel has ended. Collective over: this group."""
        if self._started is not None:
            self._started.close()
        self.group.close()

    def all_reduce(self, x: torch.Tensor, op: str = "sum", *, scale: float = 1.0) -> None:
        """Combine `x` of all ranks in place; `scale` multiplies the sum before it is rounded.

        Collective over: this group.
        """
        verbs.ALL_REDUCE.carry_out(self.group, x, op, scale)

    def reduce(self, x: torch.Tensor, root: int = 0, op: str = "sum") -> None:
        """Combine `x` of all ranks into `x` of `root`; other ranks keep theirs.

        Collective over: this group.
        """
        verbs.REDUCE.carry_out(self.group, x, root, op)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        """Copy `x` of `root` to all ranks.

        Collective over: this group.
        """
        verbs.BROADCAST.carry_out(self.group, x, root)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Collect the shards of all ranks in rank order; `shard` may be this rank's own slice of `out`.

        Collective over: this group.
        Shapes: out has `size` times the elements of shard.
        """
        verbs.ALL_GATHER.carry_out(self.group, out, shard)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str = "sum", *, scale: float = 1.0) -> None:
        """Combine `full` of all ranks and keep this rank's equal cut in `shard`.

        `shard` may be fp32 where `full` is a 16-bit float: then the sum is not rounded. It may be this
        rank's own slice of `full`; other contents of `full` are left alone.

        Collective over: this group.
        Shapes: full has `size` times the elements of shard.
        """
        verbs.REDUCE_SCATTER.carry_out(self.group, shard, full, op, scale)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, out_counts: Counts = None, counts: Counts = None) -> None:
        """Send the j-th part of `x` to rank j; `out` receives the parts in rank order.

        Collective over: this group; either all ranks give counts or none does.
        Units: counts are elements of the flat tensors.
        """
        verbs.ALL_TO_ALL.carry_out(self.group, out, x, out_counts, counts)

    def gather(self, out: torch.Tensor, shard: torch.Tensor, root: int = 0) -> None:
        """Collect the shards of all ranks in rank order in `out` of `root`, of which `shard` may be the own slice.

        Collective over: this group.
        Shapes: out has `size` times the elements of shard on `root`; on other ranks it is not used and may be empty.
        """
        verbs.GATHER.carry_out(self.group, out, shard, root)

    def scatter(self, shard: torch.Tensor, full: torch.Tensor, root: int = 0) -> None:
        """Give each rank its equal cut of `full` of `root`; `shard` may be the own slice of `full`.

        Collective over: this group.
        Shapes: full has `size` times the elements of shard on `root`; on other ranks it is not used and may be empty.
        """
        verbs.SCATTER.carry_out(self.group, shard, full, root)

    def send(self, x: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send `x` to rank `dst` of this group, which receives with the same tag and size."""
        verbs.SEND.carry_out(self.group, x, dst, tag)

    def recv(self, x: torch.Tensor, src: int, tag: int = 0) -> None:
        """Fill `x` with the message that rank `src` of this group sends with the same tag and size."""
        verbs.RECV.carry_out(self.group, x, src, tag)

    def barrier(self) -> None:
        """Return when all ranks have called. Collective over: this group."""
        with Call(self.group, "barrier", 0):
            self.transport.library_barrier()

    def agree(self, ok: bool, message: str = "", error: type[MpispeedError] = AgreementError) -> None:
        """Raise `error` on every rank if `ok` is false on any; else on none.

        Collective over: this group.
        """
        with Call(self.group, "agree", 0):
            flag = torch.tensor([int(ok)], dtype=torch.uint8, device="cpu")  # also where meta is the default
            self.transport.library_all_reduce(flag, "min")
            if flag.item():
                return
            reports = self.transport.library_gather_objects((bool(ok), message))
        raise disagreement(self.ranks, reports, error)

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
        check_peer(self.group, root, "share")
        with Call(self.group, "share", 0, peer=root):
            return self.transport.library_share(obj, root)

    def gather_objects(self, obj: Any) -> list[Any]:
        """The small Python objects of all ranks in rank order, on every rank.

        Collective over: this group.
        """
        with Call(self.group, "gather_objects", 0):
            return self.transport.library_gather_objects(obj)

    def start_all_reduce(self, x: torch.Tensor, op: str = "sum", *, scale: float = 1.0) -> Work:
        """Start `all_reduce`. Collective over: the group."""
        return self._start(verbs.ALL_REDUCE, x, op, scale)

    def start_all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start `all_gather`. Collective over: the group."""
        return self._start(verbs.ALL_GATHER, out, shard)

    def start_reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, op: str = "sum", *, scale: float = 1.0
    ) -> Work:
        """Start `reduce_scatter`. Collective over: the group."""
        return self._start(verbs.REDUCE_SCATTER, shard, full, op, scale)

    def start_all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, out_counts: Counts = None, counts: Counts = None
    ) -> Work:
        """Start `all_to_all`. Collective over: the group."""
        return self._start(verbs.ALL_TO_ALL, out, x, out_counts, counts)

    def start_broadcast(self, x: torch.Tensor, root: int = 0) -> Work:
        """Start `broadcast`. Collective over: the group."""
        return self._start(verbs.BROADCAST, x, root)

    def start_send(self, x: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Post `send`; not collective."""
        return self._post(verbs.SEND, x, dst, tag)

    def start_recv(self, x: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Post `recv`; not collective."""
        return self._post(verbs.RECV, x, src, tag)

    def start(
        self,
        fn: Callable[[Comm], object],
        verb: str = "start",
        buffers: object = None,
        label: Label = "",
        describe: Callable[[], str] | None = None,
        ready: Ready | None = None,
    ) -> Work:
        """Run `fn(comm)` in its turn; it may call blocking verbs of that comm, or of its channel.

        `verb` and `label` identify the operation and are compared before it runs; if they differ between ranks, it runs
        nowhere and the channel is broken: `wait` of this and of everything started later raises. `describe` gives its
        purpose in words, and is called only then. `ready` is polled until the operation's inputs on this rank are
        there; if it returns an error text, the operation runs nowhere either.

        Collective over: the group, in the same order and with the same verb and label on every rank.

        Raises:
            AgreementError: ranks have come with different operations; from `wait`, or from here without threads.
            StoreError: likewise, where `ready` of a rank returned an error; names both.
        """
        comm = self.started
        if self.progress is None:
            what = describe or (lambda: f"{verb} {label}")
            return _done_at_once(Work(verb, buffers), partial(fn, comm), what, ready)
        handed = stream_sync()
        body = fn if handed is None else handed.carrying(fn)
        work = self.progress.submit(comm.group, lambda: body(comm), verb, buffers, label, describe, ready)
        work.join = None if handed is None else handed.join
        return work

    def _start(self, verb: Verb[P], *args: P.args, **kwargs: P.kwargs) -> Work:
        verb.check(self.started.group, f"start_{verb.name}", args)
        label = "" if verb.label is None else verb.label(*args, **kwargs)
        return self.start(
            lambda comm: verb.carry_out(comm.group, *args, **kwargs), verb.name, args[: verb.tensors], label
        )

    def _post(self, verb: Message[P], *args: P.args, **kwargs: P.kwargs) -> Work:
        posted, row = verb.post(self.started.group, *args, **kwargs)
        return await_posted(self, verb.name, args[0], posted, row)


def _child(group: Group, made: Group, progress: Progress | None = None) -> Comm:
    """The verbs of a group made of `group`, with a path for tensors of a device where that has a way.

    Collective over: `made`.
    """
    comm = Comm(made, progress)
    if group.find_path is not None:
        group.find_path(comm)
    return comm


def carry(
    comm: Comm, fn: Callable[[Comm], object], verb: str = "start", buffers: object = None, label: Label = ""
) -> Work:
    """As `Comm.start`, which peers may call instead, but back when the operation has ended; without a thread's delay.

    Not where this process uses a device: the operation may have to follow others on the thread's stream.
    """
    if comm.progress is None or devices.used() is not None:
        work = comm.start(fn, verb, buffers, label)
        work.settle()
        return work
    started = comm.started
    return comm.progress.carry(started.group, lambda: fn(started), verb, buffers, label)


def await_posted(comm: Comm, verb: str, buffers: object, posted: Posted, row: int) -> Work:
    """The handle of a message that is under way."""
    polls = posted.polls

    def poll() -> bool:
        while polls and polls[0]():
            polls.pop(0)
        return not polls

    def drive(work: Work) -> None:
        if poll():
            work.finish()

    held = (buffers, posted.kept)
    if comm.progress is not None and comm.progress.is_threaded:
        work = comm.progress.watch(poll, verb, held, row)
    else:
        work = Work(verb, held, drive, row)
    work.bring = posted.bring
    return work


def disagreement(
    ranks: Sequence[int], reports: Sequence[tuple[bool, str]], error: type[MpispeedError]
) -> MpispeedError:
    """The error that all ranks raise, from the reports of members at `ranks`."""
    failed = [(ranks[i], text) for i, (is_ok, text) in enumerate(reports) if not is_ok]
    shown = ", ".join(str(rank) for rank, _ in failed[:8]) + (", ..." if len(failed) > 8 else "")
    text = next((text for _, text in failed if text), "no reason given")
    msg = text if len(ranks) == 1 else f"rank{'s' if len(failed) > 1 else ''} {shown} of {len(ranks)}: {text}"
    raised = error(msg)
    raised.is_collective = True
    return raised


def _done_at_once(work: Work, body: Callable[[], object], describe: Callable[[], str], ready: Ready | None) -> Work:
    """Carry an operation out where there is no channel."""
    try:
        problem = None if ready is None else _outcome(ready)
        if problem:
            work.finish(StoreError(f"{described(describe)}: {problem}"))
            return work
        with torch.no_grad():
            body()
    except Exception as error:
        work.finish(error)
    else:
        work.finish()
    return work


def _outcome(ready: Ready) -> str:
    """The text of `ready`, once it is not None."""
    found: list[str] = []

    def poll() -> bool:
        said = ready()
        if said is not None:
            found.append(said)
        return said is not None

    nap_until(poll)
    return found[0]


# -- steps that fail on all ranks if they fail on one ---------------------------------------------------------------


@contextmanager
def together(agree: Agree, error: type[MpispeedError], doing: str = "", plain: Kinds = MpispeedError) -> Iterator[None]:
    """As `Comm.together`, for any object with `agree`. Collective over: the ranks that agree."""
    failure: Exception | None = None
    try:
        yield
    except Exception as caught:  # whatever it is: the other ranks are on their way to the agreement
        failure = caught
    try:
        agree(failure is None, "" if failure is None else text_of(failure, doing, plain), error)
    except error as told:
        raise told from failure
    finally:
        failure = None  # else its traceback holds this frame, and this frame holds it


def agree_by_texts(gather_objects: Callable[[str], list[str]]) -> Agree:
    """An `agree` for `together` of ranks that gather their texts; the first is raised, with its rank unless all failed.

    This suits mistakes that all ranks make alike, such as those of a configuration.
    """

    def agree(ok: bool, message: str, error: type[MpispeedError]) -> None:
        texts = gather_objects("" if ok else message)
        failed = [rank for rank, text in enumerate(texts) if text]
        if failed:
            first = texts[failed[0]]
            raised = error(first if len(failed) == len(texts) else f"{first} (on rank {failed[0]})")
            raised.is_collective = True
            raise raised

    return agree


class Failures:
    """Steps of one rank between which the ranks communicate; the first failure is kept until they can agree."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context of one step; a failure ends the step, and nothing is raised."""
        try:
            yield
        except Exception as failure:  # whatever it is: the other ranks go on to the next exchange
            if self.first is None:
                self.first = failure

    def text(self, *, doing: str = "", plain: Kinds = MpispeedError) -> str:
        """The text of the failure, formed as by `together`; "" without one."""
        return "" if self.first is None else text_of(self.first, doing, plain)

    def raise_first(self) -> None:
        """Raise the failure that was kept, if any; it is forgotten. For the inside of `together`."""
        failure, self.first = self.first, None
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # as in `together`


def text_of(failure: Exception, doing: str = "", plain: Kinds = MpispeedError) -> str:
    """The text of a failure that other ranks are told: with its type, unless it is of the kinds in `plain`."""
    name, text = type(failure).__name__, str(failure)
    said = text or name if isinstance(failure, plain) else f"{name}: {text}"
    return f"{doing}: {said}" if doing else said
