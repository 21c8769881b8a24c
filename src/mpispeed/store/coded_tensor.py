"""Stored tensors that rest in codes and are lent in fp32."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import StoreError
from mpispeed.store.state_code import Draws

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.native.coded_update import Rest
    from mpispeed.store.state_code import StateCode
    from mpispeed.store.stored_tensor import Lease, StoredTensor

WINDOW = 1 << 17
"""Elements that an update has in fp32 at a time: masters, gradients and two moments of them stay in a cache."""


def draw_base(name: str, start: int) -> int:
    """Number of element `start` of a unit whose first parameter is `name`, where stochastic rounding draws.

    It is the same on all ranks and for all copies of a unit, and differs between units.
    """
    return ((zlib.crc32(name.encode()) & 0x1FFFFFFF) << 32) + start


class Scratch:
    """Memory for decoded ranges, used again and again."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    def take(self, numel: int, device: torch.device) -> torch.Tensor:
        """A flat fp32 tensor; its values are unspecified."""
        fits = (index for index, free in enumerate(self._free) if free.numel() >= numel and free.device == device)
        index = next(fits, None)
        values = torch.empty(numel, device=device) if index is None else self._free.pop(index)
        if values.numel() <= WINDOW and device.type != "meta":
            self._lent[values.data_ptr()] = values
        return values[:numel]

    def give(self, values: torch.Tensor) -> None:
        """Take back what `take` gave; what is longer than a window goes back to the allocator."""
        whole = self._lent.pop(values.data_ptr(), None)
        if whole is not None:
            self._free.append(whole)

    @property
    def nbytes(self) -> int:
        """Bytes that are free now."""
        return sum(values.nbytes for values in self._free)


class CodedTensor:
    """A stored tensor whose parts, in memory or in swap files, are the code of its fp32 values.

    Attributes:
        code: the code.
        parts: its tensors.
        is_param: the first part is (a slice of) the parameters.
    """

    __slots__ = ("_base", "_scratch", "code", "dtype", "is_param", "numel", "parts")

    def __init__(
        self,
        code: StateCode,
        parts: Sequence[StoredTensor],
        numel: int,
        *,
        base: int = 0,
        is_param: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        """Take over the parts.

        Args:
            code: what the parts mean.
            parts: one stored tensor for each of the code's.
            numel: elements of the values.
            base: number of the first element where stochastic rounding draws.
            is_param: the memory of the first part is counted elsewhere.
            scratch: memory for decoded ranges.
        """
        self.code, self.parts, self.numel, self.is_param = code, tuple(parts), numel, is_param
        self.dtype = torch.float32
        self._base, self._scratch = base, scratch or Scratch()

    @property
    def is_swapped(self) -> bool:
        """True if a part is in a swap file."""
        return any(part.is_swapped for part in self.parts)

    @property
    def _own(self) -> tuple[StoredTensor, ...]:
        return self.parts[1:] if self.is_param else self.parts

    @property
    def memory_bytes(self) -> int:
        """Bytes of the parts that are in memory, without parameters."""
        return sum(part.memory_bytes for part in self._own)

    @property
    def file_bytes(self) -> int:
        """Bytes of the parts in swap files, without parameters."""
        return sum(part.file_bytes for part in self._own)

    def get(self) -> torch.Tensor:
        """The decoded values, a copy. Shapes: [numel]."""
        parts = [part.get() for part in self.parts]
        values = torch.empty(self.numel, device=parts[0].device)
        self.code.decode(values, parts)
        return values

    def put(self, values: torch.Tensor) -> None:
        """Encode all values, rounded to the nearest. Shapes: values [numel].

        Raises:
            StoreError: they could not be written.
        """
        held = [
            torch.empty(part.numel, dtype=part.dtype, device=values.device) if part.is_swapped else part.get()
            for part in self.parts
        ]
        self.code.encode(held, values.to(held[0].device, self.dtype))
        for part, codes in zip(self.parts, held, strict=True):
            part.put(codes)

    def clear(self) -> None:
        """Set to zero."""
        for part in self.parts:
            part.clear()

    def lend(self, start: int, stop: int, *, reads: bool = True) -> CodedLease:
        """Lease a range, which is decoded when it is waited for."""
        del reads  # blocks at the borders are encoded whole
        return CodedLease(self, start, stop, self._scratch)

    def lend_at_rest(self, start: int, stop: int) -> RestLease:
        """Lease a range as it is; `start` is a multiple of the code's `step`, and so is `stop` unless it is the end."""
        return RestLease(self, start, stop)

    def narrowed(self, dtype: torch.dtype) -> StoredTensor:
        """Refuse: gradients, which come in other types, rest in no code.

        Raises:
            StoreError: always.
        """
        msg = f"states that rest as {self.code.word} cannot take {dtype} in their place"
        raise StoreError(msg)

    def draws(self, step: int, start: int) -> Draws:
        """Where stochastic rounding of the range from `start` draws in update `step`."""
        return Draws(step, self._base + start)


class RestLease:
    """A range of a coded tensor as it rests."""

    __slots__ = ("_coded", "_leases", "_start")

    def __init__(self, coded: CodedTensor, start: int, stop: int) -> None:
        self._coded, self._start = coded, start
        self._leases: list[Lease] = [
            part.lend(start // meant.stride, meant.count(stop))
            for part, meant in zip(coded.parts, coded.code.parts, strict=True)
        ]

    def is_ready(self) -> bool:
        """True once `wait` would not block."""
        return all(lease.is_ready() for lease in self._leases)

    def wait(self) -> torch.Tensor:
        """The first part."""
        return self.parts()[0]

    def parts(self) -> list[torch.Tensor]:
        """Its tensors, to be read and changed in place.

        Raises:
            StoreError: they could not be read.
        """
        return [lease.wait() for lease in self._leases]

    def at_rest(self) -> Rest:
        """What a coded update takes: it rounds as an update does, and draws at `start`."""
        return self._coded.code.at_rest(self.parts(), draws=True)

    @property
    def start(self) -> int:
        """Number of the first element where stochastic rounding draws."""
        return self._coded.draws(0, self._start).start

    def give_back(self, *, changed: bool) -> None:
        """Give all parts back, even if one cannot be written."""
        failure: StoreError | None = None
        for lease in self._leases:
            try:
                lease.give_back(changed=changed)
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure


class CodedLease:
    """A decoded range of a coded tensor."""

    __slots__ = ("_coded", "_first", "_is_encoded", "_last", "_range", "_rest", "_scratch", "_values")

    def __init__(self, coded: CodedTensor, start: int, stop: int, scratch: Scratch) -> None:
        step = coded.code.step
        self._first, self._last = start // step * step, min(-(-stop // step) * step, coded.numel)
        self._range = slice(start - self._first, stop - self._first)
        self._rest = RestLease(coded, self._first, self._last)
        self._coded, self._scratch = coded, scratch
        self._values: torch.Tensor | None = None
        self._is_encoded = False

    def is_ready(self) -> bool:
        """True once `wait` would not block."""
        return self._rest.is_ready()

    def wait(self) -> torch.Tensor:
        """The decoded values, in memory that is used again after `give_back`."""
        if self._values is None:
            parts = self._rest.parts()
            self._values = self._scratch.take(self._last - self._first, parts[0].device)
            self._coded.code.decode(self._values, parts)
        return self._values[self._range]

    def settle(self, step: int | None = None) -> torch.Tensor:
        """Encode the values now; gives the first part, for copies that have to be like it.

        Args:
            step: number of the update for stochastic rounding; None: to the nearest.
        """
        parts = self._rest.parts()
        if self._values is not None:
            draws = None if step is None else self._coded.draws(step, self._first)
            self._coded.code.encode(parts, self._values, draws)
        self._is_encoded = True
        return parts[0][self._range] if self._coded.code.step == 1 else parts[0]

    def give_back(self, *, changed: bool) -> None:
        """Encode changed values, unless that is done, and give the parts back."""
        values, self._values = self._values, None
        if changed and values is not None and not self._is_encoded:
            self._coded.code.encode(self._rest.parts(), values)
        try:
            self._rest.give_back(changed=changed)
        finally:
            if values is not None:
                self._scratch.give(values)
