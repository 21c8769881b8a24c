"""Connections between watchdogs, over real sockets of this host."""

import asyncio
import contextlib
import gc
import json
import logging
import socket
import time

import pytest

from mpispeed.watchdog import handshake, side_channel
from mpispeed.watchdog.side_channel import Node, SideChannel, own_addresses, reachable
from tests.helpers.side_channels import SECRET, channels, until


@pytest.fixture
def quiet(caplog, capfd):
    """Nothing is said: no warning, no traceback, nothing that asyncio says of what was left."""
    yield
    gc.collect()
    said = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert (said, capfd.readouterr().err) == ([], "")


def test_every_node_talks_to_the_first_two():
    async def talk():
        async with channels(4) as (made, received, listeners):
            for channel, listener in zip(made, listeners, strict=True):
                await channel.start(listener)
            wanted = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
            await until(lambda: all(made[a].peers[b].writer and made[b].peers[a].writer for a, b in wanted))
            assert made[2].peers[3].writer is None
            for number, channel in enumerate(made):
                channel.send_all({"from": number})
            await until(lambda: [len(messages) for messages in received] == [3, 3, 2, 2])
            assert sorted(node for node, _ in received[0]) == [1, 2, 3]

    asyncio.run(talk())


def test_what_is_said_before_there_is_a_connection_is_kept_but_not_what_was_true_then():
    async def talk():
        async with channels(2) as (made, received, listeners):
            await made[0].start(listeners[0])
            made[1].send(0, {"votes": [1], "states": ["old"], "attention": True})
            await made[1].start(listeners[1])
            await until(lambda: received[0])
            assert received[0] == [(1, {"votes": [1]})]

    asyncio.run(talk())


def test_a_message_that_fails_does_not_end_the_connection(caplog):
    async def talk():
        async with channels(2) as (made, received, listeners):
            await made[0].start(listeners[0])
            await made[1].start(listeners[1])
            await until(lambda: made[1].peers[0].writer)
            made[0]._receive = lambda node, message: received[0].append(message["votes"])
            line = made[1].peers[0].line
            for bad in (b"{}", b"{}", b"no json", b"[" * 100_000):
                line.write(bad)
            made[1].send(0, {"votes": 3})
            await until(lambda: received[0])
            assert made[1].peers[0].line is line

    asyncio.run(talk())
    assert caplog.text.count("KeyError('votes')") == 1


def test_an_end_in_good_order_is_told_from_a_lost_line():
    async def talk(end):
        async with channels(2) as (made, _, listeners):
            await made[0].start(listeners[0])
            await made[1].start(listeners[1])
            await until(lambda: made[0].peers[1].writer)
            peer = made[0].peers[1]
            await end(made[1])
            await until(lambda: peer.writer is None)
            assert peer.was_connected
            return peer.is_closed, peer.said_bye

    async def close(channel):
        channel.close()
        channel.close()

    async def finish(channel):
        await channel.finish(60.0)
        channel.close()

    async def end_of_process(channel):
        channel.peers[0].line.close()

    async def broken(channel):
        channel.peers[0].writer.write(b"\0")
        channel.peers[0].line.close()

    ends = (close, finish, end_of_process, broken)
    assert [asyncio.run(talk(end)) for end in ends] == [(True, True), (True, True), (True, False), (False, False)]


def test_the_last_words_arrive_and_nothing_is_left(quiet):
    async def talk():
        async with channels(3) as (made, received, listeners):
            for channel, listener in zip(made, listeners, strict=True):
                await channel.start(listener)
            await until(lambda: made[2].peers[0].writer and made[2].peers[1].writer and made[1].peers[0].writer)
            for channel in made:
                channel.send_all({"deaths": ["x" * 3_000_000], "ended": True})
            begin = time.monotonic()
            await asyncio.gather(*(channel.finish(60.0) for channel in made[1:]))
            assert time.monotonic() - begin < 30.0
            await until(lambda: [node for node, _ in sorted(received[0], key=lambda told: told[0])] == [1, 2])
            assert [made[0].peers[node].said_bye for node in (1, 2)] == [True, True]
            await made[0].finish()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            made[0].send(1, {"late": True})
            assert not made[0].peers[1].outbox
            return made[0]

    asyncio.run(talk()).close()


class CutShort(Exception):
    """Ends a run."""


# A connection that is taken in the very moment of the end is left to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_run_that_ends_at_any_time_ends_without_a_word(quiet):
    async def talk(ticks, made):
        async with channels(3) as (channels_made, _, listeners):
            made += channels_made
            for channel, listener in zip(made, listeners, strict=True):
                await channel.start(listener)
            for _ in range(ticks):
                await asyncio.sleep(0)
            if ticks % 2:
                raise CutShort  # what runs is cancelled; else all is finished

    for ticks in range(60):
        made = []
        with contextlib.suppress(CutShort):
            asyncio.run(talk(ticks, made))
        for channel in made:
            channel.close()
        gc.collect()


@contextlib.asynccontextmanager
async def seeker(addresses, port):
    """A channel of node 1 that looks for node 0 at these addresses."""
    nodes = [Node("h0", addresses, port, (0,)), Node("h1", ("127.0.0.9",), 1, (1,))]
    channel = SideChannel(1, nodes, SECRET, lambda *_: None)
    await channel.start(None)
    yield channel
    await channel.finish()


def bound_to_one_port(*addresses):
    """A socket for each address, all bound to one port that is free at all of them; none listens."""
    while True:
        bound, port = [], 0
        with contextlib.suppress(OSError):  # another process has the port at one of the others
            for address in addresses:
                bound.append(socket.socket())
                bound[-1].bind((address, port))
                port = bound[-1].getsockname()[1]
            return bound
        for each in bound:
            each.close()


def test_a_node_refuses_if_all_its_addresses_do():
    async def talk():
        with contextlib.ExitStack() as ends:
            first, _ = map(ends.enter_context, bound_to_one_port("127.0.0.1", "127.0.0.2"))
            async with seeker(("127.0.0.1", "127.0.0.2"), first.getsockname()[1]) as channel:
                await until(lambda: channel.peers[0].refused)

    asyncio.run(talk())


def test_one_wrong_address_that_refuses_says_nothing(monkeypatch):
    monkeypatch.setattr(side_channel, "RETRY_SECONDS", 0.05)
    tried = []

    async def connect(self, node, address):
        tried.append(address)
        return await real(self, node, address)

    real = SideChannel._connect
    monkeypatch.setattr(SideChannel, "_connect", connect)

    async def talk():
        with contextlib.ExitStack() as ends:
            silent, listener = map(ends.enter_context, bound_to_one_port("127.0.0.1", "127.0.0.2"))
            listener.listen()  # a node that is there, but at its second address only: the first one refuses
            nodes = [Node("h0", (), 0, (0,)), Node("h1", (), 0, (1,))]
            head = SideChannel(0, nodes, SECRET, lambda *_: None)
            async with seeker(("127.0.0.1", "127.0.0.2"), listener.getsockname()[1]) as channel:
                peer = channel.peers[0]
                await until(lambda: len(tried) > 2)  # it does not answer yet
                assert not peer.refused
                monkeypatch.setattr(side_channel, "CONNECT_SECONDS", 0.05)
                await head.start(listener)
                await until(lambda: peer.writer)
                assert not peer.refused
                assert peer.address == "127.0.0.2"
                tried.clear()
                silent.listen()  # and at the first there is something else
                await head.finish()
                await until(lambda: peer.refused)
                assert tried[0] == "127.0.0.2"

    monkeypatch.setattr(side_channel, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(side_channel, "STRANGER_SECONDS", 0.1)
    asyncio.run(talk())


def test_nothing_ends_the_search_for_a_node(monkeypatch, caplog):
    monkeypatch.setattr(side_channel, "RETRY_SECONDS", 0.05)
    failures = [ValueError("odd"), OverflowError("too large")]

    async def connect(self, node, address):
        if failures:
            raise failures.pop()
        return await real(self, node, address)

    real = SideChannel._connect
    monkeypatch.setattr(SideChannel, "_connect", connect)

    async def talk():
        async with channels(2) as (made, _, listeners):
            await made[0].start(listeners[0])
            await made[1].start(listeners[1])
            await until(lambda: made[0].peers[1].writer)

    asyncio.run(talk())
    assert caplog.text.count("the connection to the watchdog of node h0 failed") == 2


def test_addresses_that_nodes_have_in_common_lead_nowhere():
    def node(*addresses):
        return Node("h", addresses, 1, (0,))

    bridge = "172.17.0.1"
    assert reachable([node(bridge, "10.0.0.1"), node("10.0.0.2", bridge)]) == [("10.0.0.1",), ("10.0.0.2",)]
    assert reachable([node(bridge), node("10.0.0.2", bridge)]) == [(bridge,), ("10.0.0.2",)]
    assert reachable([node("10.0.0.1"), node("10.0.0.1")]) == [("10.0.0.1",), ("10.0.0.1",)]


def test_what_is_kept_for_a_node_that_never_comes_is_bounded():
    nodes = [Node("h0", (), 0, (0,)), Node("h1", (), 0, (1,))]
    channel = SideChannel(1, nodes, SECRET, lambda *_: None)
    peer = channel.peers[0]
    for number in range(100):
        channel.send(0, {"votes": [number, "x" * 100_000]})
    assert (
        side_channel.MOST_KEPT_BYTES - 110_000
        < peer.kept_bytes
        == sum(map(len, peer.outbox))
        <= side_channel.MOST_KEPT_BYTES
    )
    assert peer.dropped == 100 - len(peer.outbox)
    assert json.loads(peer.outbox[-1])["votes"][0] == 99
    channel.send(0, {"votes": "x" * (side_channel.MOST_KEPT_BYTES + 1)})
    assert peer.outbox
    for number in range(5000):
        channel.send(0, {"votes": number})
        channel.send(0, {"votes": number, "attention": True})
    assert len(peer.outbox) == side_channel.MOST_KEPT
    assert json.loads(peer.outbox[0])["votes"] == 4000


def test_a_node_that_takes_nothing_does_not_fill_the_memory(monkeypatch, caplog):
    monkeypatch.setattr(handshake, "MOST_BUFFERED_BYTES", 1 << 20)

    async def talk():
        async with channels(2) as (made, received, listeners):
            await made[0].start(listeners[0])
            await made[1].start(listeners[1])
            await until(lambda: made[0].peers[1].writer)
            made[0].peers[1].writer.transport.pause_reading()
            peer = made[1].peers[0]
            for _ in range(100):
                made[1].send(0, {"text": "x" * 500_000})
                await asyncio.sleep(0)
            assert peer.writer.transport.get_write_buffer_size() < 2 << 20
            assert 0 < peer.dropped < 100
            made[0].peers[1].writer.transport.resume_reading()
            await until(lambda: len(received[0]) == 100 - peer.dropped)  # those before and after are whole

    asyncio.run(talk())
    assert caplog.text.count("are dropped") == 1


def test_a_large_message_goes_through():
    async def talk():
        async with channels(2) as (made, received, listeners):
            await made[0].start(listeners[0])
            await made[1].start(listeners[1])
            await until(lambda: made[1].peers[0].writer)
            made[1].send(0, {"text": "x" * 5_000_000})
            await until(lambda: received[0])
            assert len(json.dumps(received[0][0][1])) > 5_000_000

    asyncio.run(talk())


def test_addresses_are_those_that_others_can_reach():
    assert not any(address.startswith("127.") for address in own_addresses())
