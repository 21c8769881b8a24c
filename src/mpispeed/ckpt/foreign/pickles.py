"""Safe reader of pickles of `torch.save`: knows their few instructions and calls only known functions."""

from __future__ import annotations

import reprlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.faults import RefusedPickle

#: of pickles, as torch.save chooses it
_PROTOCOL = 2
#: longer names of classes are none
_NAME_BYTES = 1000
#: nesting of what is read
_DEPTH = 200
#: lists and calls that are begun, of which each level takes some
_MARKS = 5 * _DEPTH
#: a value referred to several times counts each time: the most that the total may exceed what is written
_REPEATS, _FREE = 10, 100_000
#: signs of a text that count as one value
_SIGNS = 64
_PLAIN = (str, int, float, complex, bool, bytes, type(None))
#: larger whole numbers can be chosen to have one hash, which makes a dict of them slow
_MOST = 2**61 - 1
#: and so can rows, complex and numpy's numbers, of which a pickle may have so many parts of keys
_ODD_KEYS = 10_000
#: a file of which so many times its own bytes are copied is none that trains
_TIMES, _FREE_BYTES = 8, 64 << 20
#: of a dict or a set, and of a row
_ENTRY_BYTES, _PLACE_BYTES = 100, 8


class Damaged(ValueError):
    """A pickle is malformed or exceeds the limits."""


class _Shown(reprlib.Repr):
    """Short text of values for messages; of other objects the class only, since their own text may be endless."""

    def repr_instance(self, x: object, level: int) -> str:
        """Only the name of the class."""
        return f"a {type(x).__name__}"

    def repr_OrderedDict(self, x: Any, level: int) -> str:
        """As any dict."""
        return self.repr_dict(x, level)


shown = _Shown().repr


class Inert:
    """Record of an object of another library: its arguments and attributes, without behaviour.

    Attributes:
        args: arguments it was made with.
        fields: attributes.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.fields: dict[str, Any] = {}

    def set_state(self, state: Any, limits: Limits) -> None:
        """Take the attributes; two dicts where the class has slots."""
        parts = state if isinstance(state, tuple) else (state,)
        limits.copy(_PLACE_BYTES * len(parts))
        for part in parts:
            if isinstance(part, dict):
                self.fields.update(limits.entries(part))


class Array:
    """A numpy array whose content comes with its state.

    Attributes:
        value: the array, None until then.
    """

    value: Any = None

    def set_state(self, state: Any, limits: Limits) -> None:
        """Take shape, dtype, order and bytes."""
        _, shape, dtype, is_fortran, raw = state
        flat = np.frombuffer(limits.encoded(raw), numpy_dtype(dtype))
        whole = flat.reshape(shape, order="F" if is_fortran else "C")
        self.value = whole.astype(flat.dtype.newbyteorder("="), order="C")


class NumpyDtype(Inert):
    """A numpy dtype.

    Attributes:
        order: of the bytes, which comes with its state.
    """

    order: Any = "="

    def set_state(self, state: Any, limits: Limits) -> None:
        """Take the order of bytes, behind a number of the form."""
        self.order = state[1]


def numpy_dtype(record: Any) -> np.dtype:
    """The dtype that a record stands for.

    Raises:
        RefusedPickle: it is none of numbers.
    """
    text = record.args[0] if isinstance(record, NumpyDtype) and record.args else None
    kind = text.lstrip("<>|=") if isinstance(text, str) else ""
    if kind[:1] not in tuple("biufc") or not kind[1:].isdecimal() or len(kind) > 3:
        msg = f"numpy data of dtype {shown(text)} in a pickle; only numbers are read"
        raise RefusedPickle(msg)
    if record.order not in ("<", ">", "=", "|"):
        msg = f"numpy data with the byte order {shown(record.order)} in a pickle; it is < or >"
        raise RefusedPickle(msg)
    made: np.dtype = np.dtype(text).newbyteorder(record.order)
    return made


class Call:
    """A name that a pickle may call.

    Attributes:
        make: the function called in its place.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class Limits:
    """Limits of memory and time for the pickles of one file, whose content may be copied again and again."""

    def __init__(self, file_bytes: int) -> None:
        self._odd_left = _ODD_KEYS
        self._bytes_left = self._most_bytes = _TIMES * file_bytes + _FREE_BYTES

    def copy(self, nbytes: int) -> None:
        """Count bytes that are copied next.

        Raises:
            Damaged: they are more than what makes sense in a file of this size.
        """
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            msg = f"its content repeats what is written: more than {self._most_bytes} bytes would be copied"
            raise Damaged(msg)

    def entries(self, values: Any) -> Any:
        """A dict, a set or what they are made of, before a copy of it."""
        self.copy(_ENTRY_BYTES * len(values))
        return values

    def encoded(self, value: Any, encoding: str = "latin1") -> bytes:
        """Bytes, which pickles of protocol 2 spell as text.

        Raises:
            RefusedPickle: they are spelled in any other way.
            Damaged: they are too many.
        """
        if isinstance(value, (str, bytes, bytearray)):
            self.copy(len(value))
        if isinstance(value, str) and encoding == "latin1":
            return value.encode("latin1")
        if isinstance(value, (bytes, bytearray)):
            return bytes(value)
        msg = f"text in the encoding {shown(encoding)} in a pickle; only latin1 is read"
        raise RefusedPickle(msg)

    def key(self, key: Any) -> Any:
        """`key`, if it is plain and its hash cannot be chosen to collide.

        Raises:
            Damaged: it is not plain, or one too many of those that may have one hash.
        """
        parts = key if isinstance(key, tuple) else (key,)
        if isinstance(key, (tuple, complex, np.generic)):
            self._odd_left -= 1 + len(parts)
        if self._odd_left < 0:
            msg = f"more than {_ODD_KEYS} parts of keys of dicts and in sets are rows or odd numbers"
            raise Damaged(msg)
        if not all(isinstance(part, (*_PLAIN, torch.dtype, np.generic, Inert)) for part in parts):
            msg = f"a {type(key).__name__} is a key of a dict or in a set"
            raise Damaged(msg)
        if any(isinstance(part, int) and abs(part) >= _MOST for part in parts):
            msg = "a key of a dict or in a set is too large a number"
            raise Damaged(msg)
        return key


class Machine:
    """Reader of consecutive pickles in `raw`.

    Attributes:
        at: offset of the next one.
    """

    def __init__(self, raw: bytes, find: Callable[[str], Any], storage: Callable[[Any], Any], limits: Limits) -> None:
        """Args: `find`: name -> value; `storage`: persistent id -> storage."""
        self._raw, self.at, self._find, self._storage, self._limits = raw, 0, find, storage, limits
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._protocol = 0

    def load(self) -> Any:
        """The value of the next pickle.

        Raises:
            RefusedPickle: it names what is not known to be harmless.
            Damaged: it is none, or half of one.
        """
        self._stack, self._marks, self._memo = [], [], {}
        try:
            return self._run()
        except (Damaged, CheckpointError):
            raise
        except Exception as failure:
            msg = f"its instructions do not fit together at byte {self.at}: {type(failure).__name__}: {failure}"
            raise Damaged(msg) from failure

    def _run(self) -> Any:
        while (code := self._take(1)) != b".":
            act = _CODES.get(code)
            if act is None:
                self._require_protocol(_PROTOCOL)
                msg = f"the instruction {code!r} is none that torch.save writes"
                raise Damaged(msg)
            act(self)
        return self._stack.pop()

    def _require_protocol(self, most: int) -> None:
        if self._protocol > most:
            msg = (
                f"a pickle of protocol {self._protocol}, and only those of protocol {_PROTOCOL} are read; save it "
                "again with torch.save without pickle_protocol"
            )
            raise RefusedPickle(msg)

    def _begin(self) -> None:
        self._protocol = self._take(1)[0]
        self._require_protocol(_PROTOCOL + 1)  # which differs in a few instructions only

    def _take(self, count: int) -> bytes:
        part = self._raw[self.at : self.at + count]
        if len(part) < count:
            msg = "it ends too early"
            raise Damaged(msg)
        self.at += count
        return part

    def _line(self) -> str:
        end = self._raw.find(b"\n", self.at, self.at + _NAME_BYTES)
        if end < 0:
            msg = f"there is no name at byte {self.at}"
            raise Damaged(msg)
        return self._take(end + 1 - self.at)[:-1].decode()

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            msg = "it uses what it has not made"
            raise Damaged(msg)
        self._stack[len(self._stack) - count :] = [tuple(self._stack[len(self._stack) - count :])]

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _mark(self) -> None:
        if len(self._marks) > _MARKS:
            raise _too_deep()
        self._marks.append(self._stack)
        self._stack = []

    def _name(self) -> None:
        module, name = self._line(), self._line()
        self._push(self._find(f"{module}.{name}"))

    def _call(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, Call) or not isinstance(args, tuple):
            msg = f"it calls a {type(function).__name__}"
            raise Damaged(msg)
        self._limits.copy(_PLACE_BYTES * len(args))
        self._push(function.make(*args))

    def _build(self) -> None:
        state, made = self._stack.pop(), self._stack[-1]
        if isinstance(made, (Inert, Array)):
            made.set_state(state, self._limits)
        elif type(made) is not OrderedDict:  # attributes of such a dict are notes about versions of modules
            msg = f"it sets attributes of a {type(made).__name__}"
            raise Damaged(msg)

    def _append(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            msg = f"it appends to a {type(self._stack[-1]).__name__}"
            raise Damaged(msg)
        self._stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        own = self._stack[-1]
        if type(own) not in (dict, OrderedDict) or len(items) % 2:
            msg = f"it sets {len(items)} keys and values of a {type(own).__name__}"
            raise Damaged(msg)
        for key, value in zip(items[::2], items[1::2], strict=True):
            own[self._limits.key(key)] = value

    def _text(self) -> None:
        self._push(str(self._take(self._number("<I")), "utf-8", "surrogatepass"))

    def _persistent(self) -> None:
        self._push(self._storage(self._stack.pop()))


_CODES: Mapping[bytes, Callable[[Machine], object]] = {
    b"\x80": Machine._begin,
    b"c": Machine._name,
    b"\x81": Machine._call,
    b"R": Machine._call,
    b"b": Machine._build,
    b"a": lambda own: own._append([own._stack.pop()]),
    b"e": lambda own: own._append(own._marked()),
    b"s": lambda own: own._set([own._stack.pop(-2), own._stack.pop()]),
    b"u": lambda own: own._set(own._marked()),
    b"(": Machine._mark,
    b"t": lambda own: own._push(tuple(own._marked())),
    b")": lambda own: own._push(()),
    b"\x85": lambda own: own._push_tuple(1),
    b"\x86": lambda own: own._push_tuple(2),
    b"\x87": lambda own: own._push_tuple(3),
    b"N": lambda own: own._push(None),
    b"\x88": lambda own: own._push(True),
    b"\x89": lambda own: own._push(False),
    b"]": lambda own: own._push([]),
    b"}": lambda own: own._push({}),
    b"J": lambda own: own._push(own._number("<i")),
    b"K": lambda own: own._push(own._number("<B")),
    b"M": lambda own: own._push(own._number("<H")),
    b"G": lambda own: own._push(own._number(">d")),
    b"\x8a": lambda own: own._push(int.from_bytes(own._take(own._number("<B")), "little", signed=True)),
    b"X": Machine._text,
    b"U": lambda own: own._push(own._take(own._number("<B")).decode()),
    b"Q": Machine._persistent,
    b"h": lambda own: own._push(own._memo[own._number("<B")]),
    b"j": lambda own: own._push(own._memo[own._number("<I")]),
    b"q": lambda own: own._memo.__setitem__(own._number("<B"), own._stack[-1]),
    b"r": lambda own: own._memo.__setitem__(own._number("<I"), own._stack[-1]),
}


class Tidier:
    """Replaces `Array` records by their arrays, and bounds the size of the unfolded value.

    A few references to shared lists can stand for more values than can be visited.
    """

    def __init__(self) -> None:
        #: id -> (value, tidy value, values in it with repeats, nesting); holds `value`, so that its id stays its own
        self._done: dict[int, tuple[Any, Any, int, int]] = {}
        self._texts: dict[int, Any] = {}

    def tidy(self, value: Any) -> Any:
        """The value, in large part itself.

        Raises:
            Damaged: it contains itself, is nested too deep, or unfolds to much more than is written.
        """
        made, weight, _ = self._visit(value, 0)
        once = [*(value for value, *_ in self._done.values()), *self._texts.values()]
        written = sum(map(_own_weight, once))
        if weight > _REPEATS * written + _FREE:
            msg = f"what it refers to again and again would be {weight:.0e} values"
            raise Damaged(msg)
        return made

    def _visit(self, value: Any, depth: int) -> tuple[Any, int, int]:
        if isinstance(value, Array):
            value = value.value
        if not isinstance(value, (dict, list, tuple, set, Inert)):
            weight = _own_weight(value)
            if weight > 1:
                self._texts[id(value)] = value
            return value, weight, 0
        if id(value) in self._done:
            return self._done[id(value)][1:]
        if depth > _DEPTH:
            raise _too_deep()
        inner = [self._visit(part, depth + 1) for part in _parts(value)]
        weight = _own_weight(value) + sum(part[1] for part in inner)
        height = 1 + max((part[2] for part in inner), default=0)
        if height > _DEPTH:
            raise _too_deep()
        made = _with_parts(value, [part[0] for part in inner])
        self._done[id(value)] = (value, made, weight, height)
        return made, weight, height


def _too_deep() -> Damaged:
    return Damaged(f"it is nested more than {_DEPTH} levels deep, or contains itself")


def _own_weight(value: Any) -> int:
    if isinstance(value, (str, bytes, bytearray)):
        return 1 + len(value) // _SIGNS
    if isinstance(value, np.ndarray):
        return 1 + value.nbytes // _SIGNS
    if isinstance(value, dict):
        return 1 + sum(map(_own_weight, value))
    return 1 + (len(value) if isinstance(value, (list, tuple, set, frozenset)) else 0)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, Inert):
        return [value.fields, value.args]
    return [] if isinstance(value, set) else list(value)


def _with_parts(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, dict):
        value.update(zip(value, parts, strict=True))
    elif isinstance(value, list):
        value[:] = parts
    elif type(value) is tuple:
        return tuple(parts)
    elif isinstance(value, Inert):
        value.fields, value.args = parts
    return value


def whole_numbers(values: Any, most: int = 2**63 - 1) -> tuple[int, ...]:
    """A tuple of natural numbers, such as a shape.

    Raises:
        Damaged: it is something else.
    """
    if not isinstance(values, (tuple, list)) or any(type(part) is not int or not 0 <= part <= most for part in values):
        msg = f"{shown(values)} is no row of sizes"
        raise Damaged(msg)
    product = 1
    for part in values:
        product *= max(part, 1)
        if product >= 2**63:  # of many it would take long to the end
            msg = f"{shown(values)} are more elements than there can be"
            raise Damaged(msg)
    return tuple(values)
