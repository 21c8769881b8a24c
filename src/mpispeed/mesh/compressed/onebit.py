"""The 1-bit all-reduce: the mean over ranks through one bit per element, with error feedback of worker and server.

Every rank compresses its values to scale * sign and sends each other rank its chunk; the owner of a chunk sums the
messages, compresses the mean in the same way and sends it to all. So each rank sends 2 (n - 1) (L / 8n + 4) bytes for L
elements: a bit for each, and a scale in front of each message.

Values of a device are compressed there, to the same bits as on the host; only messages are copied to host memory.

Source: 1-bit Adam (arXiv 2102.02888), compressed all-reduce with error feedback on workers and servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.base.device import HOST, pinned
from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives import host_collectives
from mpispeed.mesh.collectives.group import Call, Group
from mpispeed.mesh.collectives.transport import Poll
from mpispeed.mesh.collectives.verbs import flat_view
from mpispeed.mesh.collectives.work import nap_until
from mpispeed.native.one_bit import TILE, add_parts, compensate, decode, encode, scale_of
from mpispeed.native.reduce import square_partials

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

CODE_TAG = 32001
"""Tag of messages inside an exchange; tags of users stay below."""

SCALE_BYTES = 4
PIECE_ELEMENTS = 1 << 19
"""Elements that are coded while others travel: 64 KiB of bits. A multiple of TILE, so that norms stay the same."""

_NAP_SECONDS = 100e-6


def padded_length(count: int, ranks: int) -> int:
    """The least multiple of 8 * ranks that is at least `count`: chunks of all ranks are equal, of whole bytes."""
    unit = 8 * ranks
    return -(-count // unit) * unit


def sent_bytes(count: int, ranks: int) -> int:
    """Bytes that each rank sends in one exchange of `count` elements."""
    return 2 * (ranks - 1) * (padded_length(count, ranks) // (8 * ranks) + SCALE_BYTES)


@dataclass(slots=True)
class OneBitErrors:
    """Errors of compressing one buffer, on one rank.

    Shapes: worker [L], of this rank's values; server [L / ranks], of the mean of its chunk; both fp32, on the device of
    the values. L is `padded_length`.
    """

    worker: torch.Tensor
    server: torch.Tensor

    @classmethod
    def zeros(cls, count: int, ranks: int, device: torch.device = HOST) -> OneBitErrors:
        """Initial errors of a buffer of `count` elements on `device`."""
        length = padded_length(count, ranks)
        return cls(*(torch.zeros(n, dtype=torch.float32, device=device) for n in (length, length // ranks)))

    def clear(self) -> None:
        """Set errors to zero."""
        self.worker.zero_()
        self.server.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.worker.nbytes + self.server.nbytes


def compressed_all_reduce(comm: Comm, x: torch.Tensor, errors: OneBitErrors, *, overlapped: bool | None = None) -> None:
    """Replace `x` by its approximate mean over ranks, bitwise equal on all; errors are kept in `errors`.

    With `overlapped` large buffers are compressed piece by piece while other pieces are sent; by default between nodes,
    because inside of one the copies need the same cores. It changes no bit. A device compresses a buffer at once.

    Collective over: `comm`.
    Shapes: x [count] in fp32, bf16 or fp16; errors for `count` elements.

    Raises:
        CommError: the dtype, or `errors` is of another length.
    """
    flat = flat_view(comm.group, x, "compressed_all_reduce")
    require_float(comm, flat)
    require_fitting(comm, flat.numel(), errors)
    require_together(comm, errors, flat.device)
    squares = compensate(errors.worker[: flat.numel()], flat, threads=comm.group.threads)
    exchange(comm, flat, errors, squares, overlapped=overlapped)


def require_float(comm: Comm, x: torch.Tensor) -> None:
    """Check that `x` is in fp32, bf16 or fp16.

    Raises:
        CommError: it is not.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        msg = f"compressed_all_reduce over {comm}: x has dtype {x.dtype}; use fp32, bf16 or fp16"
        raise CommError(msg)


def require_fitting(comm: Comm, count: int, errors: OneBitErrors) -> None:
    """Check that `errors` are of buffers of `count` elements over `comm`.

    Raises:
        CommError: they are not.
    """
    length = padded_length(count, comm.size)
    if errors.worker.numel() != length or errors.server.numel() != length // comm.size:
        msg = (
            f"compressed_all_reduce over {comm}: errors of {errors.worker.numel()} and {errors.server.numel()} "
            f"elements for {count} elements on {comm.size} ranks; make them with "
            f"OneBitErrors.zeros({count}, {comm.size})"
        )
        raise CommError(msg)


def require_together(comm: Comm, errors: OneBitErrors, device: torch.device) -> None:
    """Check that `errors` are on `device`.

    Raises:
        CommError: they are not.
    """
    if errors.worker.device != device or errors.server.device != device:
        found = f"{errors.worker.device} and {errors.server.device}"
        msg = f"compressed_all_reduce over {comm}: errors on {found} for values on {device}; make them there"
        raise CommError(msg)


def exchange(
    comm: Comm, out: torch.Tensor, errors: OneBitErrors, squares: Sequence[float], *, overlapped: bool | None = None
) -> None:
    """`compressed_all_reduce` of values that `compensate` has added to the errors of the worker already.

    Collective over: `comm`.
    Shapes: out [count], in fp32, bf16 or fp16; `squares` are of the first `count` elements of errors.worker.
    """
    with Call(comm.group, "compressed_all_reduce", sent_bytes(out.numel(), comm.size), out):
        if not comm.transport.moves:
            return
        run = _Exchange(comm.group, out, errors) if out.device == HOST else _DeviceExchange(comm.group, out, errors)
        tail = errors.worker[out.numel() :].to(HOST)
        squares = [*squares, *square_partials(tail, block=TILE)] if tail.numel() else squares
        scale = scale_of(squares, errors.worker.numel())
        is_cut = not comm.transport.shares_memory if overlapped is None else overlapped
        if is_cut and comm.size > 1 and run.chunk > PIECE_ELEMENTS and out.device == HOST:
            run.in_pieces(scale)
        else:
            run.at_once(scale)


class _Exchange:
    """One exchange; rows of `sent` and `received` are messages to and from each rank: a scale, then bits."""

    def __init__(self, group: Group, out: torch.Tensor, errors: OneBitErrors) -> None:
        self.group, self.out, self.errors = group, out, errors
        self.chunk = errors.server.numel()
        self.width = SCALE_BYTES + self.chunk // 8
        self.sent = group.scratch("code sent", group.size * self.width, torch.uint8).view(group.size, self.width)
        self.received = group.scratch("code received", group.size * self.width, torch.uint8).view(
            group.size, self.width
        )

    # -- parts of both ways ------------------------------------------------------------------------------------------

    def _encode_worker(self, rank: int, begin: int, end: int, scale: float) -> None:
        """Elements [begin, end) of the chunk of `rank`."""
        at = rank * self.chunk
        encode(_bits(self.sent[rank], begin, end), self.errors.worker[at + begin : at + end], scale,
               threads=self.group.threads)  # fmt: skip

    def _sum(self, begin: int, end: int) -> list[float]:
        """Add all ranks' messages for [begin, end) of this rank's chunk to the server's error; returns the squares."""
        weights = [_scale(row) / self.group.size for row in self.received]
        parts = [_bits(row, begin, end) for row in self.received]
        return add_parts(self.errors.server[begin:end], parts, weights, threads=self.group.threads)

    def _decode(self, rank: int, begin: int, end: int) -> None:
        """Elements [begin, end) of the chunk of `rank`, as far as `out` goes."""
        at = rank * self.chunk
        part = self.out[at + begin : at + end]
        if part.numel():
            row = self.received[rank]
            bits = _bits(row, begin, begin + -(-part.numel() // 8) * 8)
            decode(part, bits, _scale(row), threads=self.group.threads)

    # -- in two messages ---------------------------------------------------------------------------------------------

    def at_once(self, scale: float) -> None:
        """Compress, send, sum, compress, send, decode."""
        group = self.group
        for rank in range(group.size):
            _set_scale(self.sent[rank], scale)
            self._encode_worker(rank, 0, self.chunk, scale)
        host_collectives.swap_chunks(group, self.received.view(-1), self.sent.view(-1))
        squares = self._sum(0, self.chunk)
        own = self.sent[0]
        _set_scale(own, scale_of(squares, self.chunk))
        encode(_bits(own, 0, self.chunk), self.errors.server, _scale(own), threads=group.threads)
        host_collectives.gather_chunks(group, self.received.view(-1), own)
        for rank in range(group.size):
            self._decode(rank, 0, self.chunk)

    # -- in pieces, beside the wire ----------------------------------------------------------------------------------

    def in_pieces(self, scale: float) -> None:
        """As `at_once`; pieces are sent while others are compressed. A scale goes with the first piece of its row."""
        group, rank = self.group, self.group.rank
        cuts = [(b, min(b + PIECE_ELEMENTS, self.chunk)) for b in range(0, self.chunk, PIECE_ELEMENTS)]
        peers = [(rank + step) % group.size for step in range(1, group.size)]
        sends: list[Poll] = []
        squares: list[float] = []
        _set_scale(self.received[rank], scale)
        arrivals = _Arrivals(group, self.received, cuts, peers)
        summed = arrivals.together(lambda begin, end: squares.extend(self._sum(begin, end)))
        for begin, end in cuts:
            for peer in (*peers, rank):
                _set_scale(self.sent[peer], scale)
                self._encode_worker(peer, begin, end, scale)
                if peer != rank:
                    sends.append(group.transport.post_send(_piece(self.sent[peer], begin, end), peer, CODE_TAG))
            _bits(self.received[rank], begin, end).copy_(_bits(self.sent[rank], begin, end))
            summed(end)
        # Rows are filled again in the second phase: all messages of the first have to be complete.
        _wait(lambda: summed(self.chunk))
        _wait_all(sends)
        own = self.received[rank]
        _set_scale(own, scale_of(squares, self.chunk))
        decoded = _Arrivals(group, self.received, cuts, peers).each(self._decode)
        for begin, end in cuts:
            encode(_bits(own, begin, end), self.errors.server[begin:end], _scale(own), threads=group.threads)
            piece = _piece(own, begin, end)
            sends += [group.transport.post_send(piece, peer, CODE_TAG) for peer in peers]
            self._decode(rank, begin, end)
            decoded()
        _wait(decoded)
        _wait_all(sends)


class _DeviceExchange(_Exchange):
    """An exchange on a device. Messages are in pinned memory; each phase copies them in one piece."""

    def __init__(self, group: Group, out: torch.Tensor, errors: OneBitErrors) -> None:
        self.group, self.out, self.errors = group, out, errors
        self.chunk = errors.server.numel()
        self.width = SCALE_BYTES + self.chunk // 8
        self.sent, self.received = (
            pinned(group.size * self.width, torch.uint8).view(group.size, self.width) for _ in range(2)
        )

    def _encode(self, rows: torch.Tensor, error: torch.Tensor, scale: float) -> None:
        """Compress `error` into messages, an equal part of it into each of `rows`."""
        bits = torch.empty(len(rows), self.chunk // 8, dtype=torch.uint8, device=self.out.device)
        encode(bits.view(-1), error, scale)
        framed = torch.empty(rows.shape, dtype=torch.uint8, device=self.out.device)
        framed[:, SCALE_BYTES:].copy_(bits)
        rows.copy_(framed)
        for row in rows:
            _set_scale(row, scale)

    def at_once(self, scale: float) -> None:
        """Compress, send, sum, compress, send, decode."""
        group, device = self.group, self.out.device
        self._encode(self.sent, self.errors.worker, scale)
        host_collectives.swap_chunks(group, self.received.view(-1), self.sent.view(-1))
        parts = [row[SCALE_BYTES:] for row in self.received.to(device)]
        squares = add_parts(self.errors.server, parts, [_scale(row) / group.size for row in self.received])
        self._encode(self.sent[:1], self.errors.server, scale_of(squares, self.chunk))
        host_collectives.gather_chunks(group, self.received.view(-1), self.sent[0])
        for rank, row in enumerate(self.received.to(device)):
            part = self.out[rank * self.chunk : (rank + 1) * self.chunk]
            bits = row[SCALE_BYTES : SCALE_BYTES + -(-part.numel() // 8)]
            decode(part, bits, _scale(self.received[rank]))


class _Arrivals:
    """Posted receives of all pieces from all peers; pieces of one peer arrive in order."""

    def __init__(self, group: Group, rows: torch.Tensor, cuts: Sequence[tuple[int, int]], peers: Sequence[int]) -> None:
        self._cuts, self._peers = cuts, peers
        self._polls = [[group.transport.post_recv(_piece(rows[p], *cut), p, CODE_TAG) for cut in cuts] for p in peers]
        self._done = [0] * len(peers)  # pieces that have arrived
        self._used = [0] * len(peers)  # of these, how many were worked on

    def _look(self) -> None:
        for index, polls in enumerate(self._polls):
            while self._done[index] < len(polls) and polls[self._done[index]]():
                self._done[index] += 1

    def together(self, work: Callable[[int, int], object]) -> Callable[[int], bool]:
        """Does `work` on pieces that have arrived from all peers and lie before a limit; True once it is reached."""
        cuts, used = self._cuts, [0]

        def step(limit: int) -> bool:
            self._look()
            while used[0] < min(self._done) and cuts[used[0]][1] <= limit:
                work(*cuts[used[0]])
                used[0] += 1
            return used[0] == len(cuts)

        return step

    def each(self, work: Callable[[int, int, int], object]) -> Callable[[], bool]:
        """Does `work` on each piece that has arrived, with the rank it came from; True once all have been worked on."""

        def step() -> bool:
            self._look()
            for index, peer in enumerate(self._peers):
                for place in range(self._used[index], self._done[index]):
                    work(peer, *self._cuts[place])
                self._used[index] = self._done[index]
            return all(used == len(self._cuts) for used in self._used)

        return step


def _piece(row: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The message of elements [begin, end)."""
    return row[0 if begin == 0 else SCALE_BYTES + begin // 8 : SCALE_BYTES + end // 8]


def _bits(row: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return row[SCALE_BYTES + begin // 8 : SCALE_BYTES + end // 8]


def _scale(row: torch.Tensor) -> float:
    # numpy, because torch views bytes as floats only where these are aligned
    return float(row[:SCALE_BYTES].numpy().view("<f4")[0])


def _set_scale(row: torch.Tensor, scale: float) -> None:
    row[:SCALE_BYTES].numpy().view("<f4")[0] = scale


def _wait(poll: Poll) -> None:
    nap_until(poll, longest_seconds=_NAP_SECONDS)


def _wait_all(polls: list[Poll]) -> None:
    for poll in polls:
        _wait(poll)
    polls.clear()
