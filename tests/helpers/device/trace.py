"""A record of what crosses between the host and the stand-in device, and of what the host waits for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from tests.helpers.device.build import built_library

ITEM_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Bool": 1, "Byte": 1}


class Line(NamedTuple):
    """One event, in the order of the program.

    Attributes:
        thread: "main", or "other".
        what: "to_host" or "to_device": a copy; "wait": the host waits for an event, stream, device or number; or the
            first word of a note.
        words: of a copy: dtype of its source and of its destination, elements, stream, "queued" or "blocking"; of a
            wait: what for, and "idle" where no copy was left to be made.
    """

    thread: str
    what: str
    words: tuple[str, ...]

    @property
    def elements(self) -> int:
        """Of a copy."""
        return int(self.words[2])

    @property
    def stream(self) -> str:
        """Of a copy: "0" is that of the model."""
        return self.words[3]

    @property
    def nbytes(self) -> int:
        """Bytes of a copy that cross: those of the wider dtype where a queued copy converts, on either side."""
        return self.elements * max(ITEM_BYTES[word] for word in self.words[:2])

    @property
    def is_queued(self) -> bool:
        """True for a copy that the host does not wait for."""
        return self.words[-1] == "queued"


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(built_library()))
    library.standin_trace_end.restype = ctypes.c_char_p
    return library


def note(text: str) -> None:
    """Add a line of the test's own."""
    _library().standin_trace_note(text.encode())


@contextmanager
def traced() -> Iterator[list[Line]]:
    """What happens inside of the block; the list is filled at its end."""
    found: list[Line] = []
    _library().standin_trace_begin()
    try:
        yield found
    finally:
        for line in _library().standin_trace_end().decode().splitlines():
            thread, what, *words = line.split()
            found.append(Line(thread, what, tuple(words)))
