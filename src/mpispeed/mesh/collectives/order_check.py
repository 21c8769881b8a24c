"""The order check before a started operation: all ranks are here, and all of them mean the same operation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch

from mpispeed.base.errors import AgreementError, CommError, MpispeedError, StoreError
from mpispeed.base.recorder_file import Kind
from mpispeed.base.units import format_list
from mpispeed.mesh.collectives.transport import Comparison
from mpispeed.mesh.collectives.work import Work, nap_until
from mpispeed.mesh.trace import recorder as recorders

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.transport import Group

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


def text_of(describe: Callable[[], str]) -> str:
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
        return plain if self.describe is None else text_of(self.describe)

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
        self._comparison = comparison = self.group.compare(self.code)
        recorder = recorders.current() if self.work.row != recorders.NO_ROW else None
        if recorder is not None:
            recorder.post(self.work.row)
        if self.group.timeout_seconds is not None:
            self._deadline = time.monotonic() + self.group.timeout_seconds
        return comparison

    def _late(self) -> CommError:
        return CommError(
            f"started {self.text()} over {self.group}: not all ranks came within {self.group.timeout_seconds} s; "
            "a rank has ended or started its operations in another order"
        )

    def _diverged(self, channel: str) -> MpispeedError:
        """The error that tells every rank what each of them wanted: all are here. Collective over: the group."""
        own = self.text(), f"{self.work.verb} {self.label!r}", self._problem
        told = self.group.library_gather_objects(own)
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
