"""Faults for drills, as text: `kill:rank=1@step=5; full_disk@save=2`."""

from __future__ import annotations

import difflib
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpispeed.base.errors import ConfigError
from mpispeed.base.units import parse_count, parse_duration

PLACES = ("forward", "backward", "update")
"""Places in a step: in the forward pass, in the backward pass, before gradients are summed and the update is made."""

ALL = -1
"""Stands for all ranks."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Form of one kind of fault. `options` are (reader, default); `triggers` are the places where it can happen."""

    what: str
    options: Mapping[str, tuple[Callable[[str], Any], Any]] = field(default_factory=dict)
    triggers: tuple[str, ...] = ("step", "save", "seconds")
    place: str = "update"
    is_everywhere: bool = False  # all ranks take part, `rank` is the odd one


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `trigger` is step, save or seconds, and `at` the number that goes with it."""

    kind: str
    rank: int
    trigger: str
    at: float
    place: str
    options: Mapping[str, Any]
    text: str

    def concerns(self, rank: int) -> bool:
        """True if the fault is to happen on `rank`, or needs it."""
        return self.rank in (ALL, rank) or KINDS[self.kind].is_everywhere


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            msg = f"not in {low} to {high}"
            raise ValueError(msg)
        return value

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            msg = f"not one of {', '.join(words)}"
            raise ValueError(msg)
        return text

    return read


def _signal(text: str) -> int:
    """Number of KILL, SIGKILL or 9."""
    if text.isdigit():
        return _whole(1, 64)(text)
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    try:
        return int(signal.Signals[name])
    except KeyError:
        msg = "no signal of this system"
        raise ValueError(msg) from None


def _factor(text: str) -> float:
    value = float(text)
    if not (value >= 1 and math.isfinite(value)):
        msg = "not a factor of at least 1"
        raise ValueError(msg)
    return value


def _bytes(text: str) -> int:
    value = parse_count(text)
    if value < 0:
        msg = "less than 0"
        raise ValueError(msg)
    return value


_COLLECTIVE: dict[str, Any] = {"triggers": ("step",), "is_everywhere": True}

KINDS: dict[str, Kind] = {
    "kill": Kind("the rank gets a signal", {"signal": (_signal, int(signal.SIGKILL))}),
    "exit": Kind("the script leaves with an exit code", {"code": (_whole(0, 255), 3)}),
    "error": Kind("a Python error that nobody catches"),
    "stall": Kind("the rank sleeps outside of communication", {"seconds": (parse_duration, math.inf)}),
    "slow": Kind(
        "every step from then on takes longer",
        {"seconds": (parse_duration, 0.0), "factor": (_factor, 1.0), "steps": (_whole(1, 1 << 31), 1 << 31)}, ("step",),
    ),
    "nan": Kind(
        "a gradient or a parameter becomes not a number", {"what": (_one_of("gradient", "parameter"), "gradient")},
        ("step",), "forward",
    ),
    "memory": Kind(
        "memory is taken until there is no more",
        {"bytes": (_bytes, None)},
        ("step", "seconds"),
    ),
    "full_disk": Kind("files of the checkpoint cannot grow", {"bytes": (_bytes, 16 << 10)}, ("save",)),
    "corrupt": Kind(
        "a file of the checkpoint is damaged after it was written",
        {"file": (_one_of("model", "state", "manifest"), "model"),
         "how": (_one_of("flip", "truncate", "remove"), "flip")},
        ("save",),
    ),
    "missing": Kind("the rank leaves one collective out", **_COLLECTIVE),
    "order": Kind("the rank calls two collectives in the other order", **_COLLECTIVE),
    "size": Kind("the rank calls a collective with another size", **_COLLECTIVE),
    "dtype": Kind("the rank calls a collective with another dtype", **_COLLECTIVE),
    "send": Kind("the rank sends what nobody receives", triggers=("step",)),
}  # fmt: skip

_SEPARATOR = ";"


def parse_faults(text: str, source: str = "--inject") -> tuple[Fault, ...]:
    """Read faults, separated by semicolons: `KIND[:OPTION=VALUE,...]@TRIGGER=NUMBER`.

    Raises:
        ConfigError: naming the part that cannot be read and what may stand there.
    """
    faults = tuple(_read(part.strip(), source) for part in text.split(_SEPARATOR) if part.strip())
    if not faults:
        raise _refused(text, source, "it names no fault")
    return faults


def check_ranks(faults: tuple[Fault, ...], size: int, source: str = "--inject") -> None:
    """Refuse faults on ranks that the job does not have.

    Raises:
        ConfigError: names the fault; the same on all ranks.
    """
    for fault in faults:
        if fault.rank >= size:
            raise _refused(fault.text, source, f"there is no rank {fault.rank} among {size}")
        if size < 2 and (KINDS[fault.kind].is_everywhere or fault.kind == "send"):
            raise _refused(fault.text, source, "one rank alone has nobody to communicate with")


def _read(text: str, source: str) -> Fault:
    head, has_trigger, tail = text.partition("@")
    name, _, words = head.partition(":")
    name = name.strip()
    kind = KINDS.get(name)
    if kind is None:
        raise _refused(text, source, f"there is no fault {name!r}{_similar(name, KINDS)}", f"one of {', '.join(KINDS)}")
    if not has_trigger:
        raise _refused(text, source, "it does not say when", f"{name}@{kind.triggers[0]}=2")
    trigger, at = _read_trigger(text, tail, kind, source)
    given = _read_options(text, words, source)
    rank = _value(text, "rank", given.pop("rank", "0"), _rank, source)
    place = given.pop("place", kind.place)
    if place not in PLACES:
        raise _refused(text, source, f"there is no place {place!r} in a step", f"one of {', '.join(PLACES)}")
    unknown = sorted(set(given) - set(kind.options))
    if unknown:
        known = ["rank", "place", *kind.options]
        raise _refused(text, source, f"{name} has no option {unknown[0]!r}{_similar(unknown[0], known)}",
                       f"one of {', '.join(known)}")  # fmt: skip
    options = {
        key: _value(text, key, given[key], reader, source) if key in given else default
        for key, (reader, default) in kind.options.items()
    }
    return Fault(name, rank, trigger, at, place, options, text)


def _read_trigger(text: str, tail: str, kind: Kind, source: str) -> tuple[str, float]:
    trigger, _, number = (word.strip() for word in tail.partition("="))
    if trigger not in kind.triggers:
        raise _refused(text, source, f"it cannot happen at {trigger!r}", f"@{'=, @'.join(kind.triggers)}=")
    reader: Callable[[str], float] = parse_duration if trigger == "seconds" else _whole(1, 1 << 31)
    return trigger, _value(text, trigger, number, reader, source)


def _read_options(text: str, words: str, source: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in filter(None, (word.strip() for word in words.split(","))):
        key, has_value, value = (part.strip() for part in word.partition("="))
        if not has_value or not value:
            raise _refused(text, source, f"the option {key!r} has no value", f"{key}=VALUE")
        if key in given:
            raise _refused(text, source, f"the option {key!r} is given twice")
        given[key] = value
    return given


def _rank(text: str) -> int:
    return ALL if text == "all" else _whole(0, 1 << 31)(text)


def _value(text: str, key: str, value: str, reader: Callable[[str], Any], source: str) -> Any:
    try:
        return reader(value)
    except (ValueError, OverflowError) as error:
        raise _refused(text, source, f"{key}={value!r}: {error}") from None


def _similar(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f", did you mean {close[0]!r}?" if close else ""


def _refused(text: str, source: str, problem: str, cure: str = "kill:rank=1@step=5") -> ConfigError:
    msg = f"{source}: the fault {text!r} cannot be read: {problem}; write {cure}"
    return ConfigError(msg)
