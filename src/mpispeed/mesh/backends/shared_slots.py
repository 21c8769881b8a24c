"""Sums and gathers of small tensors of ranks on one node, with one meeting each, through memory mapped by all of them.

Each rank copies its tensor into its slot, all meet, and each reads the slots of all in rank order straight into its
result: the tree over ranks of the ordered path, so the bits are the same. There are two sets of slots in turn:
before a rank fills a slot again it has met all others after they read it.

The meeting is compiled: a counter that is polled for 50 microseconds at most, then slept on. Where that is missing the
transport carries it, in naps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.backends.shared_memory import share_memory
from mpispeed.mesh.collectives.host_collectives import COMPLEX, FLOATS, HALF_FLOATS, INTEGERS, OPS, combine
from mpispeed.mesh.collectives.transport import Fast, Transport, arrival
from mpispeed.mesh.collectives.work import by_text, nap_until
from mpispeed.native import status
from mpispeed.native.flat import KINDS

SLOT_BYTES = 256 << 10
"""Most that a rank brings at a time. Each reads what all bring, so longer messages are better summed in parts."""

TOTAL_BYTES = 4 << 20
"""Most that one group maps; with many ranks on a node, slots get smaller instead."""

SPIN_NS = 50_000
"""How long a rank polls for the others before it sleeps: waking takes about as long."""

DOOR_BYTES, LINE_BYTES = 128, 64
"""What is in front of all slots, and in front of the data of each, as in meeting.h."""

VERBS = ("all_reduce", "reduce_scatter", "all_gather")
DTYPES = sorted((*FLOATS, *HALF_FLOATS, *COMPLEX, *INTEGERS), key=str)
_CODES = {key: number << 40 for number, key in enumerate(product(VERBS, OPS, (*DTYPES, torch.bool)))}
_CALLS = {code: key for key, code in _CODES.items()}


def open_slots(group: Transport, ranks: Sequence[int], spin_ns: int, beat: Callable[[], object]) -> SharedSlots | None:
    """Map memory in all ranks; None on every rank if any of them cannot.

    Args:
        group: whose ranks are on one node.
        ranks: their world ranks, for messages.
        spin_ns: how long to poll for others before sleeping.
        beat: called while others are late.

    Collective over: `group`.
    """
    with torch.inference_mode(False):  # it serves calls outside of that mode too
        return _open(group, ranks, spin_ns, beat)


def _open(group: Transport, ranks: Sequence[int], spin_ns: int, beat: Callable[[], object]) -> SharedSlots | None:
    slot_bytes = min(SLOT_BYTES, TOTAL_BYTES // (2 * group.size)) // LINE_BYTES * LINE_BYTES
    memory = share_memory(group, DOOR_BYTES + 2 * group.size * (LINE_BYTES + slot_bytes))
    if memory is None:
        return None
    module = status.compiled("meeting")
    is_compiled = all(group.library_gather_objects(module is not None))
    meeting = None
    if module is not None and is_compiled:
        meeting = module.Meeting(memory.data_ptr(), group.rank, group.size, slot_bytes)
    return SharedSlots(group, ranks, memory, meeting, spin_ns, beat)


class SharedSlots(Fast):
    """The slots of one group. Shapes: 2 sets of size slots, each a line with a code, and `limit_bytes` of data.

    `meeting` is a `mpispeed._native.meeting.Meeting` over the same memory; without it the transport carries meetings.
    """

    def __init__(
        self,
        group: Transport,
        ranks: Sequence[int],
        memory: torch.Tensor,
        meeting: Any = None,
        spin_ns: int = SPIN_NS,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        self._group, self._ranks, self._meeting = group, ranks, meeting
        self._spin_ns, self._beat, self._turn = spin_ns, beat, 0
        slots = memory[DOOR_BYTES:].view(2, group.size, -1)
        self._codes = slots[..., :8].view(torch.int64)[..., 0]
        self._data = slots[..., LINE_BYTES:]
        self.limit_bytes = self._data.shape[-1]
        self._addresses = [[row.data_ptr() for row in rows] for rows in self._data]
        self._sums = status.compiled("fp_sum")

    def all_reduce(self, x: torch.Tensor, op: str, scale: float, threads: int) -> None:
        """Combine in place. Collective over: the group."""
        turn = self._meet(x, _CODES["all_reduce", op, x.dtype])
        self._combine(x, turn, 0, x.dtype, op, scale, threads)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float, threads: int) -> None:
        """Combine and keep this rank's shard. Collective over: the group."""
        turn = self._meet(full, _CODES["reduce_scatter", op, full.dtype])
        self._combine(shard, turn, self._group.rank * shard.numel() * full.itemsize, full.dtype, op, scale, threads)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Shards of all ranks in rank order. Collective over: the group."""
        out, shard = out.view(torch.uint8), shard.view(torch.uint8)
        turn = self._meet(shard, _CODES["all_gather", "sum", torch.uint8])
        out.view(self._group.size, -1).copy_(self._data[turn, :, : shard.numel()])

    def _combine(
        self, out: torch.Tensor, turn: int, start: int, dtype: torch.dtype, op: str, scale: float, threads: int
    ) -> None:
        """Reduce what lies in all slots from byte `start` on into `out`; the sum of floats without a tensor made."""
        if self._sums is not None and op == "sum" and dtype in KINDS:
            addresses = self._addresses[turn]
            parts = [at + start for at in addresses] if start else addresses
            count = out.numel()
            self._sums.tree_sum(out.data_ptr(), parts, count, KINDS[dtype], KINDS[out.dtype], scale, threads)
            return
        rows = self._data[turn, :, start : start + out.numel() * dtype.itemsize].view(dtype)
        combine(out, rows.unbind(), op, scale=scale, threads=threads)

    def _meet(self, x: torch.Tensor, code: int) -> int:
        """Bring `x` and wait for all others; the set of slots that holds what they brought."""
        code += x.nbytes
        if self._meeting is not None:
            turn: int = self._meeting.meet(x.data_ptr(), x.nbytes, code, self._spin_ns, self._beat)
        else:
            turn = self._meet_by_messages(x, code)
        if turn < 0:
            raise self._diverged(turn + 2)
        return turn

    def _meet_by_messages(self, x: torch.Tensor, code: int) -> int:
        turn = self._turn = self._turn ^ 1
        self._codes[turn, self._group.rank] = code
        self._data[turn, self._group.rank, : x.nbytes].copy_(x.view(torch.uint8))
        nap_until(arrival(self._group))
        return turn if bool(self._codes[turn].eq(code).all()) else turn - 2

    def _diverged(self, turn: int) -> CommError:
        """The error that all ranks raise, as all have seen all codes."""
        calls = [(rank, _text(int(code))) for rank, code in zip(self._ranks, self._codes[turn], strict=True)]
        error = CommError(f"ranks of one group call different verbs: {by_text(calls, 'calls', 'call')}")
        error.is_collective = True
        return error

    def close(self) -> None:
        """Let go of the memory; it is unmapped with the last view of it."""
        self._meeting = None
        self._codes = self._data = torch.empty(0, dtype=torch.uint8)


@lru_cache(maxsize=256)
def _text(code: int) -> str:
    """A call in words."""
    verb, op, dtype = _CALLS[code >> 40 << 40]
    name = str(dtype).removeprefix("torch.")
    return f"{verb} of {code & (1 << 40) - 1} bytes" + ("" if verb == "all_gather" else f" ({op} of {name})")
