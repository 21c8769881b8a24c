"""Table of a key-value store: keys and values within limits, and the requests that wait for keys.

Adding, comparing and appending follow torch's HashStore.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from mpispeed.base.errors import CommError
from mpispeed.base.units import format_bytes, format_ranks

KEY_BYTES = 64 << 10
"""Longest key."""

VALUE_BYTES = 16 << 20
"""Longest value."""

TABLE_BYTES = 256 << 20
"""Most that rank 0 keeps, keys and values together; also the most that one call may send or ask for."""

MOST_PARTS = 1 << 17
"""Most keys and values of one call."""

SHOWN_KEYS, SHOWN_CHARACTERS = 5, 100  # in messages

_NUMBER = re.compile(rb"\s*([+-]?\d{1,19})")


class Op(IntEnum):
    """Kinds of requests, with the parts they bring."""

    SET = 1  # key, value, key, value, ...
    GET = 2  # keys, waited for
    WAIT = 3  # keys
    ADD = 4  # key
    COMPARE_SET = 5  # key, expected value, desired value
    DELETE = 6  # key
    CHECK = 7  # keys
    APPEND = 8  # key, value
    COUNT = 9
    BYE = 10  # the last request of a rank


class Status(IntEnum):
    """Ends of a request; the answer has values if it is done, else a sentence."""

    DONE = 0
    REFUSED = 1
    LATE = 2


_PARTS = {Op.ADD: 1, Op.COMPARE_SET: 3, Op.DELETE: 1, Op.APPEND: 2, Op.COUNT: 0, Op.BYE: 0}
_KEYS_ONLY = (Op.GET, Op.WAIT, Op.CHECK)
_YES, _NO = b"1", b""

Done = Callable[[Status, Sequence[bytes]], None]
"""Takes the answer; called once, under the lock of the table, and must not block."""


@dataclass(frozen=True, slots=True)
class Request:
    """A call of `rank` of the group; `number` is the summand of ADD and milliseconds of GET and WAIT, 0: no end."""

    rank: int
    op: Op
    parts: Sequence[bytes]
    number: int = 0

    @property
    def keys(self) -> Sequence[bytes]:
        """The keys it names."""
        if self.op in _KEYS_ONLY:
            return self.parts
        return self.parts[::2] if self.op is Op.SET else self.parts[:1]

    def check(self) -> None:
        """Raise what no table would take.

        Raises:
            CommError: too many, too long or not the right number of keys and values.
        """
        found = len(self.parts)
        if found != _PARTS.get(self.op, found) or (self.op is Op.SET and found % 2) or found > MOST_PARTS:
            msg = f"{self.op.name} of the store came with {found} keys and values (at most {MOST_PARTS}; a value a key)"
            raise CommError(msg)
        for place, part in enumerate(self.parts):
            is_key = self.op in _KEYS_ONLY or (place % 2 == 0 if self.op is Op.SET else place == 0)
            limit = KEY_BYTES if is_key else VALUE_BYTES
            if len(part) > limit:
                what = "a key" if is_key else f"the value of key {shown(self.keys[: place // 2 + 1][-1:])}"
                msg = f"{what} has {len(part):,} bytes; the store takes at most {limit:,}: store less"
                raise CommError(msg)
        if not -(1 << 63) <= self.number < 1 << 63:
            msg = f"{self.op.name} of the store: {self.number} does not fit 64 bits"
            raise CommError(msg)
        if sum(map(len, self.parts)) > TABLE_BYTES:
            msg = f"one call to the store brings over {format_bytes(TABLE_BYTES)}: make several of it"
            raise CommError(msg)


def shown(keys: Sequence[bytes]) -> str:
    """Some keys for a message."""
    texts = [repr(key[:SHOWN_CHARACTERS].decode(errors="replace")) for key in keys[:SHOWN_KEYS]]
    more = len(keys) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


@dataclass(slots=True)
class _Parked:
    """A request whose keys are not all there; `deadline` is a time of time.monotonic."""

    request: Request
    done: Done
    deadline: float

    def waits_for(self, keys: Sequence[bytes]) -> bool:
        return not set(keys).isdisjoint(self.request.keys)


class Table:
    """Keys and values of a group whose ranks are called `ranks` in messages. Any thread may call."""

    def __init__(self, ranks: Sequence[int] = (0,)) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._values: dict[bytes, bytes] = {}
        self._held_bytes = 0
        self._parked: dict[bytes, list[_Parked]] = {}  # by a key that is missing
        self._next_deadline = float("inf")

    def ask(self, request: Request, done: Done, now: float) -> None:
        """Carry out `request` and give `done` the answer, at once or when its keys are there.

        Units: `now` is the time of time.monotonic, from which a request waits.
        """
        with self._lock:
            try:
                request.check()
                self._carry_out(request, done, now)
            except CommError as error:
                done(Status.REFUSED, [str(error).encode()])

    def expire(self, now: float) -> None:
        """Answer the requests whose time has run out."""
        if now < self._next_deadline:
            return
        with self._lock:
            late = [parked for parked in self._all_parked() if parked.deadline <= now]
            # Texts first: ranks whose time ran out together are to be in each other's.
            texts = [self._late_text(parked) for parked in late]
            self._remove(lambda parked: parked.deadline <= now)
            for parked, text in zip(late, texts, strict=True):
                parked.done(Status.LATE, [text.encode()])
            self._next_deadline = min((parked.deadline for parked in self._all_parked()), default=float("inf"))

    def drop(self, reason: str, rank: int | None = None) -> None:
        """Refuse what waits, of one rank of the group or of all."""
        with self._lock:
            dropped = [parked for parked in self._all_parked() if rank in (None, parked.request.rank)]
            self._remove(lambda parked: rank in (None, parked.request.rank))
            for parked in dropped:
                parked.done(Status.REFUSED, [reason.encode()])

    # -- parts, under the lock -----------------------------------------------------------------------------------

    def _carry_out(self, request: Request, done: Done, now: float) -> None:
        op, parts = request.op, request.parts
        if op in (Op.GET, Op.WAIT):
            seconds = request.number / 1000 if request.number else float("inf")
            self._park(_Parked(request, done, now + seconds))
            return
        answer: list[bytes] = []
        if op is Op.SET:
            self._check_room(dict(zip(parts[::2], parts[1::2], strict=True)))
            for key, value in zip(parts[::2], parts[1::2], strict=True):
                self._put(key, value)
        elif op is Op.ADD:
            answer = [self._add(parts[0], request.number)]
        elif op is Op.COMPARE_SET:
            answer = [self._compare_set(*parts)]
        elif op is Op.APPEND:
            self._put_checked(parts[0], self._values.get(parts[0], b"") + parts[1])
        elif op is Op.DELETE:
            answer = [_YES if self._delete(parts[0]) else _NO]
        elif op is Op.CHECK:
            answer = [_YES if all(key in self._values for key in parts) else _NO]
        elif op is Op.COUNT:
            answer = [str(len(self._values)).encode()]
        done(Status.DONE, answer)

    def _park(self, parked: _Parked) -> None:
        request = parked.request
        missing = next((key for key in request.keys if key not in self._values), None)
        if missing is not None:
            self._parked.setdefault(missing, []).append(parked)
            self._next_deadline = min(self._next_deadline, parked.deadline)
        elif request.op is Op.WAIT:
            parked.done(Status.DONE, [])
        elif sum(len(self._values[key]) for key in request.keys) > TABLE_BYTES:
            text = f"the values of {shown(request.keys)} have over {format_bytes(TABLE_BYTES)}: ask for them in parts"
            parked.done(Status.REFUSED, [text.encode()])
        else:
            parked.done(Status.DONE, [self._values[key] for key in request.keys])

    def _check_room(self, wanted: dict[bytes, bytes]) -> None:
        held = self._held_bytes
        for key, value in wanted.items():
            held += len(value) - len(self._values[key]) if key in self._values else len(key) + len(value)
        if held > TABLE_BYTES:
            msg = (
                f"with {shown(list(wanted))} the store would hold {held:,} bytes; rank {self._ranks[0]} keeps at most "
                f"{TABLE_BYTES:,}: delete keys that are no longer needed"
            )
            raise CommError(msg)

    def _put_checked(self, key: bytes, value: bytes) -> None:
        if len(value) > VALUE_BYTES:
            msg = f"the value of key {shown([key])} would have {len(value):,} bytes; the limit is {VALUE_BYTES:,}"
            raise CommError(msg)
        self._check_room({key: value})
        self._put(key, value)

    def _put(self, key: bytes, value: bytes) -> None:
        self._delete(key)
        self._values[key] = value
        self._held_bytes += len(key) + len(value)
        for parked in self._parked.pop(key, ()):
            self._park(parked)

    def _delete(self, key: bytes) -> bool:
        value = self._values.pop(key, None)
        self._held_bytes -= 0 if value is None else len(key) + len(value)
        return value is not None

    def _add(self, key: bytes, amount: int) -> bytes:
        present = self._values.get(key) or b"0"
        number = _NUMBER.match(present)
        total = int(number[1]) + amount if number else 0
        if number is None or not -(1 << 63) <= total < 1 << 63:
            msg = (
                f"add({shown([key])}, {amount}): the value {present[:SHOWN_CHARACTERS]!r} is no number to which that "
                "can be added within 64 bits; add() needs a key that only add() changes"
            )
            raise CommError(msg)
        text = str(total).encode()
        self._put_checked(key, text)
        return text

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put_checked(key, desired)
            return desired
        return expected if present is None else present

    def _all_parked(self) -> Iterator[_Parked]:
        return (parked for waiting in self._parked.values() for parked in waiting)

    def _remove(self, is_gone: Callable[[_Parked], bool]) -> None:
        left = {key: [parked for parked in waiting if not is_gone(parked)] for key, waiting in self._parked.items()}
        self._parked = {key: waiting for key, waiting in left.items() if waiting}

    def _late_text(self, parked: _Parked) -> str:
        request = parked.request
        missing = [key for key in request.keys if key not in self._values]
        others = sorted({each.request.rank for each in self._all_parked() if each.waits_for(missing)} - {request.rank})
        also = f"{format_ranks(self._ranks[rank] for rank in others)} waiting as well"
        return (
            f"rank {self._ranks[request.rank]} waited {request.number / 1000:g} s for {shown(missing)} in the store, "
            f"which no rank has set; {also if others else 'no other rank is waiting'}. "
            "Find out why the rank that sets it did not come that far, or give more time (timeout, set_timeout)"
        )
