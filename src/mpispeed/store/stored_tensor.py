"""Flat tensors in memory or in swap files, and leases of their ranges."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base.errors import StoreError, UsageError
from mpispeed.native.block_io import ALIGNMENT
from mpispeed.store.pool import transfer_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.native.block_io import BlockFile, BlockIO, Transfer
    from mpispeed.store.pool import Pool

STEP = 4096
"""Elements: ranges of a swapped tensor that begin at multiples of this begin at a page of its file, at any dtype."""

WIDENED = 1 << 18
"""Elements that are widened at a time: the buffer stays in a cache."""

AWAY = "these model states were taken out of memory by engine.offload_states(); call engine.reload_states() first"


class Lease(Protocol):
    """A range of a stored tensor that is in memory, or being read, until it is given back."""

    def is_ready(self) -> bool:
        """True once `wait` would not block. Not blocking."""

    def wait(self) -> torch.Tensor:
        """The values, to be read and changed in place. Shapes: [stop - start].

        Raises:
            StoreError: they could not be read.
        """

    def give_back(self, *, changed: bool) -> None:
        """End the lease; with `changed` the values go back to their tier, maybe later (`Pool.settle`)."""


class StoredTensor(Protocol):
    """A flat tensor in a tier."""

    numel: int
    dtype: torch.dtype

    @property
    def is_swapped(self) -> bool:
        """True if it is in a swap file, be it in part."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes between leases."""

    @property
    def file_bytes(self) -> int:
        """Bytes of swap files that it takes."""

    def get(self) -> torch.Tensor:
        """All values: the tensor itself if it is in memory, else a copy. Shapes: [numel].

        Raises:
            StoreError: they could not be read.
        """

    def put(self, values: torch.Tensor) -> None:
        """Set all values; copies nothing if they are what `get` returned from memory. Shapes: values [numel].

        Raises:
            StoreError: they could not be written.
        """

    def clear(self) -> None:
        """Set all values to zero."""

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Lease:
        """Lease elements `start` to `stop`; without `reads` the values are unspecified. Not blocking."""

    def narrowed(self, dtype: torch.dtype) -> StoredTensor:
        """A stored tensor of as many elements of another dtype, not a wider one, in the same place.

        What one of the two holds is lost when the other is set.
        """


class Carried:
    """A started transfer of a whole stored tensor, or the error that kept it from starting; None: there is nothing."""

    __slots__ = ("_is_write", "_transfer")

    def __init__(self, transfer: Transfer | Exception | None, *, is_write: bool) -> None:
        self._transfer, self._is_write = transfer, is_write

    def wait(self) -> None:
        """Wait until the transfer has ended.

        Raises:
            StoreError: it failed.
        """
        try:
            if isinstance(self._transfer, Exception):
                raise self._transfer
            if self._transfer is not None:
                self._transfer.wait()
        except (OSError, UsageError) as error:
            raise transfer_error(error, is_write=self._is_write) from error


class MemoryLease:
    """A range of a stored tensor in memory."""

    __slots__ = ("_values",)

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def is_ready(self) -> bool:
        """True."""
        return True

    def wait(self) -> torch.Tensor:
        """The range itself."""
        return self._values

    def give_back(self, *, changed: bool) -> None:
        """Do nothing: changes were made in place."""


class WholeLease:
    """All of a stored tensor, in memory of its own if it is in a swap file: no buffer has to be as long."""

    __slots__ = ("_stored", "_values")

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self._values: torch.Tensor | None = None

    def is_ready(self) -> bool:
        """True once `wait` would not block."""
        return self._values is not None or not self._stored.is_swapped

    def wait(self) -> torch.Tensor:
        """The values; from a swap file they are read here."""
        if self._values is None:
            self._values = self._stored.get()
        return self._values

    def give_back(self, *, changed: bool) -> None:
        """Write changed values, and wait for it."""
        values, self._values = self._values, None
        if changed and values is not None:
            self._stored.put(values)


class MemoryTensor:
    """A stored tensor in memory, backed by a plain tensor."""

    __slots__ = ("_values", "dtype", "numel")
    is_swapped = False
    file_bytes = 0

    def __init__(self, values: torch.Tensor) -> None:
        """Args: `values` is kept as it is; it may be a view of another stored tensor's."""
        self._values: torch.Tensor | None = values
        self.numel, self.dtype = values.numel(), values.dtype

    @property
    def memory_bytes(self) -> int:
        """Bytes of the tensor, also if it is a view; 0 while it is away."""
        return 0 if self._values is None else self._values.nbytes

    def get(self) -> torch.Tensor:
        """The tensor itself.

        Raises:
            UsageError: it is away.
        """
        if self._values is None:
            raise UsageError(AWAY)
        return self._values

    def put(self, values: torch.Tensor) -> None:
        """Copy, unless the memory is the same."""
        own = self.get()
        if values.data_ptr() != own.data_ptr():
            own.copy_(values)

    def clear(self) -> None:
        """Set to zero."""
        self.get().zero_()

    def lend(self, start: int, stop: int, *, reads: bool = True) -> MemoryLease:
        """The range itself."""
        return MemoryLease(self.get()[start:stop])

    def narrowed(self, dtype: torch.dtype) -> MemoryTensor:
        """The other dtype in the last bytes of this memory, from where `widen` brings it into all of it."""
        return MemoryTensor(last_bytes(self.get(), dtype))

    def let_go(self) -> None:
        """Drop the memory until `bring_back`; somebody else has the values. All other calls raise meanwhile."""
        self._values = None

    def bring_back(self, values: torch.Tensor) -> None:
        """Undo `let_go`; `values` is kept as it is. Shapes: [numel]."""
        self._values = values


class SwappedTensor:
    """A stored tensor in a swap file. Ranges never written are zero, and are not read.

    Leased ranges begin at multiples of `STEP`, so that neighbours share no page of the file.
    """

    __slots__ = ("_file", "_io", "_offset", "_pool", "_written", "dtype", "numel")
    is_swapped = True
    memory_bytes = 0

    def __init__(self, numel: int, dtype: torch.dtype, file: BlockFile, offset: int, io: BlockIO, pool: Pool) -> None:
        """Take over the bytes of `file` from `offset`, a multiple of the page, up to the next stored tensor."""
        self.numel, self.dtype = numel, dtype
        self._file, self._offset, self._io, self._pool = file, offset, io, pool
        self._written = 0  # elements from the start that the file holds

    @property
    def file_bytes(self) -> int:
        """Bytes of its values."""
        return self.numel * self.dtype.itemsize

    def get(self) -> torch.Tensor:
        """A copy."""
        values = torch.empty(self.numel, dtype=self.dtype)
        self.start_get(values).wait()
        return values

    def start_get(self, out: torch.Tensor) -> Carried:
        """Start to read all values into `out`, which is used until that is done. Shapes: out [numel]."""
        out[self._written :].zero_()
        return self._carry(out[: self._written], is_write=False)

    def put(self, values: torch.Tensor) -> None:
        """Write all, and wait for it."""
        self.start_put(values).wait()

    def start_put(self, values: torch.Tensor) -> Carried:
        """Start to write all `values`, which must not change until that is done. Shapes: values [numel]."""
        if values.numel() != self.numel or values.dtype != self.dtype:
            found, wanted = f"{values.numel()} {values.dtype}", f"{self.numel} {self.dtype}"
            msg = f"a swapped tensor of {wanted} cannot be set to {found}"
            raise StoreError(msg)
        self._written = self.numel
        return self._carry(values.to("cpu"), is_write=True)

    def _carry(self, values: torch.Tensor, *, is_write: bool) -> Carried:
        try:
            self._check_length()
            transfer = (self._io.write if is_write else self._io.read)(self._file, values, self._offset)
        except (OSError, UsageError) as error:  # or closed meanwhile
            return Carried(error, is_write=is_write)
        return Carried(transfer, is_write=is_write)

    def clear(self) -> None:
        """Treat the file as never written."""
        self._written = 0

    def _check_length(self) -> None:
        """Check that the file has not been truncated: a write behind its end would leave zeros unnoticed.

        Raises:
            OSError: the file ends before this stored tensor does.
        """
        size, wanted = self._file.size(), self._offset + _pages(self.file_bytes)
        if size < wanted:
            text = f"somebody has cut the file to {size} bytes, and these states end at {wanted}"
            raise OSError(errno.EIO, text, self._file.path)

    def lend(self, start: int, stop: int, *, reads: bool = True) -> SwapLease:
        """Lease a range through a buffer of the pool, as soon as one is free."""
        lease = SwapLease(self, start, stop, reads=reads)
        self._pool.ask(lease)
        return lease

    def narrowed(self, dtype: torch.dtype) -> SwappedTensor:
        """The other dtype in the first bytes of this range of the file."""
        return SwappedTensor(self.numel, dtype, self._file, self._offset, self._io, self._pool)

    # -- for leases -----------------------------------------------------------------------------------------------

    def begin(self, buffer: torch.Tensor, start: int, stop: int, *, reads: bool) -> tuple[torch.Tensor, Any]:
        """The values in `buffer` and the transfer that fills them, or None if nothing has to be read."""
        values = buffer[: (stop - start) * self.dtype.itemsize].view(self.dtype)
        if not reads:
            buffer.zero_()  # who fills it leaves padding out, which must not be what somebody else left here
            return values, None
        known = max(min(stop, self._written) - start, 0)
        if known < stop - start:
            values[known:].zero_()
        self._check_length()
        at, size = self._offset + start * self.dtype.itemsize, _pages(known * self.dtype.itemsize)
        return values, self._io.read(self._file, buffer[:size], at) if known else None

    def end(self, buffer: torch.Tensor, start: int, stop: int) -> Transfer:
        """Start to write the range from `buffer`."""
        if start > self._written:
            msg = f"elements from {start} on are given back before those from {self._written} on"
            raise StoreError(msg)
        # Up to a whole page: the stored tensor's bytes in the file end at one, and direct writes need it.
        size = _pages((stop - start) * self.dtype.itemsize)
        try:
            self._check_length()
            transfer = self._io.write(self._file, buffer[:size], self._offset + start * self.dtype.itemsize)
        except (OSError, UsageError) as error:
            raise transfer_error(error, is_write=True) from error
        self._written = max(self._written, stop)
        return transfer

    @property
    def pool(self) -> Pool:
        """The pool of its buffers."""
        return self._pool


class SwapLease:
    """A range of a swapped stored tensor."""

    __slots__ = ("_buffer", "_is_over", "_reads", "_refusal", "_start", "_stop", "_stored", "_transfer", "_values")

    def __init__(self, stored: SwappedTensor, start: int, stop: int, *, reads: bool) -> None:
        if start % STEP or not 0 <= start <= stop <= stored.numel:
            msg = (
                f"elements {start} to {stop} of a swapped tensor of {stored.numel} cannot be lent; begin at {STEP} * n"
            )
            raise StoreError(msg)
        self._stored, self._start, self._stop, self._reads = stored, start, stop, reads
        self._buffer: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._transfer: Transfer | None = None
        self._refusal: Exception | None = None
        self._is_over = False

    @property
    def bytes(self) -> int:
        """Bytes of the range."""
        return (self._stop - self._start) * self._stored.dtype.itemsize

    @property
    def is_served(self) -> bool:
        """True once it has a buffer, or cannot get one."""
        return self._buffer is not None or self._refusal is not None

    def take(self, buffer: torch.Tensor) -> None:
        """Take the buffer and start to read. Called by the pool, once."""
        self._buffer = buffer
        try:
            self._values, self._transfer = self._stored.begin(buffer, self._start, self._stop, reads=self._reads)
        except Exception as error:  # it could not even be started; told to whoever waits, not to whoever came by
            self._refusal = error

    def refuse(self, error: MemoryError) -> None:
        """Keep the error for `wait`. Called by the pool, once."""
        self._refusal = error

    def is_ready(self) -> bool:
        """True once the values are in memory, or cannot be read."""
        self._stored.pool.reap()
        return self.is_served and (self._transfer is None or self._transfer.is_done())

    def wait(self) -> torch.Tensor:
        """The values, in a buffer of the pool."""
        if self._is_over:
            msg = "a range of a swapped tensor is used after it was given back"
            raise StoreError(msg)
        if not self.is_served:
            self._stored.pool.wait_for(self)
        if isinstance(self._refusal, MemoryError):
            raise StoreError(str(self._refusal)) from self._refusal
        try:
            if self._refusal is not None:
                raise self._refusal
            if self._transfer is not None:
                self._transfer.wait()
        except (OSError, UsageError) as error:
            raise transfer_error(error, is_write=False) from error
        return self._values  # type: ignore[return-value]

    def give_back(self, *, changed: bool) -> None:
        """Start to write changed values; the buffer serves the next lease when that is done."""
        pool = self._stored.pool
        pool.withdraw(self)  # first: no other thread finds a buffer for it from here
        buffer, transfer, has_values = self._buffer, self._transfer, self._values is not None
        self._buffer, self._values, self._transfer, self._is_over = None, None, None, True
        if buffer is None:
            return
        if changed and has_values:
            try:
                writing = self._stored.end(buffer, self._start, self._stop)
            except StoreError:
                pool.free(buffer, after=transfer)
                raise
            pool.write(writing, buffer)
        else:
            pool.free(buffer, after=transfer)


def last_bytes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As many elements of a dtype that is not wider, in the last bytes of `values`. Shapes: as `values`, flat."""
    return values.view(torch.uint8)[values.numel() * (values.itemsize - dtype.itemsize) :].view(dtype)


def widen(values: torch.Tensor, dtype: torch.dtype) -> None:
    """Fill `values` with what `last_bytes(values, dtype)` holds. Shapes: values [numel], contiguous, on the host.

    From the start on, through a small buffer: element i ends where no element behind i is still to be read.
    """
    if dtype == values.dtype:
        return
    narrow, wide = last_bytes(values, dtype), torch.empty(min(WIDENED, values.numel()), dtype=values.dtype)
    for start in range(0, values.numel(), WIDENED):
        piece = wide[: values.numel() - start]
        values[start : start + WIDENED].copy_(piece.copy_(narrow[start : start + WIDENED]))


def _pages(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def settle(tensors: Sequence[StoredTensor]) -> None:
    """Wait until all leases given back as changed are written.

    Raises:
        StoreError: a write has failed.
    """
    for pool in {id(stored.pool): stored.pool for stored in tensors if isinstance(stored, SwappedTensor)}.values():
        pool.settle()
