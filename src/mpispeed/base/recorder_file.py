"""Format of a flight recorder: one mapped file for each rank, written by the rank and read by the watchdog of its node.

    header   one record of HEADER: the writer, its state, its limits of waiting
    words    texts of bounded length: last words of the rank, and its stack when it was asked for
    strings  texts that rows name by number, each as two bytes of length and UTF-8; only ever added to
    rows     a ring of ROW, one for each operation

A reader sees rows while they are written. A row counts if its stamp is the number that belongs to its place in the
ring, before and after it was copied; the writer sets the stamp to 0 first and to its number last.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MAGIC = 0x6D70_6973_6C67_7231
ROWS = 2048
STRING_BYTES = 192 << 10
WORD_BYTES = 8 << 10
RESERVED_BYTES = 64 << 10
"""Of the room for strings, for groups and verbs; places and labels get the rest."""

HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("rank", "<i4"),
        ("world", "<i4"),
        ("local_rank", "<i4"),
        ("pid", "<u4"),
        ("state", "<u4"),
        ("exit_code", "<i4"),
        ("has_shown", "<u4"),  # the rank has written its error to stderr itself
        ("order", "<u4"),
        ("order_code", "<i4"),
        ("asked", "<u4"),  # counted up by the watchdog to ask for the stack
        ("answered", "<u4"),  # set to `asked` by the rank when the stack is there
        ("shown", "<u4"),  # counted up by the rank when it wants its last rows to be looked at
        ("looked", "<u4"),  # set to `shown` by the watchdog after its look
        ("hang_seconds", "<f8"),
        ("watch_seconds", "<f8"),
        ("strings_end", "<u8"),
        ("step", "<u8"),
        ("step_at", "<f8"),  # when the last step ended
        ("is_open", "<u4"),  # the rank does more than its rows show, so no hang of it is proven
        ("wait_row", "<u8"),  # 1 + number of the row of a started operation that the main thread waits for, or 0
        ("wait_since", "<f8"),
        ("future_row", "<u8"),  # likewise, of one whose future was asked for: maybe the main thread waits, unseen
        ("future_since", "<f8"),
    ]
)
ROW = np.dtype(
    [
        ("stamp", "<u8"),  # 1 + number of the row
        ("comm", "<u8"),
        ("seq", "<u8"),  # position among the operations of this kind in the group; from 1
        ("sig", "<u8"),  # equal on all ranks of the group
        ("begin", "<f8"),  # of CLOCK_MONOTONIC
        ("end", "<f8"),  # 0 while it is under way
        ("count", "<u8"),
        ("what", "<u4"),  # string: verb, dtype and operation
        ("site", "<u4"),  # string: place of the call
        ("label", "<u4"),  # string: purpose
        ("peer", "<i4"),  # world rank of the other side, or root
        ("tag", "<i4"),
        ("thread", "<u2"),  # MAIN, OTHER or 1 + number of a channel
        ("kind", "u1"),
        ("posted", "u1"),  # a GATE that others may pass as far as this rank is concerned
    ]
)
ROW_FORMAT = "<QQQQddQIIIiiHBB"

HEADER_BYTES = 4096
WORDS_AT = HEADER_BYTES
STACK_AT = WORDS_AT + WORD_BYTES
STRINGS_AT = STACK_AT + WORD_BYTES
ROWS_AT = STRINGS_AT + STRING_BYTES
FILE_BYTES = ROWS_AT + ROWS * ROW.itemsize

COMM_MARK = "\x01"
"""First character of a string that introduces a group: mark, key in hexadecimal, name and ranks, by tabs."""


def at(name: str) -> int:
    """Offset of a header field."""
    fields: Any = HEADER.fields
    return int(fields[name][1])


def ranks_text(ranks: Any) -> str:
    """Ascending ranks in short: "0-3,8", or "0-6:2" with a step."""
    parts: list[str] = []
    numbers = list(ranks)
    at = 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        end = at + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if end - at == 2 and step != 1:
            end -= 1  # two apart are two numbers
        text = str(numbers[at])
        if end - at > 1:
            text += f"-{numbers[end - 1]}" + (f":{step}" if step != 1 else "")
        parts.append(text)
        at = end
    return ",".join(parts)


def ranks_of(text: str) -> tuple[int, ...]:
    """Ranks in a text of `ranks_text`."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        found.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return tuple(found)
