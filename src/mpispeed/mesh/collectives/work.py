"""A started operation: its handle, its place among work of a device, and the check that all ranks mean the same one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from zlib import crc32

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import AgreementError, CommError, MpispeedError, StoreError
from mpispeed.base.recorder_words import Kind
from mpispeed.base.units import format_list
from mpispeed.mesh import recorder as recorders

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.group import Group
    from mpispeed.mesh.collectives.transport import Comparison, Poll

T = TypeVar("T")

SHORTEST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 1e-3

Label = str | int
Ready = Callable[[], str | None]
"""Whether what an operation needs on this rank is there: None: not yet; "": yes; else why it never will be."""

FAREWELL = 0
"""Code of a rank that only ends a gate at which others wait."""

MOST_TEXTS = 2000
"""After so many different labels, which may be counters, no more descriptions are asked for."""

_TEXTS: dict[tuple[int, str, Label], str] = {}
"""What started operations are for, in words, by group, verb and label."""

SHOWN = 8
"""Most ranks, and most different texts, that a message names."""


def nap_until(poll: Poll, limit_seconds: float = float("inf"), longest_seconds: float = LONGEST_NAP_SECONDS) -> bool:
    """Sleep in short naps, growing to `longest_seconds`, until `poll` is true; False if the time ran out first."""
    end, nap = time.monotonic() + limit_seconds, SHORTEST_NAP_SECONDS
    while not poll():
        if time.monotonic() > end:
            return False
        time.sleep(nap)
        nap = min(nap * 1.5, longest_seconds)
    return True


def in_this_mode(fn: Callable[[], object]) -> Callable[[], object]:
    """`fn`, to be called later as if now: only in inference mode may anything write to tensors that were made there."""
    if not torch.is_inference_mode_enabled():
        return fn

    def call() -> object:
        with torch.inference_mode():
            return fn()

    return call


class Work:
    """A started operation; holds on to its buffers until it is done.

    `drive`, if given, is called while waiting, for transports without a progress thread. `row` is that of the recorder.
    For tensors of a device, `join` makes later work of the waiting thread come after the operation, and `bring` copies
    a message from host memory to its destination, once.
    """

    join: Callable[[], object] | None = None
    bring: Callable[[], object] | None = None

    def __init__(
        self,
        verb: str,
        buffers: object = None,
        drive: Callable[[Work], None] | None = None,
        row: int = recorders.NO_ROW,
    ) -> None:
        self.verb, self.row = verb, row
        self._buffers = buffers
        self._drive = drive
        self._done = threading.Event()
        self._lock = threading.Lock()  # of `_after`, until `_done` is set
        self._error: BaseException | None = None
        self._after: list[Callable[[], object]] = []

    def is_done(self) -> bool:
        """True once the operation has ended, well or badly."""
        if self._drive is not None and not self._done.is_set():
            self._drive(self)
        return self._done.is_set()

    is_completed = is_done  # as torch calls it

    @property
    def buffers(self) -> object:
        """What the operation uses until it is done."""
        return self._buffers

    @property
    def error(self) -> BaseException | None:
        """What an operation that has ended badly raises from `wait`."""
        return self._error

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the operation is done; raise its error, if any.

        Raises:
            CommError: `timeout_seconds` passed first.
        """
        if not self.settle(timeout_seconds):
            msg = f"{self.verb} was not done after {timeout_seconds} s; another rank may not have started it"
            raise CommError(msg)
        if self._error is not None:
            raise self._error
        if self.bring is not None:
            bring, self.bring = self.bring, None
            bring()

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """Block until the operation has ended, well or badly; False if the time ran out first."""
        has_ended = self._done.is_set() or self._await(timeout_seconds)
        if has_ended and self.join is not None:
            self.join()
        return has_ended

    def _await(self, timeout_seconds: float | None) -> bool:
        recorder = recorders.current() if self.row != recorders.NO_ROW else None
        if recorder is not None:
            recorder.waits_for(self.row)
        try:
            if self._drive is None:
                return self._done.wait(timeout_seconds)
            return nap_until(self.is_done, float("inf") if timeout_seconds is None else timeout_seconds)
        finally:
            if recorder is not None:
                recorder.waits_for(recorders.NO_ROW)

    def after(self, fn: Callable[[], object]) -> None:
        """Call `fn` once when the operation has ended, well or badly, on the thread that ends it; now if it has.

        Whoever waits does so for `fn` too, unless the operation has ended before.
        """
        with self._lock:
            if not self._done.is_set():
                self._after.append(fn)
                return
        fn()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done; called by the thread that carries the operation out."""
        self._error, self._buffers, self._drive = error, None, None
        recorder = recorders.current() if self.row != recorders.NO_ROW else None
        if recorder is not None:
            recorder.end(self.row)
        failures: list[BaseException] = []
        while (fn := self._next_after()) is not None:
            try:
                fn()
            except BaseException as failure:  # whoever waits must not hang because a callback failed
                failures.append(failure)
        if failures:
            raise failures[0]

    def _next_after(self) -> Callable[[], object] | None:
        """What is to be called next, in the order in which it was given; where nothing is left, this is done."""
        with self._lock:
            if self._after:
                return self._after.pop(0)
            self._done.set()
            return None


Wait = Callable[[Work, Callable[[], str]], None]
"""Waits for a started operation; the second argument says what for, in words."""


# -- order on a device -------------------------------------------------------------------------------------------------


_OWN = threading.local()
"""Streams of this thread: each progress thread has its own, so that copies overlap with the caller's work."""


class StreamSync:
    """Stream dependencies before and after one started verb."""

    def __init__(self, device: torch.device) -> None:
        """Note the work queued by this thread."""
        self._device, self._begin = device, devices.mark(device)
        self._end: Any = None
        self._held: Any = None

    def carrying(self, fn: Callable[[T], object]) -> Callable[[T], object]:
        """`fn`, on the stream of the thread that calls it; its buffers are held until `join`.

        Memory in use on the channel's stream would otherwise be reused on the stream it came from.
        """
        self._held = fn

        def carried(comm: T) -> None:
            with devices.on_stream(self._device, _own_stream(self._device)):
                devices.follow(self._device, self._begin)
                try:
                    fn(comm)
                finally:
                    self._end = devices.mark(self._device)

        return carried

    def join(self) -> None:
        """Make later work of this thread wait for the verb. Not blocking."""
        if self._end is not None:
            devices.follow(self._device, self._end)
        self._held = None


def stream_sync() -> StreamSync | None:
    """Dependencies of a verb that is started now; None where this process uses no device."""
    return StreamSync(devices.IN_USE[0]) if devices.IN_USE else None


def _own_stream(device: torch.device) -> Any:
    streams = _OWN.__dict__.setdefault("streams", {})
    if device not in streams:
        # A new thread has the first device of the node current: calls there would create a context in its memory.
        devices.module_of(device).set_device(device)
        streams[device] = devices.module_of(device).Stream(device=device)
    return streams[device]


# -- order check -------------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """Identity of a group of a channel, equal on all of its members and unique among groups."""

    channel: int
    axes: tuple[str, ...]
    first: int
    size: int
    members: int  # checksum of the member list
    copy: int  # number among groups of the channel that are equal in everything else


@lru_cache(maxsize=4096)
def code_of(verb: str, label: Label) -> int:
    """A number from 1 to 2^63 - 1 that is the same in every process, unlike Python's own hash."""
    text = f"{verb}\0{type(label).__name__}\0{label}"
    return max(1, int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1)


def by_text(texts: Sequence[tuple[int, str]], singular: str = "wants", plural: str = "want") -> str:
    """`(rank, text)` pairs as "rank 0 wants A; ranks 1, 2 want B"."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks.setdefault(text, []).append(rank)
    parts = []
    for text, found in list(ranks.items())[:SHOWN]:
        shown = format_list(found, SHOWN)
        parts.append(f"ranks {shown} {plural} {text}" if len(found) > 1 else f"rank {shown} {singular} {text}")
    if len(ranks) > SHOWN:
        parts.append(f"and {len(ranks) - SHOWN} more groups of ranks")
    return "; ".join(parts)


def described(describe: Callable[[], str]) -> str:
    """The result of `describe`; a failure in it must not keep the other ranks waiting."""
    try:
        return str(describe())
    except Exception as error:
        return f"something that cannot be described ({type(error).__name__}: {error})"


def again(error: Exception) -> Exception:
    """A copy of an error to raise elsewhere: a raised one collects the tracebacks of all its raises."""
    if not isinstance(error, AgreementError | StoreError):
        return error
    copy = type(error)(*error.args)
    copy.is_collective = error.is_collective
    return copy


class Groups:
    """Groups of one channel: their keys, and the number of gates that this rank has posted in each."""

    def __init__(self, channel: str, number: int) -> None:
        self.channel, self.number = channel, number
        self._keys: dict[int, Key] = {}
        self._members: dict[Key, Group] = {}
        self._copies: Counter[tuple[int, int, int]] = Counter()
        self.posted: dict[Key, int] = {}

    def add(self, group: Group) -> Key:
        """Name a group; members of equal groups add them in the same order, because making a group is collective."""
        if id(group) not in self._keys:
            members = crc32(repr(list(group.ranks)).encode())
            kind = (group.ranks[0], group.size, members)
            key = Key(self.number, group.axes, *kind, self._copies[kind])
            self._copies[kind] += 1
            self._keys[id(group)], self._members[key], self.posted[key] = key, group, 0
        return self._keys[id(group)]

    def group(self, key: Key) -> Group:
        """The group of that name."""
        return self._members[key]

    def clear(self) -> None:
        """Forget all groups and let go of them."""
        self._keys.clear()
        self._members.clear()
        self.posted.clear()


class Task:
    """A queued operation. `number` counts the gates of its group from 1; 0 until its own is posted.

    `is_carried` while the thread that submitted it carries it out, and nobody else may touch it. `is_inference` if it
    was made under torch.inference_mode, outside of which nothing may be written to tensors that were made there.
    """

    __slots__ = (
        "_comparison", "_deadline", "_problem", "body", "code", "describe", "group", "is_carried", "is_inference",
        "label", "number", "ready", "site", "work",
    )  # fmt: skip

    def __init__(
        self,
        group: Group,
        body: Callable[[], object],
        work: Work,
        label: Label,
        describe: Callable[[], str] | None,
        ready: Ready | None = None,
    ) -> None:
        self.group, self.body, self.work, self.label, self.describe = group, body, work, label, describe
        self.code, self.number, self.ready = code_of(work.verb, label), 0, ready
        self._problem = self.site = ""
        self.is_carried, self.is_inference = False, torch.is_inference_mode_enabled()
        self._comparison: Comparison | None = None
        self._deadline = float("inf")

    @property
    def gate(self) -> Comparison | None:
        """The gate that this operation has posted; MPI writes to it until all ranks have come."""
        return self._comparison

    def text(self) -> str:
        """The operation in words."""
        plain = f"{self.work.verb} {self.label}".strip()
        return plain if self.describe is None else described(self.describe)

    def note(self, channel: int) -> None:
        """Record the start of this operation on a channel, and its caller."""
        recorder, sequence = recorders.current(), self.group.sequence
        if sequence is None:
            return
        if recorder is None:
            recorders.skip(sequence, Kind.GATE)
            return
        self.site = recorders.caller()
        verb, known = self.work.verb, (sequence.key, self.work.verb, self.label)
        text = _TEXTS.get(known)
        if text is None:
            text = ""
            if len(_TEXTS) < MOST_TEXTS:
                text = _TEXTS[known] = self.text().removeprefix(verb).strip()
        self.work.row = recorder.begin(sequence, Kind.GATE, verb, label=text, site=self.site, channel=channel + 1)

    def is_open(self, groups: Groups) -> bool:
        """Poll, without blocking, whether all ranks of the group have come to this operation.

        Collective over: the group.

        Raises:
            AgreementError: ranks have come with different operations; the same on all of them.
            StoreError: a rank cannot get what the operation needs there; the same on all of them.
            CommError: not all ranks came within the group's time-out.
        """
        if self._comparison is None and self.ready is not None:
            problem = self.ready()
            if problem is None:
                return False
            if problem:
                self._problem, self.code = problem, code_of(f"problem of rank {self.group.rank}", problem)
        comparison = self._comparison or self.post(groups)
        codes = comparison()
        # A farewell means that peers have given up waiting and that this rank's own wait is about to say so.
        if codes is None or codes[0] == FAREWELL:
            if time.monotonic() > self._deadline:
                raise self._late()
            return False
        if codes[0] != codes[1] or self._problem:
            raise self._diverged(groups.channel)
        return True

    def pass_now(self, groups: Groups) -> None:
        """Wait, asleep, until all ranks have come. Collective over: the group."""
        nap_until(lambda: self.is_open(groups))

    def settle(self, limit_seconds: float) -> bool:
        """Wait until a posted gate is over, with any result; False if it is not within the limit."""
        comparison = self._comparison
        return comparison is None or nap_until(lambda: comparison() is not None, limit_seconds)

    def post(self, groups: Groups) -> Comparison:
        """Announce that this rank is here. Collective over: the group."""
        key = groups.add(self.group)
        # Counted before it is posted: `watch` may take a rank to be further than it is, never to be less far.
        groups.posted[key] += 1
        self.number = groups.posted[key]
        self._comparison = comparison = self.group.transport.compare(self.code)
        recorder = recorders.current() if self.work.row != recorders.NO_ROW else None
        if recorder is not None:
            recorder.post(self.work.row)
        if self.group.limits.timeout_seconds is not None:
            self._deadline = time.monotonic() + self.group.limits.timeout_seconds
        return comparison

    def _late(self) -> CommError:
        seconds = self.group.limits.timeout_seconds
        return CommError(
            f"started {self.text()} over {self.group}: not all ranks came within {seconds} s; "
            "a rank has ended or started its operations in another order"
        )

    def _diverged(self, channel: str) -> MpispeedError:
        """The error that tells every rank what each of them wanted: all are here. Collective over: the group."""
        own = self.text(), f"{self.work.verb} {self.label!r}", self._problem
        told = self.group.transport.library_gather_objects(own)
        problems = [(self.group.ranks[i], problem) for i, (_, _, problem) in enumerate(told) if problem]
        if problems:
            trouble = StoreError(f"{self.text()}: {by_text(problems, 'says:', 'say:')}")
            trouble.is_collective = True
            return trouble
        wishes = [(text, name) for text, name, _ in told]
        is_told = len({text for text, _ in wishes}) > 1
        texts = [(self.group.ranks[i], t if is_told else f"{t} [{name}]") for i, (t, name) in enumerate(wishes)]
        error = AgreementError(
            f"ranks diverged at operation {self.number} of channel {channel!r} over {self.group}: {by_text(texts)}; "
            "none of it was done. All ranks must start the same operations in the same order: look for control flow "
            "that depends on the rank or on its data"
        )
        error.is_collective = True
        return error
