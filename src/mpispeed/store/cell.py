"""A flat tensor at rest, in memory or in a swap file, and the loan of a range of it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base.errors import StoreError, UsageError
from mpispeed.native.block_io import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.native.block_io import BlockFile, BlockIO, Transfer
    from mpispeed.store.pool import Pool

STEP = 4096
"""Elements: ranges of a swapped cell that begin at multiples of this begin at a page of its file, at any dtype."""

AWAY = "these model states were taken out of memory by engine.offload_states(); call engine.reload_states() first"


class Loan(Protocol):
    """A range of a cell that is in memory, or on its way there, until it is given back."""

    def is_ready(self) -> bool:
        """True once `wait` would not block. Not blocking."""

    def wait(self) -> torch.Tensor:
        """The values, to be read and changed in place. Shapes: [stop - start].

        Raises:
            StoreError: they could not be read.
        """

    def give_back(self, *, changed: bool) -> None:
        """End of the loan; with `changed` the values go to where the cell rests, maybe later (`Pool.settle`)."""


class Cell(Protocol):
    """A flat tensor at rest."""

    numel: int
    dtype: torch.dtype
    is_swapped: bool

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes at rest."""

    @property
    def file_bytes(self) -> int:
        """Bytes of swap files that it takes."""

    def get(self) -> torch.Tensor:
        """All values: the tensor itself if it rests in memory, else a copy. Shapes: [numel].

        Raises:
            StoreError: they could not be read.
        """

    def put(self, values: torch.Tensor) -> None:
        """Set all values; nothing is copied if they are what `get` returned from memory. Shapes: values [numel].

        Raises:
            StoreError: they could not be written.
        """

    def clear(self) -> None:
        """Set all values to zero."""

    def lend(self, start: int, stop: int, *, reads: bool = True) -> Loan:
        """Borrow elements `start` to `stop`; without `reads` the values are unspecified. Not blocking."""


class Carried:
    """A transfer of a whole cell that was started, or could not be."""

    __slots__ = ("_is_write", "_transfer")

    def __init__(self, transfer: Transfer | Exception, *, is_write: bool) -> None:
        self._transfer, self._is_write = transfer, is_write

    def wait(self) -> None:
        """Until it is done.

        Raises:
            StoreError: it failed.
        """
        try:
            if isinstance(self._transfer, Exception):
                raise self._transfer
            self._transfer.wait()
        except (OSError, UsageError) as error:
            raise trouble(error, is_write=self._is_write) from error


class MemoryLoan:
    """A range of a cell in memory."""

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
        """Nothing: changes were made in place."""


class MemoryCell:
    """A cell in memory: it is its tensor."""

    __slots__ = ("_values", "dtype", "numel")
    is_swapped = False
    file_bytes = 0

    def __init__(self, values: torch.Tensor) -> None:
        """Args: `values` is kept as it is; it may be a view of another cell's."""
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

    def lend(self, start: int, stop: int, *, reads: bool = True) -> MemoryLoan:
        """The range itself."""
        return MemoryLoan(self.get()[start:stop])

    def let_go(self) -> None:
        """Look at no memory until `bring_back`; somebody else has the values. All other calls raise meanwhile."""
        self._values = None

    def bring_back(self, values: torch.Tensor) -> None:
        """End of `let_go`; `values` is kept as it is. Shapes: [numel]."""
        self._values = values


class SwapCell:
    """A cell in a swap file. What was never written is zero, and is not read.

    Ranges that are lent begin at multiples of `STEP`, so that neighbours share no page of the file.
    """

    __slots__ = ("_file", "_io", "_offset", "_pool", "_written", "dtype", "numel")
    is_swapped = True
    memory_bytes = 0

    def __init__(self, numel: int, dtype: torch.dtype, file: BlockFile, offset: int, io: BlockIO, pool: Pool) -> None:
        """Take over the bytes of `file` from `offset`, a multiple of the page, up to the next cell."""
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
        """Forget what the file holds."""
        self._written = 0

    def _check_length(self) -> None:
        """A write behind the end of a file that somebody has cut would leave zeros that nobody finds.

        Raises:
            OSError: the file ends before this cell does.
        """
        size, wanted = self._file.size(), self._offset + _pages(self.file_bytes)
        if size < wanted:
            text = f"somebody has cut the file to {size} bytes, and these states end at {wanted}"
            raise OSError(errno.EIO, text, self._file.path)

    def lend(self, start: int, stop: int, *, reads: bool = True) -> SwapLoan:
        """Borrow a range through a buffer of the pool, as soon as one is free."""
        loan = SwapLoan(self, start, stop, reads=reads)
        self._pool.ask(loan)
        return loan

    # -- for loans -----------------------------------------------------------------------------------------------

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
        """Start to write what `buffer` holds of the range."""
        if start > self._written:
            msg = f"elements from {start} on are given back before those from {self._written} on"
            raise StoreError(msg)
        # Up to a whole page: the cell's bytes in the file end at one, and direct writes need it.
        size = _pages((stop - start) * self.dtype.itemsize)
        try:
            self._check_length()
            transfer = self._io.write(self._file, buffer[:size], self._offset + start * self.dtype.itemsize)
        except (OSError, UsageError) as error:
            raise trouble(error, is_write=True) from error
        self._written = max(self._written, stop)
        return transfer

    @property
    def pool(self) -> Pool:
        """Where its buffers come from."""
        return self._pool


class SwapLoan:
    """A range of a swapped cell."""

    __slots__ = ("_buffer", "_cell", "_is_over", "_reads", "_refusal", "_start", "_stop", "_transfer", "_values")

    def __init__(self, cell: SwapCell, start: int, stop: int, *, reads: bool) -> None:
        if start % STEP or not 0 <= start <= stop <= cell.numel:
            msg = f"elements {start} to {stop} of a swapped tensor of {cell.numel} cannot be lent; begin at {STEP} * n"
            raise StoreError(msg)
        self._cell, self._start, self._stop, self._reads = cell, start, stop, reads
        self._buffer: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._transfer: Transfer | None = None
        self._refusal: Exception | None = None
        self._is_over = False

    @property
    def bytes(self) -> int:
        """Bytes of the range."""
        return (self._stop - self._start) * self._cell.dtype.itemsize

    @property
    def is_served(self) -> bool:
        """True once a buffer was free, or cannot be had."""
        return self._buffer is not None or self._refusal is not None

    def take(self, buffer: torch.Tensor) -> None:
        """The pool has a buffer: start to read. Called by the pool, once."""
        self._buffer = buffer
        try:
            self._values, self._transfer = self._cell.begin(buffer, self._start, self._stop, reads=self._reads)
        except Exception as error:  # it could not even be started; told to whoever waits, not to whoever came by
            self._refusal = error

    def refuse(self, error: MemoryError) -> None:
        """There is no memory for a buffer. Called by the pool, once."""
        self._refusal = error

    def is_ready(self) -> bool:
        """True once the values are in memory, or cannot be read."""
        self._cell.pool.reap()
        return self.is_served and (self._transfer is None or self._transfer.is_done())

    def wait(self) -> torch.Tensor:
        """The values, in a buffer of the pool."""
        if self._is_over:
            msg = "a range of a swapped tensor is used after it was given back"
            raise StoreError(msg)
        if not self.is_served:
            self._cell.pool.wait_for(self)
        if isinstance(self._refusal, MemoryError):
            raise StoreError(str(self._refusal)) from self._refusal
        try:
            if self._refusal is not None:
                raise self._refusal
            if self._transfer is not None:
                self._transfer.wait()
        except (OSError, UsageError) as error:
            raise trouble(error, is_write=False) from error
        return self._values  # type: ignore[return-value]

    def give_back(self, *, changed: bool) -> None:
        """Start to write what was changed; the buffer serves the next loan when that is done."""
        pool = self._cell.pool
        pool.withdraw(self)  # first: no other thread finds a buffer for it from here
        buffer, transfer, has_values = self._buffer, self._transfer, self._values is not None
        self._buffer, self._values, self._transfer, self._is_over = None, None, None, True
        if buffer is None:
            return
        if changed and has_values:
            try:
                writing = self._cell.end(buffer, self._start, self._stop)
            except StoreError:
                pool.free(buffer, after=transfer)
                raise
            pool.write(writing, buffer)
        else:
            pool.free(buffer, after=transfer)


def _pages(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def trouble(error: Exception, *, is_write: bool) -> StoreError:
    """What to tell about a transfer that failed, or could not be started."""
    verb = "written" if is_write else "read"
    return StoreError(
        f"model states could not be {verb}: {error}; training cannot go on from here: mend the disk behind nvme_path, "
        "or name another, and resume from the last checkpoint"
    )


def settle(cells: Sequence[Cell]) -> None:
    """Wait until what was given back changed is written.

    Raises:
        StoreError: something could not be written.
    """
    for pool in {id(cell.pool): cell.pool for cell in cells if isinstance(cell, SwapCell)}.values():
        pool.settle()
