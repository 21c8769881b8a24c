"""Meaning of the numbers in a flight recorder, apart from its format: readers of reports need no numpy."""

from __future__ import annotations

import enum

MAIN = 0
OTHER = 0xFFFF
"""Threads of rows: MAIN, 1 + the channel's number, and OTHER for the rest."""


class State(enum.IntEnum):
    """The rank's stage of life."""

    STARTING = 0
    RUNNING = 1
    LEAVING = 2  # has left its program with `exit_code` and waits for the other ranks
    FAILED = 3  # has an error that ends the job; `last words` say which
    LEFT = 4  # has met all others at the end


class Kind(enum.IntEnum):
    """Kind of operation in a row."""

    COLLECTIVE = 0
    SEND = 1
    RECV = 2
    GATE = 3  # a started operation of a channel, which all ranks of its group have to come to


class Order(enum.IntEnum):
    """Order of a watchdog to a rank."""

    NONE = 0
    END = 1  # end the job with `order_code`
