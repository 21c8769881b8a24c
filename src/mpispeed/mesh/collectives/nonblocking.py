"""Non-blocking verbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import StoreError
from mpispeed.mesh.collectives import stream_sync
from mpispeed.mesh.collectives.order_check import Label, Ready, text_of
from mpispeed.mesh.collectives.progress import Progress
from mpispeed.mesh.collectives.transport import Group
from mpispeed.mesh.collectives.work import Posted, Work, nap_until
from mpispeed.mesh.trace.comm_trace import CommTrace

if TYPE_CHECKING:
    from typing_extensions import Self


class Started(Group):
    """Mixin of a group that starts operations.

    They run on a duplicate of the group in the order in which they were started, beside blocking verbs
    of the group itself. Buffers belong to the operation until `Work.wait` returns. Messages between
    two ranks are posted at once and do not wait for collectives started before them.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], axes: tuple[str, ...], reduction: str, comm_trace: CommTrace
    ) -> None:
        super().__init__(rank, ranks, axes, reduction, comm_trace)
        self._started: Self | None = None
        self.progress: Progress | None = None

    @property
    def started(self) -> Self:
        """The group of started verbs: a duplicate of this one, or this one itself."""
        return self if self._started is None else self._started

    def run_on(self, progress: Progress) -> Self:
        """Become a channel's group: started verbs go through `progress`, blocking ones wait for them first."""
        self._started, self.progress, self.is_channel = None, progress, True
        progress.add_group(self)
        return self

    def start_on(self, progress: Progress) -> Self:
        """Let started verbs run on a duplicate through `progress`. Collective over: this group."""
        self._started, self.progress = self.duplicate().run_on(progress), progress
        return self

    def take_turn(self) -> None:
        """On a channel, wait until operations started before have ended."""
        if self.is_channel and self.progress is not None:
            self.progress.drain()

    def start(
        self,
        fn: Callable[[Self], object],
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
        handed = stream_sync.begin()
        body = fn if handed is None else handed.carrying(fn)
        work = self.progress.submit(comm, lambda: body(comm), verb, buffers, label, describe, ready)
        work.join = None if handed is None else handed.join
        return work

    def carry(
        self, fn: Callable[[Self], object], verb: str = "start", buffers: object = None, label: Label = ""
    ) -> Work:
        """As `start`, which peers may call instead, but back when the operation has ended; without a thread's delay.

        Not where this process uses a device: the operation may have to follow others on the thread's stream.
        """
        if self.progress is None or devices.used() is not None:
            work = self.start(fn, verb, buffers, label)
            work.settle()
            return work
        comm = self.started
        return self.progress.carry(comm, lambda: fn(comm), verb, buffers, label)

    def await_posted(self, verb: str, buffers: object, posted: Posted, row: int) -> Work:
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
        if self.progress is not None and self.progress.is_threaded:
            work = self.progress.watch(poll, verb, held, row)
        else:
            work = Work(verb, held, drive, row)
        work.bring = posted.bring
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
