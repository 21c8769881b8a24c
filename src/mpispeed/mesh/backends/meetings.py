"""Meetings of the ranks of a node in memory that all of them have mapped.

A meeting is compiled: a counter that is polled for 50 microseconds at most, then slept on, so that a rank which waits
leaves its core to torch or to the rank it waits for. Where that is missing the transport carries meetings, in naps.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.backends.shared_memory import share_memory
from mpispeed.mesh.collectives.host_collectives import COMPLEX, FLOATS, HALF_FLOATS, INTEGERS, OPS
from mpispeed.mesh.collectives.transport import Transport, Waiting, arrival
from mpispeed.mesh.collectives.work import by_text, nap_until
from mpispeed.native import status

DOOR_BYTES, LINE_BYTES = 128, 64
"""What is in front of all slots, and in front of the data of each, as in meeting.h."""

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
MOVES = ("all_gather", "all_to_all", "broadcast")
DTYPES = sorted((*FLOATS, *HALF_FLOATS, *COMPLEX, *INTEGERS), key=str)
CODES = {key: number << 40 for number, key in enumerate(product(VERBS, OPS, (*DTYPES, torch.bool)))}
"""Numbers of calls by verb, operation and dtype; bytes are added."""

_CALLS = {code: key for key, code in CODES.items()}


def open_meetings(
    group: Transport, waiting: Waiting, slot_bytes: int, more_bytes: int = 0
) -> tuple[Meetings, torch.Tensor] | None:
    """Meetings with slots of `slot_bytes`, and `more_bytes` of memory; None on every rank if any of them cannot.

    Collective over: `group`, whose ranks are on one node.
    """
    with torch.inference_mode(False):  # they serve calls outside of that mode too
        front = DOOR_BYTES + 2 * group.size * (LINE_BYTES + slot_bytes)
        memory = share_memory(group, front + more_bytes)
        if memory is None:
            return None
        module = status.compiled("meeting")
        is_compiled = all(group.library_gather_objects(module is not None))
        return Meetings(group, waiting, memory, slot_bytes, module if is_compiled else None), memory[front:]


class Meetings:
    """Meetings of one group, to which ranks may bring data.

    Shapes: `data` is [2, size, slot_bytes], a set of slots for every other meeting. Before a rank fills a slot again it
    has met all others after they read it.
    """

    def __init__(
        self, group: Transport, waiting: Waiting, memory: torch.Tensor, slot_bytes: int, module: Any = None
    ) -> None:
        """Args: `module` is `mpispeed._native.meeting`; without it the transport carries meetings."""
        self._group, self._waiting, self._turn = group, waiting, 0
        self._meeting = module and module.Meeting(memory.data_ptr(), group.rank, group.size, slot_bytes)
        count = 2 * group.size * (LINE_BYTES + slot_bytes)
        slots = memory[DOOR_BYTES : DOOR_BYTES + count].view(2, group.size, -1)
        self._codes = slots[..., :8].view(torch.int64)[..., 0]
        self.data = slots[..., LINE_BYTES:]

    def meet(self, code: int, x: torch.Tensor | None = None) -> int:
        """Bring `x` and wait for all others; the set of slots that holds what they brought. Collective over: the group.

        Raises:
            CommError: codes differ; on all ranks.
        """
        if self._meeting is None:
            turn = self._meet_by_messages(code, x)
        else:
            address, nbytes = (0, 0) if x is None else (x.data_ptr(), x.nbytes)
            turn = self._meeting.meet(address, nbytes, code, self._waiting.spin_ns, self._waiting.beat)
        if turn < 0:
            raise self._diverged(turn + 2)
        return turn

    def _meet_by_messages(self, code: int, x: torch.Tensor | None) -> int:
        turn = self._turn = self._turn ^ 1
        self._codes[turn, self._group.rank] = code
        if x is not None:
            self.data[turn, self._group.rank, : x.nbytes].copy_(x.view(torch.uint8))
        nap_until(arrival(self._group))
        return turn if bool(self._codes[turn].eq(code).all()) else turn - 2

    def _diverged(self, turn: int) -> CommError:
        """The error that all ranks raise, as all have seen all codes."""
        calls = [(rank, _text(int(code))) for rank, code in zip(self._waiting.ranks, self._codes[turn], strict=True)]
        error = CommError(f"ranks of one group call different verbs: {by_text(calls, 'calls', 'call')}")
        error.is_collective = True
        return error

    def close(self) -> None:
        """Let go of the memory; it is unmapped with the last view of it."""
        self._meeting = None
        self._codes = self.data = torch.empty(0, dtype=torch.uint8)


@lru_cache(maxsize=256)
def _text(code: int) -> str:
    """A call in words."""
    verb, op, dtype = _CALLS[code >> 40 << 40]
    name = str(dtype).removeprefix("torch.")
    return f"{verb} of {code & (1 << 40) - 1} bytes" + ("" if verb in MOVES else f" ({op} of {name})")
