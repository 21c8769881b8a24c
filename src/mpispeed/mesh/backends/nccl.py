"""The device path through NCCL or RCCL: moves by the library, ordered sums of these moves, its own sums when asked.

A communicator has one order of operations for all of its streams. So messages between two ranks, which may come in any
order, have communicators of their own, one for each direction between neighbours of the group (`Lane`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import CommError
from mpispeed.mesh.backends.nccl_comm import Communicator, raw_stream
from mpispeed.mesh.backends.nccl_library import OPS, TYPES, UINT8, Library, library_for
from mpispeed.mesh.collectives.device_path import DevicePath
from mpispeed.mesh.collectives.transport import Posted
from mpispeed.mesh.collectives.work import in_this_mode, nap_until

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.transport import Pairs, Transport
    from mpispeed.mesh.comm import Comm

SIZES = 62
"""Lengths of a message and of those before it that a letter tells: so far messages may be received out of order."""

OPEN_SECONDS = 300.0
"""How long a rank waits at most for others to join; what fails on one ends the wait of all."""


class Lane:
    """Messages from one rank to another, in the order in which they are sent, on a stream of their own.

    The sender's copy of a message waits on the device for its receiver, beside what the sender computes. A letter in
    host memory, with the message's tag, tells its number, so that the receiver may ask for messages in any order:
    those that come before the one asked for are put aside.
    """

    def __init__(self, communicator: Communicator, device: torch.device, transport: Transport, peer: int) -> None:
        """Args: `communicator` has two ranks, of which the first sends; `transport` is that of the group."""
        self._communicator, self._device, self._transport, self._peer = communicator, device, transport, peer
        self._stream = devices.module_of(device).Stream(device)
        self._lock = threading.Lock()
        self._count = 0
        self._sizes: deque[int] = deque(maxlen=SIZES)
        self._held: deque[tuple[Any, torch.Tensor]] = deque()
        self._aside: dict[int, torch.Tensor] = {}

    def meet(self) -> None:
        """Connect the two ranks. Collective over: them."""
        x = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self._run("ncclRecv" if self._communicator.rank else "ncclSend", x)
        devices.mark(self._device).synchronize()

    def post_send(self, x: torch.Tensor, tag: int) -> Posted:
        """Queue a copy of `x`; what is waited for is only the letter."""
        with self._lock:
            while self._held and self._held[0][0].query():
                self._held.popleft()
            copy = x.clone()
            sent = self._run("ncclSend", copy)
            self._held.append((sent, copy))
            self._sizes.appendleft(copy.nbytes)
            letter = torch.tensor([self._count, *self._sizes, *[0] * (SIZES - len(self._sizes))], dtype=torch.int64)
            self._count += 1
        return Posted([self._transport.post_send(letter, self._peer, tag)], letter)

    def post_recv(self, x: torch.Tensor, tag: int) -> Posted:
        """Receive once the letter is there; the caller's stream comes after that by `bring`."""
        letter = torch.empty(1 + SIZES, dtype=torch.int64)
        arrived = self._transport.post_recv(letter, self._peer, tag)
        free, done = devices.mark(self._device), list[Any]()
        take = in_this_mode(lambda: self._take(x, letter.tolist(), free))

        def poll() -> bool:
            if not arrived():
                return False
            done.append(take())
            return True

        return Posted([poll], (letter, x), lambda: devices.follow(self._device, done[0]))

    def _take(self, x: torch.Tensor, letter: Sequence[int], free: Any) -> Any:
        """Queue the receipt of a message behind `free`; the event of its end.

        Raises:
            CommError: it has another length than its receiver waits for, or came far out of order.
        """
        number, *sizes = letter
        with self._lock:
            if sizes[0] != x.nbytes or number - self._count >= SIZES:
                problem = (
                    f"a message of {sizes[0]} bytes meets a tensor of {x.nbytes}"
                    if sizes[0] != x.nbytes
                    else f"{number - self._count} messages that were sent before have not been asked for yet"
                )
                msg = f"recv over {self._communicator.where} from rank {self._peer}: {problem}; send and receive alike"
                raise CommError(msg)
            with devices.on_stream(self._device, self._stream):
                while self._count < number:
                    early = torch.empty(sizes[number - self._count], dtype=torch.uint8, device=self._device)
                    self._queue("ncclRecv", early)
                    self._aside[self._count] = early
                    self._count += 1
                devices.follow(self._device, free)
                if number in self._aside:
                    x.view(torch.uint8).copy_(self._aside.pop(number))
                else:
                    self._queue("ncclRecv", x)
                    self._count += 1
                return devices.mark(self._device)

    def _run(self, function: str, x: torch.Tensor) -> Any:
        """Queue a call behind the caller's work, on the own stream; the event of its end."""
        ready = devices.mark(self._device)
        with devices.on_stream(self._device, self._stream):
            devices.follow(self._device, ready)
            self._queue(function, x)
            return devices.mark(self._device)

    def _queue(self, function: str, x: torch.Tensor) -> None:
        made = self._communicator
        if x.numel():
            made.run(function, x.data_ptr(), x.nbytes, UINT8, 1 - made.rank, made.address, raw_stream(self._device))

    def close(self) -> None:
        """Collective over: both ranks."""
        self._stream.synchronize()
        self._held.clear()
        self._communicator.close()


class NcclPath(DevicePath):
    """A group whose ranks have a GPU each, joined by NCCL or RCCL.

    The host waits for nothing but peers that are late for their first call.
    """

    has_sums, waits_on_host = True, False

    def __init__(
        self, comm: Comm, device: torch.device, communicator: Communicator, lanes: tuple[Mapping[int, Lane], ...]
    ) -> None:
        """Args: `lanes` are those to other ranks and those from them, by rank."""
        super().__init__(comm.rank, comm.size, device)
        self.name, self._communicator = communicator.library.name, communicator
        self._to, self._from = lanes

    def reaches(self, peer: int) -> bool:
        """True of neighbours that have lanes; messages of others are staged in host memory."""
        return peer in self._to and peer in self._from

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Equal shards in rank order. Collective over: the group."""
        if shard.numel():
            self._run("ncclAllGather", shard.data_ptr(), out.data_ptr(), shard.nbytes, UINT8)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Equal parts. Collective over: the group."""
        sources, targets = (list(t.view(self.size, -1).unbind()) if t.numel() else [] for t in (x, out))
        if sources:
            self.exchange([(t, r) for r, t in enumerate(sources)], [(t, r) for r, t in enumerate(targets)])

    def exchange(self, sends: Pairs, recvs: Pairs) -> None:
        """Tensors to and from other ranks, all at once; between two ranks in the order of the lists.

        Collective over: the group; also ranks that have nothing to send or receive call it.
        """
        own = [x for x, peer in sends if peer == self.rank]
        for target, source in zip([x for x, peer in recvs if peer == self.rank], own, strict=True):
            target.copy_(source)
        made, stream = self._communicator, raw_stream(self.device)
        calls = [("ncclSend", x, peer) for x, peer in sends] + [("ncclRecv", x, peer) for x, peer in recvs]
        with made.grouped("ncclSend and ncclRecv"):
            for function, x, peer in calls:
                if peer != self.rank and x.numel():
                    made.add(function, x.data_ptr(), x.nbytes, UINT8, peer, made.address, stream)

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """From `root` to all. Collective over: the group."""
        if x.numel():
            self._run("ncclBroadcast", x.data_ptr(), x.data_ptr(), x.nbytes, UINT8, root)

    def send(self, x: torch.Tensor, dst: int, tag: int) -> None:
        """One message; `x` may change on the caller's stream."""
        _wait_for(self.post_send(x, dst, tag))

    def recv(self, x: torch.Tensor, src: int, tag: int) -> None:
        """One message; the host waits until it was sent, not until it has arrived."""
        _wait_for(self.post_recv(x, src, tag))

    def post_send(self, x: torch.Tensor, dst: int, tag: int) -> Posted:
        """One message; the host does not wait for its receiver. `x` may change on the caller's stream."""
        return self._to[dst].post_send(x, tag)

    def post_recv(self, x: torch.Tensor, src: int, tag: int) -> Posted:
        """One message; the host does not wait for its sender."""
        return self._from[src].post_recv(x, tag)

    def library_all_reduce(self, x: torch.Tensor, op: str) -> None:
        """In place, in an order of the library's own if it combines such numbers. Collective over: the group."""
        if x.dtype not in TYPES or op not in OPS:
            self.all_reduce(x, op, 1.0)
        elif x.numel():
            self._run("ncclAllReduce", x.data_ptr(), x.data_ptr(), x.numel(), TYPES[x.dtype], OPS[op])

    def library_reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
        """Equal shards of equal dtype, likewise. Collective over: the group."""
        if full.dtype not in TYPES or op not in OPS or shard.dtype != full.dtype:
            self.reduce_scatter(shard, full, op, 1.0)
        elif shard.numel():
            self._run("ncclReduceScatter", full.data_ptr(), shard.data_ptr(), shard.numel(), TYPES[full.dtype], OPS[op])

    def close(self) -> None:
        """Release the communicators. Collective over: the group."""
        for _, lane in sorted(_both(self._to, self._from, self.rank).items()):
            lane.close()
        self._communicator.close()

    def _run(self, function: str, *args: object) -> None:
        made = self._communicator
        made.run(function, *args, made.address, raw_stream(self.device))


def _wait_for(posted: Posted) -> None:
    for poll in posted.polls:
        nap_until(poll)
    if posted.bring is not None:
        posted.bring()


def _both(to: Mapping[int, Lane], came: Mapping[int, Lane], rank: int) -> dict[tuple[int, int], Lane]:
    """Lanes by sender and receiver."""
    return {(rank, peer): lane for peer, lane in to.items()} | {(peer, rank): lane for peer, lane in came.items()}


# -- opening -------------------------------------------------------------------------------------------------------


def identity_of(device: torch.device) -> str:
    """What tells one GPU of a node from another, whatever numbers processes give them."""
    if device.type != "cuda":
        return str(device)
    return str(torch.cuda.get_device_properties(device).uuid)


def open_path(comm: Comm, device: torch.device, *, node: str = "", has_messages: bool = False) -> NcclPath:
    """Join the ranks of a group.

    Args:
        comm: the group.
        device: of this rank.
        node: name of this rank's node.
        has_messages: neighbours of the group send each other messages; others' go through the host.

    Collective over: `comm`.

    Raises:
        CommError: on all ranks: the library is missing or another one on some rank, two ranks share a GPU, or the
            library fails.
    """
    with comm.together(CommError):
        library = library_for(device)
        own = (library.name, library.version, f"{node} {identity_of(device)}")
    found = comm.gather_objects(own)
    _check_alike(comm, found)
    limit = min(comm.group.limits.timeout_seconds or OPEN_SECONDS, OPEN_SECONDS)
    pairs = _neighbours(comm.size) if has_messages else []
    with comm.together(CommError):
        names = {pair: library.unique_id() for pair in pairs if pair[0] == comm.rank}
        first = library.unique_id() if comm.rank == 0 else b""
    everything = comm.gather_objects((first, names))
    made: list[Communicator] = []
    lanes: tuple[dict[int, Lane], dict[int, Lane]] = ({}, {})
    with devices.module_of(device).device(device):
        try:
            with comm.together(CommError), _Vigil(comm.transport) as vigil:
                join = partial(_join, made, library, limit, vigil)
                join(everything[0][0], comm.size, comm.rank, str(comm))
                for pair in pairs:
                    if comm.rank in pair:
                        place = pair.index(comm.rank)
                        where = f"{comm} from rank {pair[0]} to rank {pair[1]}"
                        joined = join(everything[pair[0]][1][pair], 2, place, where)
                        peer = pair[1 - place]
                        lane = lanes[place][peer] = Lane(joined, device, comm.transport, peer)
                        lane.meet()
        except CommError:
            for other in made:
                other.abort("its group could not be joined")
            raise
    for each in made:
        each.beat = _nothing
    return NcclPath(comm, device, made[0], lanes)


def _nothing() -> None:
    """Nobody is told of while a communicator is used: the thread that looks sees to that."""


class _Lost(Exception):
    """Another rank has failed, and tells of it itself."""


class _Vigil:
    """Context in which ranks join, that ends on all of them once one fails.

    All compare again and again how they are, without blocking, until nobody is on the way any more. Collective over:
    the group.
    """

    _DONE, _ON_THE_WAY, _FAILED = range(3)

    def __init__(self, transport: Transport) -> None:
        self._transport, self._worst = transport, self._ON_THE_WAY

    def __enter__(self) -> _Vigil:
        self._comparison = self._transport.compare(self._ON_THE_WAY)
        return self

    def beat(self) -> None:
        """To be called while this rank waits.

        Raises:
            _Lost: another one has failed.
        """
        if self._is_over():
            raise _Lost

    def _is_over(self, state: int = _ON_THE_WAY) -> bool:
        """True if one has failed or all are done; once a comparison is done, the next begins."""
        found = self._comparison()
        if found is not None:
            self._worst = found[1]
            if self._worst == self._ON_THE_WAY:
                self._comparison = self._transport.compare(state)
        return self._worst != self._ON_THE_WAY

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if kind is not _Lost:
            nap_until(lambda: self._is_over(self._DONE if kind is None else self._FAILED))
        return kind is _Lost


def _join(
    made: list[Communicator],
    library: Library,
    limit: float,
    vigil: _Vigil,
    name: bytes,
    size: int,
    rank: int,
    where: str,
) -> Communicator:
    """A communicator that is ready; also entered in `made`. Collective over: its ranks."""
    made.append(Communicator(library, name, size, rank, where, limit))
    made[-1].beat = vigil.beat
    made[-1].settle()
    return made[-1]


def _check_alike(comm: Comm, found: Sequence[tuple[str, int, str]]) -> None:
    """Refuse, on all ranks alike, libraries of several versions and a GPU of several ranks."""
    problem = ""
    if len({own[:2] for own in found}) > 1:
        other = next(rank for rank, own in enumerate(found) if own[:2] != found[0][:2])
        problem = f"rank 0 has {found[0][0]} {found[0][1]}, rank {other} {found[other][0]} {found[other][1]}"
    elif len({own[2] for own in found}) < len(found):
        places = [own[2] for own in found]
        rank = next(rank for rank, place in enumerate(places) if place in places[:rank])
        problem = f"ranks {places.index(places[rank])} and {rank} share {places[rank]}, and it takes one rank for each"
    if problem:
        msg = f"{found[0][0].upper()} cannot join {comm}: {problem}"
        error = CommError(msg)
        error.is_collective = True
        raise error


def _neighbours(size: int) -> list[tuple[int, int]]:
    """Sender and receiver of all lanes of a ring, in the one order in which all ranks open theirs."""
    return sorted({(rank, (rank + step) % size) for rank in range(size) for step in (1, -1)}) if size > 1 else []
