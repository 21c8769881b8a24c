"""Mutual proof of two watchdogs that they belong to the same job, and the authenticated line between them.

Both sides send a nonce; each proves by HMAC-SHA256 that it knows the secret of the job, the server first. Roles, both
node numbers and both nonces are inside of each proof, so it is of use for this one connection only. The keys of both
directions are derived from the same facts. Until then everything has a fixed size and nothing is parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import struct
from collections.abc import Container

LINE_BYTES = 64 << 20
"""The longest message; only watchdogs with a proof can send one."""

MOST_BUFFERED_BYTES = 16 << 20
"""Most bytes that wait for a node that reads nothing; further messages are dropped to spare memory."""

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_NAME = b"mpispeed-side-1\0"
_HELLO = struct.Struct(f"!16sII{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"!{NONCE_BYTES}s{PROOF_BYTES}s")
_LENGTH = struct.Struct("!I")
_COUNTER = struct.Struct("!Q")


class ProofError(ConnectionError):
    """The other side is no watchdog of this job, or a message was changed on the way."""


class Line:
    """A connection between two watchdogs. A hash covers each message and its number: none is forged or repeated."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key_in: bytes, key_out: bytes
    ) -> None:
        self.writer, self._reader = writer, reader
        self._key_in, self._key_out = key_in, key_out
        self._count_in = self._count_out = 0
        writer.transport.set_write_buffer_limits(high=0)  # so that `drain` waits until all has left

    def write(self, message: bytes) -> bool:
        """Send a message; False if it was dropped: it is too long, too much waits, or the connection is ending."""
        transport = self.writer.transport
        if transport.is_closing() or len(message) > LINE_BYTES:
            return False
        if transport.get_write_buffer_size() > MOST_BUFFERED_BYTES:
            return False
        proof = _line_proof(self._key_out, self._count_out, message)
        self._count_out += 1
        self.writer.write(_LENGTH.pack(len(message)) + proof + message)
        return True

    async def read(self) -> bytes | None:
        """Return the next message; None if the other side ended the connection between two messages.

        Raises:
            ProofError: the message is not what the other side has sent.
            EOFError: the connection ended inside of a message.
            OSError: it broke.
        """
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None
        if size > LINE_BYTES:
            msg = f"a message of {size} bytes is announced, more than {LINE_BYTES}"
            raise ProofError(msg)
        proof = await self._reader.readexactly(PROOF_BYTES)
        message = await self._reader.readexactly(size)
        if not hmac.compare_digest(proof, _line_proof(self._key_in, self._count_in, message)):
            msg = f"message {self._count_in} has not the hash of its sender"
            raise ProofError(msg)
        self._count_in += 1
        return message

    def end(self) -> None:
        """End sending; messages of the other side still arrive."""
        with contextlib.suppress(OSError):
            self.writer.write_eof()

    def close(self) -> None:
        """Close the connection; pending data are still sent."""
        self.writer.close()

    def abort(self) -> None:
        """End the connection at once."""
        self.writer.transport.abort()


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, client: int, server: int
) -> Line:
    """Prove to a server which node this is, after the server has proven it. Not collective.

    Raises:
        ProofError: it is not that node of this job.
        EOFError: it has ended the connection, as it does when it does not believe.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(_HELLO.pack(_NAME, client, server, nonce))
    others, proof = _CHALLENGE.unpack(await reader.readexactly(_CHALLENGE.size))
    facts = _HELLO.pack(_NAME, client, server, nonce) + others
    if not hmac.compare_digest(proof, _derive(secret, b"server", facts)):
        msg = f"who answers for node {server} does not know the secret of this job"
        raise ProofError(msg)
    writer.write(_derive(secret, b"client", facts))
    return Line(reader, writer, _derive(secret, b"key-down", facts), _derive(secret, b"key-up", facts))


async def welcome(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, server: int, clients: Container[int]
) -> tuple[int, Line]:
    """Find out which node has connected, and prove to it that this is node `server`. Not collective.

    Raises:
        ProofError: it is none of `clients`, or wants another node.
        EOFError: it has ended the connection.
    """
    hello = await reader.readexactly(_HELLO.size)
    name, client, wanted, _ = _HELLO.unpack(hello)
    if name != _NAME or wanted != server or client not in clients:
        msg = "who has connected is no watchdog that belongs here"
        raise ProofError(msg)
    nonce = secrets.token_bytes(NONCE_BYTES)
    facts = hello + nonce
    writer.write(_CHALLENGE.pack(nonce, _derive(secret, b"server", facts)))
    if not hmac.compare_digest(await reader.readexactly(PROOF_BYTES), _derive(secret, b"client", facts)):
        msg = f"who calls itself node {client} does not know the secret of this job"
        raise ProofError(msg)
    return client, Line(reader, writer, _derive(secret, b"key-up", facts), _derive(secret, b"key-down", facts))


def _derive(secret: bytes, purpose: bytes, facts: bytes) -> bytes:
    return hmac.digest(secret, purpose.ljust(16, b"\0") + facts, "sha256")


def _line_proof(key: bytes, count: int, message: bytes) -> bytes:
    proof = hmac.new(key, _COUNTER.pack(count), hashlib.sha256)
    proof.update(message)
    return proof.digest()
