"""Storage policy for the arguments of checkpointed calls, and an account of their bytes."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.nn.contiguous_buffer import Slots


@dataclass(frozen=True, slots=True)
class Policy:
    """Storage policy of activations.

    Args:
        comm: the ranks that hold equal activations and share their storage; None: nothing is sliced.
        is_strict: refuse sizes that the ranks do not divide, instead of padding the last slice.
        on_host: keep in host memory.
        slots: slots for copies; None: memory of their own.
        account: counts the bytes.
    """

    comm: Comm | None
    is_strict: bool
    on_host: bool
    slots: Slots | None
    account: Account


class Account:
    """Bytes of activations that checkpointed calls keep on this rank, by device type."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def keep(self, owner: object, device_type: str, nbytes: int) -> None:
        """Count until `owner` is gone."""
        self._bytes[device_type] += nbytes
        weakref.finalize(owner, self._drop, device_type, nbytes).atexit = False

    def total(self, device_type: str | None = None) -> int:
        """Bytes kept now; on all devices, or on those of one type."""
        return sum(self._bytes.values()) if device_type is None else self._bytes[device_type]

    def _drop(self, device_type: str, nbytes: int) -> None:
        self._bytes[device_type] -= nbytes
