"""Who does not belong to the job: strangers, impostors, and those who change what passes."""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import struct
from pathlib import Path

import pytest

from mpispeed.watchdog import side_channel
from mpispeed.watchdog.handshake import _CHALLENGE, _HELLO, _NAME, _derive, greet
from mpispeed.watchdog.side_channel import Node, SideChannel, open_listener
from tests.helpers.side_channels import LIMIT_SECONDS, SECRET, channels, until


@pytest.fixture
def quiet(caplog, capfd):
    """Nothing is said: no warning, no traceback, nothing that asyncio says of what was left."""
    yield
    gc.collect()
    said = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert (said, capfd.readouterr().err) == ([], "")


def test_who_does_not_know_the_secret_is_dropped():
    async def talk():
        async with channels(2, [SECRET, "other"]) as (made, received, listeners):
            await made[0].start(listeners[0])
            await made[1].start(listeners[1])
            made[1].send_all({"order": {}})
            await asyncio.sleep(0.3)
            assert received[0] == []
            assert made[0].peers[1].writer is made[1].peers[0].writer is None

    asyncio.run(talk())


DEEP = b"[" * 1000
NOISES = [
    b"",
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100,
    b'{"node": Infinity, "proof": 1}\n' * 4,
    DEEP,
    struct.pack("!I", len(DEEP)) + DEEP,
    b"\xff\xfe" * 500_000,
    _HELLO.pack(_NAME, 7, 0, bytes(32)),
    _HELLO.pack(_NAME, 1, 0, bytes(32)) + bytes(32),
    _HELLO.pack(_NAME, 1, 1, bytes(32)) + bytes(32),
]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


async def is_dropped(reader):
    """Whether the other side ends the connection."""
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), LIMIT_SECONDS)  # until its end
    return True


def test_noise_is_dropped_without_a_word_or_a_leak(quiet, monkeypatch):
    monkeypatch.setattr(side_channel, "STRANGER_SECONDS", 0.1)

    async def talk():
        async with channels(2) as (made, received, listeners):
            await made[0].start(listeners[0])
            port, before = listeners[0].getsockname()[1], open_files()
            for noise, ends in itertools.product(NOISES, (False, True)):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(noise)
                if ends:
                    writer.write_eof()
                assert await is_dropped(reader)
                writer.transport.abort()
            await until(lambda: open_files() == before)
            assert made[0].peers[1].writer is None
            await made[1].start(listeners[1])
            made[1].send(0, {"votes": []})
            await until(lambda: received[0])

    asyncio.run(talk())


def test_crowds_of_silent_strangers_do_not_keep_a_node_out(monkeypatch):
    monkeypatch.setattr(side_channel, "STRANGER_SECONDS", 1.0)
    monkeypatch.setattr(side_channel, "MOST_STRANGERS", 8)

    async def talk():
        async with channels(2) as (made, received, listeners):
            await made[0].start(listeners[0])
            before, port = open_files(), listeners[0].getsockname()[1]
            crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
            await until(lambda: open_files() == before + 12 + 8)
            await asyncio.sleep(0.05)
            assert open_files() == before + 12 + 8  # and no more
            await made[1].start(listeners[1])
            made[1].send(0, {"votes": []})
            await until(lambda: received[0])
            for _, writer in crowd:
                writer.transport.abort()

    asyncio.run(talk())


@contextlib.asynccontextmanager
async def impostor(answer):
    """Something that takes connections at the port of node 0, and a channel of node 1 that connects to it."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    nodes = [Node("h0", ("127.0.0.1",), server.sockets[0].getsockname()[1], (0,)), Node("h1", ("127.0.0.1",), 1, (1,))]
    received = []
    channel = SideChannel(1, nodes, SECRET, lambda node, message: received.append((node, message)))
    await channel.start(None)
    yield channel, received
    await channel.finish()
    server.close()


def test_an_impostor_is_not_believed_and_learns_no_proof(quiet):
    async def talk():
        heard = []

        async def answer(reader, writer):
            heard.append(await reader.readexactly(_HELLO.size))
            writer.write(bytes(_CHALLENGE.size) + b"order" * 100)
            heard.append(await reader.read())
            writer.close()

        async with impostor(answer) as (channel, received):
            channel.send(0, {"deaths": ["private"]})
            await until(lambda: len(heard) == 2)
            name, client, server, _ = _HELLO.unpack(heard[0])
            assert (name, client, server, heard[1]) == (_NAME, 1, 0, b"")
            peer = channel.peers[0]
            assert not (peer.writer or peer.was_connected or peer.refused or received)

    asyncio.run(talk())


def relay_to(port, change):
    """A relay between a node and the real one, which changes what comes from the latter."""

    async def copy(reader, writer, change):
        try:
            while data := await reader.read(1 << 16):
                writer.write(change(data))
        finally:
            writer.close()

    async def answer(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(OSError):
            await asyncio.gather(copy(reader, far_writer, bytes), copy(far_reader, writer, change))

    return answer


@pytest.mark.parametrize("way", ["none", "flip", "repeat"])
def test_a_message_that_is_not_the_senders_ends_the_connection(way, caplog):
    def change(data):
        if b"order" not in data or way == "none":
            return data
        return data.replace(b"order", b"ordes") if way == "flip" else data + data

    async def talk():
        async with channels(2) as (made, received, listeners):
            await made[0].start(listeners[0])
            async with impostor(relay_to(listeners[0].getsockname()[1], change)) as (channel, received):
                await until(lambda: made[0].peers[1].writer and channel.peers[0].writer)
                made[0].send(1, {"votes": [1]})
                await until(lambda: received)
                made[0].send(1, {"order": 1})
                if way != "none":
                    await until(lambda: channel.peers[0].writer is None)
                else:
                    await until(lambda: len(received) == 2)
                assert received == [(0, {"votes": [1]})] + [(0, {"order": 1})] * (way != "flip")
                assert not channel.peers[0].is_closed

    asyncio.run(talk())
    assert ("has not the hash" in caplog.text) == (way != "none")


def test_a_proof_holds_for_one_connection_and_direction_only():
    facts = _HELLO.pack(_NAME, 1, 0, b"a" * 32) + b"b" * 32
    others = [
        _HELLO.pack(_NAME, 2, 0, b"a" * 32) + b"b" * 32,
        _HELLO.pack(_NAME, 1, 2, b"a" * 32) + b"b" * 32,
        _HELLO.pack(_NAME, 1, 0, b"b" * 32) + b"a" * 32,
    ]
    purposes = (b"client", b"server", b"key-up", b"key-down")
    made = {_derive(b"secret", purpose, known) for purpose in purposes for known in (facts, *others)}
    assert len(made) == 16


def test_a_node_does_not_answer_for_another():
    async def talk():
        with open_listener() as listener:
            port = listener.getsockname()[1]
            nodes = [Node(f"h{i}", ("127.0.0.1",), port, (i,)) for i in range(3)]
            head, other = (SideChannel(i, nodes, SECRET, lambda *_: None) for i in (0, 2))
            await head.start(listener)
            await other.start(None)
            await until(lambda: other.peers[0].writer)
            await asyncio.sleep(0.1)
            assert not other.peers[1].was_connected
            await other.finish()
            await head.finish()

    asyncio.run(talk())


def test_a_new_connection_of_a_node_takes_the_place_of_the_old():
    async def talk():
        async with channels(2) as (made, _, listeners):
            await made[0].start(listeners[0])
            peer, lines = made[0].peers[1], []
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", listeners[0].getsockname()[1])
                lines.append(await greet(reader, writer, SECRET.encode(), 1, 0))
                before = peer.line
                await until(lambda before=before: peer.line is not before)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(lines[0].read(), LIMIT_SECONDS) is None
            assert not peer.is_closed
            made[0].send(1, {"votes": 1})
            assert json.loads(await lines[1].read()) == {"votes": 1}
            for line in lines:
                line.close()

    asyncio.run(talk())
