"""The side channel: watchdogs of nodes talk to each other over connections of their own, beside MPI.

Every watchdog connects to those of the first two nodes, which coordinate; the second one takes over from the first.
Both sides prove that they know the secret of the job (`handshake`). Messages are JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import random
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mpispeed.watchdog.handshake import Line, ProofError, greet, welcome

log = logging.getLogger(__name__)

HEADS = 2
CONNECT_SECONDS = 3.0
STRANGER_SECONDS = 3.0
"""Time for a new connection to prove that it belongs to the job."""

MOST_STRANGERS = 64
"""Most connections without a proof at a time; more wait until they are taken."""

RETRY_SECONDS = 2.0
MOST_KEPT = 1000
MOST_KEPT_BYTES = 4 << 20
"""Messages to one node that wait for a connection; the oldest are lost first."""

OF_NOW = ("states", "attention")
_BYE = json.dumps({"bye": True}).encode()
_SIOCGIFADDR = 0x8915

Receiver = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the job. `addresses` are tried in their order."""

    host: str
    addresses: tuple[str, ...]
    port: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Peer:
    """Known facts of another node.

    `said_bye`: its watchdog has announced its end. `is_closed`: the connection has ended without an error, as when the
    watchdog's process has ended. `refused`: the node is there, its watchdog is not. `address`: the one that worked.
    """

    heard_at: float = 0.0
    line: Line | None = None
    is_closed: bool = False
    said_bye: bool = False
    was_connected: bool = False
    refused: bool = False
    address: str = ""
    dropped: int = 0
    outbox: deque[bytes] = field(default_factory=deque)
    kept_bytes: int = 0

    @property
    def writer(self) -> asyncio.StreamWriter | None:
        """The connection's writer, if there is one."""
        return self.line.writer if self.line is not None else None

    def keep(self, message: bytes) -> None:
        """Keep a message until there is a connection; one that replaces the last is not kept twice."""
        if self.outbox and self.outbox[-1] == message:
            return
        if len(message) > MOST_KEPT_BYTES:
            self.dropped += 1
            return
        self.outbox.append(message)
        self.kept_bytes += len(message)
        while len(self.outbox) > MOST_KEPT or self.kept_bytes > MOST_KEPT_BYTES:
            self.kept_bytes -= len(self.outbox.popleft())
            self.dropped += 1

    def take_kept(self) -> list[bytes]:
        """All that was kept; it is forgotten here."""
        kept = list(self.outbox)
        self.outbox.clear()
        self.kept_bytes = 0
        return kept


def open_listener() -> socket.socket:
    """A socket that other nodes can connect to, on a port that is free.

    Raises:
        OSError: there is none.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("", 0))
    listener.listen(64)
    return listener


def own_addresses() -> tuple[str, ...]:
    """IPv4 addresses of this node, that of its name first, those that only it can reach left out."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                found.append(socket.inet_ntoa(packed[20:24]))
    return tuple(dict.fromkeys(address for address in found if not address.startswith("127.")))


def reachable(nodes: Sequence[Node]) -> list[tuple[str, ...]]:
    """The addresses of each node without those that others have too, such as bridges of containers.

    A node that has no address of its own keeps all: several nodes may be one host.
    """
    owners = Counter(address for node in nodes for address in set(node.addresses))
    own = [tuple(address for address in node.addresses if owners[address] == 1) for node in nodes]
    return [found or node.addresses for found, node in zip(own, nodes, strict=True)]


class SideChannel:
    """The connections of one watchdog."""

    def __init__(self, node: int, nodes: list[Node], secret: str, receive: Receiver) -> None:
        self.node, self._nodes, self._secret, self._receive = node, nodes, secret.encode(), receive
        self._addresses = reachable(nodes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(MOST_STRANGERS)
        self._is_ending = False
        self._warned: set[str] = set()
        self.peers = {number: Peer(heard_at=time.monotonic()) for number in range(len(nodes)) if number != node}

    async def start(self, listener: socket.socket | None) -> None:
        """Accept connections on a coordinating node, and connect to those before it. Closes the listener at the end."""
        if listener is not None and self.node < HEADS:
            self._run(self._accept(listener))
        elif listener is not None:
            listener.close()  # nobody connects to this node
        for head in range(min(HEADS, self.node, len(self._nodes))):
            self._run(self._keep_connected(head))
        await asyncio.sleep(0)

    def send(self, node: int, message: dict[str, Any]) -> None:
        """Send to a node now, or when there is a connection; a message that is only true now is not kept."""
        peer = self.peers[node]
        if self._is_ending:
            return
        if peer.line is not None and not peer.line.writer.is_closing():
            self._write(node, json.dumps(message).encode())
            return
        kept = {name: value for name, value in message.items() if name not in OF_NOW}
        peer.keep(json.dumps(kept).encode())

    def send_all(self, message: dict[str, Any]) -> None:
        """Send to all nodes that this one talks to."""
        for node in self.peers:
            if self.talks_to(node):
                self.send(node, message)

    def talks_to(self, node: int) -> bool:
        """True if the two nodes talk: coordinating nodes talk to all others, the rest only to those."""
        return node in self.peers and min(node, self.node) < HEADS

    def silent_seconds(self, node: int) -> float:
        """Seconds since the last message of a node."""
        return time.monotonic() - self.peers[node].heard_at

    async def flush(self, limit_seconds: float = 1.0) -> None:
        """Wait until what was sent has left, but not long."""
        await _together([line.writer.drain() for line in self._lines()], limit_seconds)

    async def finish(self, limit_seconds: float = 1.0) -> None:
        """Say goodbye, wait until the others have it, but not long, and end all connections. Nothing is received."""
        await self.flush(limit_seconds)
        lines = self._lines()
        self._say_bye()
        for line in lines:
            line.end()
        await _together([line.writer.wait_closed() for line in lines], limit_seconds)  # the others close theirs
        self.close()
        for line in lines:
            line.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Say goodbye and end all connections; `finish` also waits for the others. May be called at any time."""
        with contextlib.suppress(RuntimeError):  # the loop and all its connections have ended already
            self._say_bye()
            for line in self._lines():
                line.close()
            for task in self._tasks:
                task.cancel()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _lines(self) -> list[Line]:
        return [peer.line for peer in self.peers.values() if peer.line is not None]

    def _write(self, node: int, message: bytes) -> None:
        peer = self.peers[node]
        if peer.line is not None and not peer.line.write(message):
            peer.dropped += 1
            self._warn(
                f"messages to the watchdog of {self._name(node)} are dropped: too much waits, or one is too long"
            )

    def _take(self, node: int, packed: bytes) -> None:
        """Handle one message. Errors in it, or in handling it, must not end the connection."""
        peer = self.peers[node]
        peer.heard_at = time.monotonic()
        if self._is_ending:
            return
        if packed == _BYE:
            peer.said_bye = True
            return
        try:
            self._receive(node, json.loads(packed))
        except Exception as error:
            self._warn(f"a message of the watchdog of {self._name(node)} was not understood: {error!r}")

    def _say_bye(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            for line in self._lines():
                line.write(_BYE)

    def _name(self, node: int) -> str:
        return f"node {self._nodes[node].host}"

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < MOST_KEPT:
            self._warned.add(text)
            log.warning("%s", text)

    # -- connections -------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._warn(f"a connection between watchdogs failed: {task.exception()!r}")

    async def _accept(self, listener: socket.socket) -> None:
        """Take connections, each in a task of its own; those that find no room wait in the kernel's queue."""
        listener.setblocking(False)
        with listener:
            while True:
                await self._free.acquire()
                try:
                    taken, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError as error:  # such as no free descriptors
                    self._free.release()
                    self._warn(f"connections of watchdogs are not taken: {error}")
                    await asyncio.sleep(RETRY_SECONDS)
                else:
                    self._run(self._meet(taken))

    async def _meet(self, taken: socket.socket) -> None:
        """Serve one connection, if the other side proves that it belongs to the job."""
        found: tuple[int, Line] | None = None
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=taken)
            with _limited(writer, STRANGER_SECONDS):
                found = await welcome(reader, writer, self._secret, self.node, self.peers)
        except Exception as error:  # whatever strangers do, it must not cost more than their own connection
            log.debug("a connection was dropped: %r", error)
        finally:
            self._free.release()
            if found is None and writer is not None:
                writer.transport.abort()
            elif found is None:
                taken.close()
        if found is not None:
            await self._serve(*found)

    async def _keep_connected(self, node: int) -> None:
        """Connect to a coordinating node, and again when the connection is lost."""
        while not self._is_ending:
            try:
                line = await self._find(node)
                if line is not None:
                    await self._serve(node, line)
            except Exception as error:  # the next try may go better, and nobody else would make it
                self._warn(f"the connection to the watchdog of {self._name(node)} failed: {error!r}")
            await asyncio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.0))  # not all nodes at once

    async def _find(self, node: int) -> Line | None:
        """Try the addresses of a node, first the one that it was found at before.

        That the node refuses is believed of that one only, or of all together: an address may lead elsewhere.
        """
        peer, refusals = self.peers[node], 0
        addresses = sorted(self._addresses[node], key=lambda address: address != peer.address)
        for address in addresses:
            try:
                line = await self._connect(node, address)
            except ConnectionRefusedError:
                refusals += 1
                peer.refused = peer.refused or address == peer.address or refusals == len(addresses)
            except (OSError, EOFError) as error:
                log.debug("node %d was not found at %s: %r", node, address, error)
            else:
                peer.address = address
                return line
        return None

    async def _connect(self, node: int, address: str) -> Line:
        plain = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        writer: asyncio.StreamWriter | None = None
        try:
            plain.setblocking(False)
            opening = asyncio.get_running_loop().sock_connect(plain, (address, self._nodes[node].port))
            for problem in filter(None, await _together([opening], CONNECT_SECONDS)):
                raise problem  # noqa: TRY301
            reader, writer = await asyncio.open_connection(sock=plain)
            # The other side takes its connections one after the other when there are many strangers.
            with _limited(writer, CONNECT_SECONDS + STRANGER_SECONDS):
                return await greet(reader, writer, self._secret, self.node, node)
        except BaseException:
            (plain.close if writer is None else writer.transport.abort)()
            raise

    async def _serve(self, node: int, line: Line) -> None:
        """Take a node's messages until its connection ends."""
        peer = self.peers[node]
        if self._is_ending:
            line.abort()
            return
        if peer.line is not None:
            peer.line.abort()  # silently lost; the node has made a new one
        peer.line, peer.heard_at = line, time.monotonic()
        peer.was_connected, peer.is_closed, peer.said_bye, peer.refused = True, False, False, False
        for message in peer.take_kept():
            self._write(node, message)
        has_ended = False
        try:
            while (message_in := await line.read()) is not None:
                self._take(node, message_in)
            has_ended = True
        except ProofError as error:
            self._warn(f"the connection to the watchdog of {self._name(node)} was dropped: {error}")
        except (OSError, EOFError) as error:
            log.debug("the connection to node %d broke: %r", node, error)
        finally:
            (line.close if has_ended or self._is_ending else line.abort)()
            if peer.line is line:
                peer.line, peer.is_closed = None, has_ended or peer.said_bye


# `asyncio.wait_for` of Python 3.11 and before may lose a cancellation, and the task then never ends.


@contextlib.contextmanager
def _limited(writer: asyncio.StreamWriter, limit_seconds: float) -> Iterator[None]:
    """Abort the connection if the block takes longer."""
    timer = asyncio.get_running_loop().call_later(limit_seconds, writer.transport.abort)
    try:
        yield
    finally:
        timer.cancel()


async def _together(waits: Sequence[Coroutine[Any, Any, None]], limit_seconds: float) -> list[Exception | None]:
    """Wait for all at the same time, but not long; gives what went wrong with each."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=limit_seconds)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    late = TimeoutError(f"not within {limit_seconds} s")
    return [late if isinstance(result, asyncio.CancelledError) else cast(Any, result) for result in results]
